"""Stores: slots reserved for a worker, filled by it (in shared memory, or by `write`), published by its commit.

What is reserved and not committed never becomes visible, whatever dies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.errors import RemoteError
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import Commit, CommitReply, ErrorCode, Reserve, ReserveReply, TransferMode
from lmcache.service.registry import Registry
from lmcache.service.reservation import Reservation
from lmcache.telemetry.metrics import Metrics
from lmcache.transport.deferred import Deferred

log = logging.getLogger("lmcache.service")

_SLOT_BYTES = 8


class CommitSink(Protocol):
    """The storage loop, as far as commits need it."""

    def objects_committed(self, namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> None:
        """`records` as `L1Core.commit` returns them; namespaces and hashes are those of the reservation."""
        ...


class TransferService:
    """Handlers of reserve and commit."""

    def __init__(
        self,
        registry: Registry,
        l1: L1Store,
        sink: CommitSink | None,
        metrics: Metrics,
        clock: Clock,
        reservation_ttl_seconds: float,
    ) -> None:
        """Without a sink (no L2 adapter) nobody is told of commits."""
        self._registry = registry
        self._l1 = l1
        self._sink = sink
        self._metrics = metrics
        self._clock = clock
        self._reservation_ttl_seconds = reservation_ttl_seconds

    def reserve(self, message: Reserve) -> ReserveReply:
        instance, worker = self._registry.worker(message.instance_id, message.worker_id)
        chunks, rest = divmod(len(message.hashes), CHUNK_HASH_BYTES)
        if rest or not chunks:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"{len(message.hashes)} bytes are not hashes of 32 bytes each.")
        if chunks > limits.MAX_CHUNKS_PER_CALL:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A call covers at most {limits.MAX_CHUNKS_PER_CALL} chunks.")
        if message.wanted and len(message.wanted) != chunks * len(worker.registration.layouts):
            raise RemoteError(ErrorCode.BAD_REQUEST, "`wanted` must have one byte for each object group and chunk.")
        size_bytes = chunks * (CHUNK_HASH_BYTES + _SLOT_BYTES * len(worker.registration.layouts))
        held = worker.reservations
        too_large = held.size_bytes + size_bytes > limits.MAX_RESERVATION_BYTES_PER_WORKER
        if too_large or len(held) >= limits.MAX_RESERVATIONS_PER_WORKER:
            raise RemoteError(
                ErrorCode.TOO_MANY,
                f"This worker has {len(held)} reservations with {held.size_bytes} bytes of hashes and offsets; commit "
                "some before you make others.",
            )
        keyspace = self._registry.rank_keyspace(instance, worker, message.cache_salt)
        deadline = self._clock.monotonic() + self._reservation_ttl_seconds
        reservation, slots, without_room = self._l1.core.reserve(
            worker.owner,
            keyspace.digests,
            keyspace.cache_salt,
            keyspace.sizes,
            message.hashes,
            deadline,
            message.wanted,
        )
        if reservation:
            worker.reservations.add(reservation, Reservation(keyspace, message.hashes, slots))
            self._metrics.num_submitted_stores.inc()
        return ReserveReply(reservation, slots, without_room)

    def commit(self, message: Commit) -> CommitReply | Deferred:
        """Idempotent: a reservation that has ended, however, commits nothing. Waits for copies into its slots."""
        _, worker = self._registry.worker(message.instance_id, message.worker_id)
        reserved = worker.reservations.get(message.reservation)
        if reserved is None:
            return CommitReply(0)
        if message.written and len(message.written) != reserved.positions:
            raise RemoteError(
                ErrorCode.BAD_REQUEST,
                f"`written` has {len(message.written)} bytes; the reservation needs {reserved.positions}.",
            )
        if reserved.copies:
            deferred = Deferred()
            reserved.when_copied.append(lambda: self._commit_late(message, deferred))
            return deferred
        worker.reservations.remove(message.reservation)
        written = message.written
        if worker.registration.transfer_mode == TransferMode.SOCKET:
            written = reserved.only_whole(written)
        committed, _, records = self._l1.core.commit(message.reservation, written)
        if not committed:
            # Set aside after its deadline: its owner says by this call that it writes no more, so the memory is free.
            self._l1.core.abort(message.reservation)
        self._metrics.num_finished_stores.inc()
        if committed:
            self._metrics.l1_write.inc(committed)
            if self._sink is not None:
                self._sink.objects_committed(reserved.keyspace.namespaces, reserved.hashes, records)
        return CommitReply(committed)

    def _commit_late(self, message: Commit, deferred: Deferred) -> None:
        try:
            reply = self.commit(message)
        except RemoteError as refusal:
            deferred.answer(refusal)
        else:
            assert isinstance(reply, CommitReply)
            deferred.answer(reply)
