"""Stores: slots reserved for a worker, filled by it (in shared memory, or by `write`), published by its commit.

What is reserved and not committed never becomes visible, whatever dies.
"""

from __future__ import annotations

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import SLOT_BYTES, ChunkHashes, KeyBatch, SlotGrid
from lmcache.errors import RemoteError
from lmcache.protocol.messages import Commit, CommitReply, ErrorCode, Reserve, ReserveReply, TransferMode
from lmcache.service.context import ServiceContext
from lmcache.service.instances import InstanceRegistry
from lmcache.service.named_keys import count_hashes
from lmcache.service.reservation import Reservation
from lmcache.telemetry.tracing import StoredTrace, TierTime
from lmcache.transport.deferred import Deferred


class StoreService:
    """Handlers of reserve and commit."""

    def __init__(self, context: ServiceContext, registry: InstanceRegistry) -> None:
        self._registry = registry
        self._l1 = context.l1
        self._core = context.l1.core
        self._storage = context.storage
        self._metrics = context.metrics
        self._clock = context.clock
        self._reservation_ttl_seconds = context.settings.reservation_ttl_seconds

    def reserve(self, message: Reserve) -> ReserveReply:
        instance, worker = self._registry.worker(message.instance_id, message.worker_id)
        chunks = count_hashes(message.hashes)
        if message.wanted and len(message.wanted) != chunks * len(worker.profile.layouts):
            raise RemoteError(ErrorCode.BAD_REQUEST, "`wanted` must have one byte for each object group and chunk.")
        size_bytes = chunks * (CHUNK_HASH_BYTES + SLOT_BYTES * len(worker.profile.layouts))
        held = worker.reservations
        too_large = held.size_bytes + size_bytes > limits.MAX_RESERVATION_BYTES_PER_WORKER
        if too_large or len(held) >= limits.MAX_RESERVATIONS_PER_WORKER:
            raise RemoteError(
                ErrorCode.TOO_MANY,
                f"This worker has {len(held)} reservations with {held.size_bytes} bytes of hashes and offsets; commit "
                "some before you make others.",
            )
        # Refused while the scheduler side, which names the model, has not registered.
        _, scheduler = self._registry.scheduled(message.instance_id)
        namespaces = self._registry.tenant(instance, scheduler, message.cache_salt).of_rank(worker.profile)
        deadline = self._clock.monotonic() + self._reservation_ttl_seconds
        keys = KeyBatch(namespaces, ChunkHashes(message.hashes))
        reserved = self._l1.reserve(worker.owner, keys, deadline, wanted=message.wanted)
        slots = SlotGrid(reserved.slots, chunks)
        if reserved.reservation:
            session = instance.sessions.get(message.request_id) if message.request_id else None
            trace = session.trace if session is not None else None
            reservation = Reservation(keys, slots, self._clock.monotonic(), trace)
            worker.reservations.add(reserved.reservation, reservation)
            self._metrics.num_submitted_stores.inc()
        return ReserveReply(reserved.reservation, slots.packed, reserved.chunks_without_room)

    def commit(self, message: Commit) -> CommitReply | Deferred:
        """Idempotent: a reservation that has ended, however, commits nothing. Waits for copies into its slots."""
        _, worker = self._registry.worker(message.instance_id, message.worker_id)
        reserved = worker.reservations.get(message.reservation)
        if reserved is None:
            return CommitReply(0)
        if message.written and len(message.written) != reserved.keys.objects:
            raise RemoteError(
                ErrorCode.BAD_REQUEST,
                f"`written` has {len(message.written)} bytes; the reservation needs {reserved.keys.objects}.",
            )
        if reserved.copies:
            deferred = Deferred()
            reserved.when_copied.append(lambda: self._commit_late(message, deferred))
            return deferred
        worker.reservations.remove(message.reservation)
        written = message.written
        if worker.profile.transfer_mode == TransferMode.SOCKET:
            written = reserved.only_whole(written)
        committed = self._core.commit(message.reservation, written)
        if not committed.objects:
            # Quarantined after its deadline: by this call its owner says that it writes no more.
            self._core.abort(message.reservation)
        self._metrics.num_finished_stores.inc()
        now_seconds = self._clock.monotonic()
        self._metrics.reservation.observe(now_seconds - reserved.began_at)
        stored = None
        if reserved.trace is not None:
            attributes = (("worker", message.worker_id), ("objects", committed.objects))
            l1 = TierTime("l1", reserved.began_at, now_seconds, committed.objects)
            store = reserved.trace.child("mp.store", reserved.began_at, now_seconds, attributes, (l1,))
            stored = StoredTrace(reserved.trace, store)
        if committed.objects:
            self._metrics.l1_write.inc(committed.objects)
            self._time_copy(reserved, committed.objects, now_seconds - reserved.began_at)
            self._storage.objects_committed(reserved.keys, committed, stored)
        return CommitReply(committed.objects)

    def _time_copy(self, reserved: Reservation, objects: int, seconds: float) -> None:
        namespaces = reserved.keys.namespaces
        if seconds > 0:
            size_bytes = objects * namespaces.chunk_bytes / len(namespaces)
            self._metrics.l0_l1_store_throughput.observe(size_bytes / seconds / 1e9)

    def _commit_late(self, message: Commit, deferred: Deferred) -> None:
        try:
            reply = self.commit(message)
        except RemoteError as refusal:
            deferred.answer(refusal)
        else:
            assert isinstance(reply, CommitReply)
            deferred.answer(reply)
