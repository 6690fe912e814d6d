"""The pages of one host pool at the server: which it has, loads, stores. Every call ends by a deadline, as a miss if in
no other way.

A pool is an instance with one worker, so that several pools of one rank come and go by themselves. A call returns only
when no copy touches its pages any more.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.release_outbox import ReleaseOutbox
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_CHUNKS_PER_CALL
from lmcache.device.cpu import PagedGroup
from lmcache.errors import LMCacheError, RemoteError, ServerUnavailable
from lmcache.integration.engine.connection_settings import ConnectionSettings
from lmcache.integration.engine.connector_metadata import GroupLoad, LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.transfer_backend import COPIED, UNREADABLE
from lmcache.integration.engine.worker_side import WorkerSide
from lmcache.protocol.messages import (
    Clear,
    EndSession,
    ErrorCode,
    HelloReply,
    LookupKeys,
    LookupReply,
    ProbeKeys,
    RegisterInstance,
    Release,
)
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.sglang")

START_SECONDS = 3.0  # an engine starts uncached without a server
PROBE_SECONDS = 2.0  # for L2 to say what it has
LOAD_SECONDS = 10.0  # for L2 to bring it into L1
CLEAR_SECONDS = 65.0
_GRACE_SECONDS = 1.0  # for answers to travel
_LOOK_SECONDS = 1.0
_BLOCK_BYTES = 8
_CALLS_KEPT = 1024
_WORKER = 0


@dataclass
class PoolTraffic:
    """(pages, GB/s) of the calls that moved some since this was last taken, the latest ones."""

    loads: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_CALLS_KEPT))
    stores: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_CALLS_KEPT))


class PagePool:
    """Thread-safe. Hashes are 32 bytes a page, pages packed i64 numbers; what is said of pages is one byte each."""

    def __init__(
        self,
        settings: ConnectionSettings,
        identity: WorkerIdentity,
        group: PagedGroup,
        cache_salt: str,
        *,
        engine: str = "",
        counts_lookups: bool = True,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> None:
        """`engine`: for operators. `counts_lookups`: probes are counted as lookups of the pages' tokens."""
        self.page_tokens = group.block_tokens
        self.page_bytes = sum(layer.content_bytes for layer in group.layers)
        self._instance_id = identity.instance_id
        self._salt = cache_salt
        self._rank = identity.kv_rank
        self._counted_tokens = group.block_tokens if counts_lookups else 0
        self._clock = environment.clock
        self._numbers = itertools.count()
        self._lock = environment.lock()  # guards the outbox and the traffic
        self._traffic = PoolTraffic()
        self._once = LogLimiter()
        self._said = LogLimiter(60.0, environment.clock)

        def make_client(on_new_server: Callable[[Client], None]) -> Client:
            client = settings.client(on_new_server, environment)
            client.declare(
                RegisterInstance(
                    identity.instance_id,
                    identity.model_name,
                    identity.kv_ranks,
                    object_groups=1,
                    heartbeat_interval_seconds=client.heartbeat_interval_seconds,
                    engine=engine,
                )
            )
            return client

        self._worker = WorkerSide(make_client, identity, [group], environment=environment)
        self._client = self._worker.client
        self._outbox = ReleaseOutbox(self._client, environment)
        try:
            self._client.connect(START_SECONDS)
        except LMCacheError as error:
            log.warning("SGLang starts without the LMCache server, and is cached when it is there: %s", error)

    # ---- what is there -----------------------------------------------------------------------------------------------
    def probe(self, hashes: bytes) -> bytes:
        """Not 0 for each page that the server has in some tier."""
        found = b""
        for part in _parts(hashes, CHUNK_HASH_BYTES):
            message = ProbeKeys(self._instance_id, _WORKER, self._salt, part, PROBE_SECONDS, self._counted_tokens)
            tiers = bytes(len(part) // CHUNK_HASH_BYTES)
            try:
                reply = self._client.call("probe_keys", message, PROBE_SECONDS + _GRACE_SECONDS)
                if len(reply.tiers) == len(tiers):
                    tiers = reply.tiers
            except LMCacheError as error:
                self._note_failure("what it has", error)
            found += tiers
        return found

    # ---- loads -------------------------------------------------------------------------------------------------------
    def load(self, hashes: bytes, pages: bytes) -> list[bool]:
        """Whether each page holds what was stored under its hash. What follows a page that is missing is not loaded;
        a page that is not loaded may hold anything."""
        return self._move(self._load, hashes, pages, lambda traffic: traffic.loads)

    def _load(self, hashes: bytes, pages: bytes) -> list[bool]:
        count = len(hashes) // CHUNK_HASH_BYTES
        hello = self._client.hello
        if hello is None:
            return [False] * count
        request_id = f"load-{next(self._numbers)}"
        message = LookupKeys(self._instance_id, _WORKER, request_id, self._salt, hashes, LOAD_SECONDS)
        try:
            reply = self._client.call("lookup_keys", message, LOAD_SECONDS + _GRACE_SECONDS)
        except LMCacheError as error:
            self._note_failure("pages", error)
            self._end(request_id, twice=isinstance(error, ServerUnavailable))
            return [False] * count
        if not 0 < reply.chunks <= count:
            self._end(request_id)
            return [False] * count
        copied = self._copy(request_id, hello, reply, hashes, pages)
        unreadable = [page for page, flag in enumerate(copied) if flag == UNREADABLE]
        if unreadable:
            if self._once.due("unreadable"):
                log.error("L1 held a page that is not what was stored: it is computed again (said once)")
            with self._lock:
                if hello is self._client.hello:  # the next server gives the same number to another lease
                    self._outbox.send("release", Release(self._instance_id, reply.lease, unreadable))
        self._end(request_id)
        return [flag == COPIED for flag in copied] + [False] * (count - len(copied))

    def _copy(self, request_id: str, hello: HelloReply, reply: LookupReply, hashes: bytes, pages: bytes) -> bytes:
        """One byte a page of the hit; empty when nothing was copied."""
        backend = self._worker.backend
        if backend is None or backend.server_epoch != hello.server_epoch or hello is not self._client.hello:
            return b""
        order = LoadOrder(
            request_id,
            hello.server_epoch,
            self._salt,
            reply.chunks,
            hashes[: reply.chunks * CHUNK_HASH_BYTES],
            reply.slots,
            (GroupLoad(0, pages[: reply.chunks * _BLOCK_BYTES]),),
            reply.lease,
            first_rank=self._rank,
        )
        try:
            (job,) = backend.submit_load(order, None)
        except (LMCacheError, ValueError) as error:
            self._note_failure("pages", error)
            return b""
        while (copied := job.wait(_LOOK_SECONDS)) is None:
            pass
        return copied

    # ---- stores ------------------------------------------------------------------------------------------------------
    def store(self, hashes: bytes, pages: bytes) -> list[bool]:
        """Whether the server has each page now."""
        return self._move(self._store, hashes, pages, lambda traffic: traffic.stores)

    def _store(self, hashes: bytes, pages: bytes) -> list[bool]:
        count = len(hashes) // CHUNK_HASH_BYTES
        backend = self._worker.backend
        if backend is None:
            return [False] * count
        order = StoreOrder(next(self._numbers), backend.server_epoch, self._salt, hashes, (pages,))
        stored = self._worker.store(order)  # each step of it has its own deadline
        self._worker.report()  # forgets what is said above already
        return [flag == COPIED for flag in stored] or [False] * count

    # ---- the rest ----------------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Empties the server, as far as it answers in time."""
        try:
            self._client.call("clear", Clear(), CLEAR_SECONDS)
        except LMCacheError as error:
            log.warning("The LMCache server was not cleared: %s", error)

    def take_traffic(self) -> PoolTraffic:
        with self._lock:
            traffic, self._traffic = self._traffic, PoolTraffic()
        return traffic

    def check_idle(self) -> None:
        """AssertionError if a store is under way, or the server still has to hear of the end of a load or a store."""
        unconfirmed = self._outbox.retry()
        assert not unconfirmed, f"{unconfirmed} leases are not confirmed to be released"
        self._worker.check_idle()

    def close(self) -> None:
        """Returns when no copy touches the pages any more."""
        self._outbox.close()
        self._worker.close()

    def _end(self, request_id: str, *, twice: bool = False) -> None:
        """Gives back what the lookup holds. Whichever server got it: to others the name means nothing."""
        with self._lock:
            self._outbox.send("end_session", EndSession(self._instance_id, request_id), twice=twice)

    def _note_failure(self, subject: str, error: Exception) -> None:
        if isinstance(error, RemoteError) and error.code == ErrorCode.UNKNOWN_METHOD:
            if self._once.due("old server"):
                log.error("This LMCache server is of a version without SGLang's pages: upgrade it. Nothing is cached.")
        elif self._said.due("failure"):
            log.warning("The LMCache server did not give %s, which count as missing: %s", subject, error)

    def _move(
        self,
        move_part: Callable[[bytes, bytes], list[bool]],
        hashes: bytes,
        pages: bytes,
        calls: Callable[[PoolTraffic], deque[tuple[int, float]]],
    ) -> list[bool]:
        """Whether each page was moved: part by part, to the end of the first part that lacks a page. `calls`: where in
        the traffic the call is noted."""
        moved: list[bool] = []
        started = self._clock.monotonic()
        for part, blocks in zip(_parts(hashes, CHUNK_HASH_BYTES), _parts(pages, _BLOCK_BYTES), strict=True):
            moved += move_part(part, blocks)
            if not all(moved):
                break
        seconds, count = self._clock.monotonic() - started, sum(moved)
        if count and seconds > 0:
            with self._lock:
                calls(self._traffic).append((count, count * self.page_bytes / seconds / 1e9))
        return moved + [False] * (len(hashes) // CHUNK_HASH_BYTES - len(moved))


def _parts(packed: bytes, item_bytes: int) -> Sequence[bytes]:
    """Splits packed items into parts of as many as one call may name."""
    step = MAX_CHUNKS_PER_CALL * item_bytes
    return [packed[first : first + step] for first in range(0, len(packed), step)]
