"""Copies what became resident in L1 to the adapters.

Every adapter has its own queue, so that a slow one does not hold up a fast one. What is being written is leased, and
the lease lasts until the write has really ended.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey
from lmcache.core.outcome import StoreOutcome
from lmcache.l1.store import L1Store
from lmcache.l2.background import spawn
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.leases import Leased, lease_objects
from lmcache.tiering.policies import StorePolicy

log = logging.getLogger("lmcache.tiering")

COMMIT_RECORD_BYTES = 32  # four u64: namespace index, chunk index, offset, bytes
LOST_SAID_EVERY_SECONDS = 60.0
_THERE = (StoreOutcome.STORED, StoreOutcome.ALREADY_THERE)


@dataclass(frozen=True, slots=True)
class QueuedObject:
    key: ObjectKey
    frame_bytes: int


class StoreController:
    """Belongs to the storage loop."""

    def __init__(
        self, l1: L1Store, runners: Sequence[Runner], policy: StorePolicy, metrics: Metrics, clock: Clock
    ) -> None:
        self._l1 = l1
        self._runners = runners
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._queues: list[deque[QueuedObject]] = [deque() for _ in runners]
        self._wake = [asyncio.Event() for _ in runners]
        self._workers: list[asyncio.Task[None]] = []
        self._batches = 0  # taken from a queue, not yet given back
        self._targets_left: dict[ObjectKey, int] = {}  # only where objects leave L1 afterwards
        self._kept: set[ObjectKey] = set()  # of those, what some adapter has
        self._lost_unsaid = 0
        self._lost_said_until = 0.0
        self._to_drop: list[ObjectKey] = []  # stored, but somebody was reading
        self._taken = asyncio.Event()  # from a queue
        self._idle = asyncio.Event()
        self._idle.set()
        self._task_numbers = count(1)
        # A batch is leased while it is written: it must stay a small part of L1.
        self._batch_bytes = min(limits.L2_STORE_BATCH_BYTES, l1.core.stats()["capacity_bytes"] // 16)
        self.dropped = 0

    def start(self) -> None:
        for index, runner in enumerate(self._runners):
            for _ in range(limits.L2_STORE_BATCHES_IN_FLIGHT):
                self._workers.append(spawn(self._work(index), f"store-{runner.name}"))

    def add(self, namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> None:
        """Objects as `L1Core.commit` reports them, and the namespaces and hashes that they count in."""
        numbers = array("Q", records)
        for at in range(0, len(numbers), 4):
            position, chunk, _, frame_bytes = numbers[at : at + 4]
            chunk_hash = hashes[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES]
            self._enqueue(QueuedObject(ObjectKey(namespaces[position], chunk_hash), frame_bytes))
        for event in self._wake:
            event.set()

    def offer(self, objects: Sequence[QueuedObject]) -> None:
        """Objects that were resident before; adapters that have them keep what they have."""
        for queued in objects:
            self._enqueue(queued)
        for event in self._wake:
            event.set()

    async def wait_for_room(self, objects: int) -> None:
        """Until fewer than that many are queued."""
        while self.queued_objects >= objects:
            self._taken.clear()
            await self._taken.wait()

    @property
    def drops_from_l1(self) -> bool:
        return self._policy.drops_from_l1

    def _enqueue(self, queued: QueuedObject) -> None:
        targets = self._policy.targets(queued.key, len(self._runners))
        if self.queued_objects + len(targets) > limits.MAX_L2_STORE_QUEUE_OBJECTS:
            self._drop(1, "queue_full")
            targets = ()
        for target in targets:
            self._queues[target].append(queued)
        if targets:
            self._idle.clear()
        if self._policy.drops_from_l1:
            self._targets_left[queued.key] = len(targets)
            if not targets:
                self._leave_l1([queued])

    @property
    def queued_objects(self) -> int:
        return sum(map(len, self._queues))

    @property
    def batches_in_flight(self) -> int:
        return self._batches

    def discard_queue(self) -> None:
        for queue in self._queues:
            waiting = list(queue)
            queue.clear()
            self._taken.set()
            self._kept.update(queued.key for queued in waiting)  # not lost: an operator asked for it
            self._finish(waiting)

    async def flush(self, seconds: float) -> bool:
        """Waits until everything was handed to the adapters. False when that took longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return False
        return True

    def stop(self) -> None:
        for worker in self._workers:
            worker.cancel()

    def drop_leftovers(self) -> None:
        """Tries again to take out of L1 what somebody was reading when its store ended."""
        waiting, self._to_drop = self._to_drop, []
        self._remove(waiting)

    # ---- one adapter -------------------------------------------------------------------------------------------------
    async def _work(self, index: int) -> None:
        queue, wake = self._queues[index], self._wake[index]
        while True:
            while not queue:
                wake.clear()
                await wake.wait()
            batch = self._take(queue)
            self._batches += 1
            try:
                await self._store(self._runners[index], batch)
            except Exception:  # the root of a task: one batch must not end all stores
                log.exception("Storing to %s failed", self._runners[index].name)
            finally:
                self._batches -= 1
                self._finish(batch)

    def _take(self, queue: deque[QueuedObject]) -> list[QueuedObject]:
        batch = [queue.popleft()]
        size_bytes = batch[0].frame_bytes
        while queue and len(batch) < limits.MAX_L2_BATCH_OBJECTS:
            size_bytes += queue[0].frame_bytes
            if size_bytes > self._batch_bytes:
                break
            batch.append(queue.popleft())
        self._taken.set()
        return batch

    async def _store(self, runner: Runner, batch: Sequence[QueuedObject]) -> None:
        leased = lease_objects(self._l1, [(queued.key, queued.frame_bytes) for queued in batch])
        if len(leased.keys) < len(batch):
            self._drop(len(batch) - len(leased.keys), "evicted")
        if not leased.keys:
            leased.release()
            return
        number = next(self._task_numbers)
        size_bytes = sum(view.nbytes for view in leased.views)
        log.debug(
            "Submitted store task %d: %d objects, %d bytes to %s", number, len(leased.keys), size_bytes, runner.name
        )
        self._metrics.l2_store_submitted.labels(runner.name).inc()
        in_flight = self._metrics.num_inflight_l2_stores.labels(runner.name)
        in_flight.inc()
        started = self._clock.monotonic()
        outcomes = await runner.store(leased.keys, leased.views, partial(self._give_back, leased, in_flight.dec))
        seconds = self._clock.monotonic() - started
        self._metrics.l2_store_completed.labels(runner.name).inc()
        stored = sum(outcome is StoreOutcome.STORED for outcome in outcomes)
        if stored == len(outcomes) and seconds > 0:
            self._metrics.l2_store_throughput.labels(runner.name).observe(size_bytes / seconds / 1e9)
        there = [key for key, outcome in zip(leased.keys, outcomes, strict=True) if outcome in _THERE]
        if self._policy.drops_from_l1:
            self._kept.update(there)
        lost = len(outcomes) - len(there)
        self._drop(lost, "not_stored")
        log.debug(
            "L2 store task %d completed: %d of %d objects stored, %d there already, in %.1f ms",
            number,
            stored,
            len(outcomes),
            len(outcomes) - stored - lost,
            seconds * 1e3,
        )

    @staticmethod
    def _give_back(leased: Leased, ended: Callable[[], None]) -> None:
        leased.release()
        ended()

    def _drop(self, objects: int, reason: str) -> None:
        if objects:
            self.dropped += objects
            self._metrics.l2_store_dropped.labels(reason).inc(objects)

    # ---- after the last adapter --------------------------------------------------------------------------------------
    def _finish(self, batch: Sequence[QueuedObject]) -> None:
        """One adapter is done with these."""
        if self._policy.drops_from_l1:
            done = []
            for queued in batch:
                left = self._targets_left.get(queued.key, 1) - 1
                self._targets_left[queued.key] = left
                if left <= 0:
                    done.append(queued)
            self._leave_l1(done)
        if not self._batches and not self.queued_objects:
            self._idle.set()

    def _leave_l1(self, objects: Sequence[QueuedObject]) -> None:
        lost = 0
        for queued in objects:
            self._targets_left.pop(queued.key, None)
            lost += queued.key not in self._kept
            self._kept.discard(queued.key)
        if lost:
            self._note_lost(lost)
        self._remove([queued.key for queued in objects])

    def _note_lost(self, objects: int) -> None:
        """Engines were told that these are stored, and now they are nowhere."""
        self._metrics.l2_store_lost.inc(objects)
        self._lost_unsaid += objects
        now = self._clock.monotonic()
        if now >= self._lost_said_until:
            log.warning(
                "%d objects were lost: no adapter took them, and --l2-store-policy skip_l1 keeps nothing in L1; "
                "they are computed again when they are needed (said once a minute at most)",
                self._lost_unsaid,
            )
            self._lost_unsaid = 0
            self._lost_said_until = now + LOST_SAID_EVERY_SECONDS

    def _remove(self, keys: Sequence[ObjectKey]) -> None:
        if not keys:
            return
        core = self._l1.core
        digests = b"".join(key.namespace.digest for key in keys)
        if core.remove(digests, b"".join(key.chunk_hash for key in keys)) == len(keys):
            return
        self._to_drop += [key for key in keys if core.probe(key.namespace.digest, key.chunk_hash)]
