"""Lookups: tokens in, leased slots out.

L1 is asked first and what it has is leased at once. The missing suffix goes to the storage loop; the answer waits until
that is final or the deadline has come. What was leased for an answer that nobody wants any more is released when
it turns up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.outcome import MissReason
from lmcache.errors import RemoteError
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import Append, AppendReply, Empty, EndSession, ErrorCode, Lookup, LookupReply, Release
from lmcache.service.keyspace import Keyspace, TenantCounters
from lmcache.service.registry import Instance, Registry
from lmcache.service.session import Lease, Session
from lmcache.service.sessions import Sessions
from lmcache.service.token_chain import TokenChain
from lmcache.telemetry.bus import EventBus
from lmcache.telemetry.events import LookupEvent
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.transport.deferred import Deferred
from lmcache.transport.timers import Timer

log = logging.getLogger("lmcache.service")

MAX_LOOKUP_DEADLINE_SECONDS = 600.0
_GRACE_SECONDS = 0.25  # the storage loop keeps the deadline itself; this is for a loop that does not answer
_SLOT_BYTES = 8


class Prefetcher(Protocol):
    """The storage loop, as far as lookups need it."""

    def prefetch(self, request: PrefetchRequest, on_done: Callable[[PrefetchResult], None]) -> Callable[[], None]: ...


class Loop(Protocol):
    """The message loop, as far as lookups need it."""

    def post(self, action: Callable[[], None]) -> None: ...
    def call_later(self, delay_seconds: float, action: Callable[[], None]) -> Timer: ...


class _Hit(NamedTuple):
    """A leased prefix. `offsets` is u64 [namespace][chunk]."""

    parts: tuple[int, ...] = ()
    chunks: int = 0
    offsets: bytes = b""


class _Asked(NamedTuple):
    """A lookup. `hashes` are those of the session when it came; the session may have grown when it is answered."""

    instance: Instance
    session: Session
    counters: TenantCounters
    hashes: bytes
    total_chunks: int  # that a hit may have


@dataclass
class _Waiting:
    """A lookup whose suffix is being loaded."""

    asked: _Asked
    keyspace: Keyspace
    in_l1: _Hit
    deferred: Deferred = field(default_factory=Deferred)
    timer: Timer | None = None
    stop_loading: Callable[[], None] = lambda: None
    over: bool = False


class LookupService:
    """Handlers of lookup, append, release and end_session."""

    def __init__(
        self,
        registry: Registry,
        l1: L1Store,
        hasher: ChunkHasher,
        prefetcher: Prefetcher | None,
        loop: Loop,
        events: EventBus | None,
        metrics: Metrics,
        clock: Clock,
        lease_ttl_seconds: float,
    ) -> None:
        """Without a prefetcher (no L2 adapter) L1 decides alone."""
        self._registry = registry
        self._l1 = l1
        self._hasher = hasher
        self._prefetcher = prefetcher
        self._loop = loop
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._lease_ttl_seconds = lease_ttl_seconds
        self._sessions = Sessions(hasher, self._settle)
        self._misses = {reason: metrics.misses.labels(reason.value) for reason in MissReason}
        registry.on_scheduler_gone = self.end_all_sessions

    @property
    def session_bytes(self) -> int:
        return self._sessions.size_bytes

    def check(self) -> None:
        """Asserts that what is counted for sessions is what they have. For tests."""
        self._sessions.check()

    # ---- handlers ----------------------------------------------------------------------------------------------------
    def lookup(self, message: Lookup) -> LookupReply | Deferred:
        if not math.isfinite(message.deadline_seconds):
            raise RemoteError(ErrorCode.BAD_REQUEST, "The deadline must be a number of seconds.")
        instance, scheduler = self._registry.scheduled(message.instance_id)
        plan = self._sessions.plan(instance, message)
        total = plan.growth.chunks
        if total > limits.MAX_CHUNKS_PER_CALL:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A lookup covers at most {limits.MAX_CHUNKS_PER_CALL} chunks.")
        tenant = self._registry.tenant(instance, scheduler, message.cache_salt)
        keyspace = self._registry.whole_keyspace(instance, message.cache_salt)
        if keyspace is not None and keyspace.tails:
            total = min(total, max(0, plan.growth.tokens - 1) // self._hasher.chunk_tokens)
        slots = total * len(keyspace.namespaces) if keyspace is not None else 0
        if slots > limits.MAX_SLOTS_PER_CALL:
            raise RemoteError(
                ErrorCode.TOO_LARGE, f"A lookup covers at most {limits.MAX_SLOTS_PER_CALL} chunks times namespaces."
            )
        # While it waits its hashes are held twice, once for the engine and once for the storage loop.
        session = self._sessions.grow(plan, 2 * total * CHUNK_HASH_BYTES + slots * _SLOT_BYTES)
        asked = _Asked(instance, session, tenant.counters, session.chain.hashes, total)
        wanted_hashes = asked.hashes[: total * CHUNK_HASH_BYTES]
        if keyspace is None or not total:
            reason = MissReason.INSTANCE_INCOMPLETE if total else MissReason.TOO_SHORT
            return self._answer(asked, None, _Hit(), 0, reason)
        lease_deadline = self._clock.monotonic() + self._lease_ttl_seconds
        lease, chunks, offsets = self._l1.core.acquire(
            scheduler.owner, keyspace.digests, wanted_hashes, lease_deadline, True, keyspace.tails
        )
        in_l1 = _Hit((lease,) if lease else (), chunks, offsets)
        if chunks == total:
            return self._answer(asked, keyspace, in_l1, chunks, None)
        if self._prefetcher is None or message.recompute or message.deadline_seconds <= 0:
            late = MissReason.RECOMPUTE_FASTER if message.recompute else MissReason.L2_DEADLINE
            reason = MissReason.NOT_STORED if self._prefetcher is None else late
            return self._answer(asked, keyspace, in_l1, chunks, reason)
        request = PrefetchRequest(
            owner=scheduler.owner,
            lease_deadline=lease_deadline,
            namespaces=keyspace.namespaces,
            frame_bytes=keyspace.frame_bytes,
            hashes=wanted_hashes[chunks * CHUNK_HASH_BYTES :],
            deadline_seconds=min(message.deadline_seconds, MAX_LOOKUP_DEADLINE_SECONDS),
            l1_hashes=wanted_hashes[: chunks * CHUNK_HASH_BYTES],
            tail_chunks=keyspace.tail_chunks,
        )
        return self._load(_Waiting(asked, keyspace, in_l1), request, self._prefetcher)

    def append(self, message: Append) -> AppendReply:
        instance, scheduler = self._registry.scheduled(message.instance_id)
        plan = self._sessions.plan(instance, message)
        if plan.growth.new_chunks > limits.MAX_CHUNKS_PER_CALL:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A call covers at most {limits.MAX_CHUNKS_PER_CALL} chunks.")
        self._registry.tenant(instance, scheduler, message.cache_salt)
        session, first_chunk = self._sessions.grow(plan), plan.growth.first_chunk
        return AppendReply(first_chunk, session.chain.hashes[first_chunk * CHUNK_HASH_BYTES :])

    def release(self, message: Release) -> Empty:
        instance, _ = self._registry.scheduled(message.instance_id)
        session = instance.leases.get(message.lease)
        if session is None or session.lease is None:
            return Empty()
        lease = session.lease
        unreadable = sorted(set(message.unreadable_chunks))
        if unreadable and not 0 <= unreadable[0] <= unreadable[-1] < lease.chunks:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"The lease has {lease.chunks} chunks; positions begin with 0.")
        self._release(instance, session)
        if message.recomputed:
            self._misses[MissReason.RECOMPUTE_FASTER].inc()
        if unreadable:
            self._remove_unreadable(lease, unreadable)
        return Empty()

    def end_session(self, message: EndSession) -> Empty:
        instance, _ = self._registry.scheduled(message.instance_id)
        session = instance.sessions.get(message.request_id)
        if session is not None:
            self._sessions.end(instance, session)
            self._touch(instance, session.chain)
        return Empty()

    def _touch(self, instance: Instance, chain: TokenChain) -> None:
        """Chunks stored while the request ran get their place in the order: suffix evicted before prefix."""
        keyspace = self._registry.whole_keyspace(instance, chain.cache_salt)
        slots = chain.chunks * len(keyspace.namespaces) if keyspace is not None else 0
        if keyspace is not None and chain.chunks <= limits.MAX_CHUNKS_PER_CALL and slots <= limits.MAX_SLOTS_PER_CALL:
            self._l1.core.touch(keyspace.digests, chain.hashes, keyspace.tails)

    def end_all_sessions(self, instance: Instance) -> None:
        """The scheduler side has gone."""
        for session in list(instance.sessions.values()):
            self._sessions.end(instance, session)
        assert not instance.leases

    # ---- what a session holds ----------------------------------------------------------------------------------------
    def _settle(self, instance: Instance, session: Session) -> None:
        """Ends whatever an earlier lookup of this request holds or waits for."""
        if session.cancel_lookup is not None:
            session.cancel_lookup()
        self._release(instance, session)

    def _release(self, instance: Instance, session: Session) -> None:
        lease, session.lease = session.lease, None
        if lease is not None:
            self._sessions.hold(instance, session, 0)
            del instance.leases[lease.number]
            for part in lease.parts:
                self._l1.core.release(part)
            self._metrics.num_finished_retrieves.inc()

    def _remove_unreadable(self, lease: Lease, unreadable: list[int]) -> None:
        log.error(
            "%d of %d chunks in L1 did not verify while an engine copied them; they are removed",
            len(unreadable),
            lease.chunks,
        )
        self._metrics.l1_read_failure.inc(len(unreadable))
        self._metrics.corrupt_frames.labels("l1").inc(len(unreadable))
        packed = b"".join(
            lease.hashes[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES] for chunk in unreadable
        )
        for namespace in lease.keyspace.namespaces:
            self._l1.core.remove(namespace.digest * len(unreadable), packed)

    # ---- waiting for L2 ----------------------------------------------------------------------------------------------
    def _load(self, waiting: _Waiting, request: PrefetchRequest, prefetcher: Prefetcher) -> Deferred:
        def on_done(result: PrefetchResult) -> None:  # on the storage loop
            self._loop.post(lambda: self._finish(waiting, result))

        waiting.asked.session.cancel_lookup = lambda: self._cancel(waiting)
        waiting.timer = self._loop.call_later(request.deadline_seconds + _GRACE_SECONDS, lambda: self._give_up(waiting))
        try:
            waiting.stop_loading = prefetcher.prefetch(request, on_done)
        except Exception:
            self._end_waiting(waiting)
            for part in waiting.in_l1.parts:
                self._l1.core.release(part)
            raise
        return waiting.deferred

    def _finish(self, waiting: _Waiting, result: PrefetchResult) -> None:
        if waiting.over:
            if result.lease:
                self._l1.core.release(result.lease)
            return
        self._end_waiting(waiting)
        in_l1 = waiting.in_l1
        both = _Hit(
            in_l1.parts + ((result.lease,) if result.lease else ()),
            in_l1.chunks + result.chunks,
            _join_offsets(len(waiting.keyspace.namespaces), in_l1, result.chunks, result.offsets),
        )
        reason = None
        if both.chunks < waiting.asked.total_chunks:
            reason = result.miss_reason or MissReason.NOT_STORED
        waiting.deferred.answer(self._answer(waiting.asked, waiting.keyspace, both, in_l1.chunks, reason))

    def _give_up(self, waiting: _Waiting) -> None:
        """The deadline passed and the storage loop did not say a word: L1 alone decides."""
        if waiting.over:
            return
        self._end_waiting(waiting)
        waiting.stop_loading()
        self._metrics.timeouts.inc()
        in_l1 = waiting.in_l1
        reply = self._answer(waiting.asked, waiting.keyspace, in_l1, in_l1.chunks, MissReason.L2_DEADLINE)
        waiting.deferred.answer(reply)

    def _cancel(self, waiting: _Waiting) -> None:
        self._end_waiting(waiting)
        waiting.stop_loading()
        for part in waiting.in_l1.parts:
            self._l1.core.release(part)
        waiting.deferred.answer(
            RemoteError(ErrorCode.CANCELLED, "The request was ended or looked up again before this lookup was final.")
        )

    def _end_waiting(self, waiting: _Waiting) -> None:
        waiting.over = True
        waiting.asked.session.cancel_lookup = None
        self._sessions.hold(waiting.asked.instance, waiting.asked.session, 0)
        if waiting.timer is not None:
            waiting.timer.cancel()

    # ---- answering ---------------------------------------------------------------------------------------------------
    def _answer(
        self, asked: _Asked, keyspace: Keyspace | None, hit: _Hit, chunks_l1: int, reason: MissReason | None
    ) -> LookupReply:
        """Makes the lease known under its number, counts, and builds the reply."""
        number = held_bytes = 0
        if hit.parts and keyspace is not None:
            number = hit.parts[0]
            leased_hashes = asked.hashes[: hit.chunks * CHUNK_HASH_BYTES]
            asked.session.lease = Lease(number, hit.parts, keyspace, leased_hashes, hit.offsets)
            held_bytes = len(leased_hashes) + len(hit.offsets)
            asked.instance.leases[number] = asked.session
            self._metrics.num_submitted_retrieves.inc()
        self._sessions.hold(asked.instance, asked.session, held_bytes)
        chunk_tokens = self._hasher.chunk_tokens
        counters = asked.counters
        counters.lookups.inc()
        counters.requested.inc(asked.total_chunks * chunk_tokens)
        if hit.chunks:
            counters.hit.inc(hit.chunks * chunk_tokens)
            self._metrics.l1_read.inc(hit.chunks)
        if chunks_l1:
            counters.hit_l1.inc(chunks_l1 * chunk_tokens)
        if hit.chunks > chunks_l1:
            counters.hit_l2.inc((hit.chunks - chunks_l1) * chunk_tokens)
        if reason is not None:
            self._misses[reason].inc()
        if self._events is not None and self._events.active:
            self._publish(self._events, asked, hit.chunks)
        return LookupReply(hit.chunks, chunks_l1, number, asked.hashes, hit.offsets, reason.value if reason else "")

    def _publish(self, events: EventBus, asked: _Asked, hit_chunks: int) -> None:
        scheduler, ranks = asked.instance.scheduler, asked.instance.by_rank()
        events.publish(
            LookupEvent(
                wall_seconds=self._clock.wall(),
                request_id=asked.session.request_id,
                model_name=scheduler.registration.model_name if scheduler is not None else "",
                chunk_tokens=self._hasher.chunk_tokens,
                total_tokens=asked.session.chain.tokens,
                chunk_hashes=asked.hashes,
                hit_chunks=hit_chunks,
                cache_salt=asked.session.chain.cache_salt,
                tensors=tuple(tensor for _, rank in sorted(ranks.items()) for tensor in rank.tensors),
            )
        )


def _join_offsets(namespaces: int, in_l1: _Hit, loaded_chunks: int, loaded_offsets: bytes) -> bytes:
    """[namespace][chunk] of two runs of chunks, one behind the other."""
    if not loaded_chunks:
        return in_l1.offsets
    if not in_l1.chunks:
        return loaded_offsets
    first, second = in_l1.chunks * _SLOT_BYTES, loaded_chunks * _SLOT_BYTES
    return b"".join(
        in_l1.offsets[index * first : (index + 1) * first] + loaded_offsets[index * second : (index + 1) * second]
        for index in range(namespaces)
    )
