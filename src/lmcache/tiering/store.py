"""Copies what became resident in L1 to the adapters.

Every adapter has its own queue, so that a slow one does not hold up a fast one. What is being written is leased, and
the lease lasts until the write has really ended. Under a policy that drops from L1, an object leaves it when every
adapter that was to have it has dealt with it and some adapter took it; what none took waits in unstored.py.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
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
from lmcache.tiering.checked_policies import CheckedStorePolicy
from lmcache.tiering.leases import Leased, QueuedObject, are_resident, lease_objects
from lmcache.tiering.unstored import MOST_PERIODS_BETWEEN_OFFERS, PERIOD_SECONDS, Unstored

log = logging.getLogger("lmcache.tiering")

COMMIT_RECORD_BYTES = 32  # four u64: namespace index, chunk index, offset, bytes
_THERE = (StoreOutcome.STORED, StoreOutcome.ALREADY_THERE)


class StoreController:
    """Belongs to the storage loop."""

    def __init__(
        self, l1: L1Store, runners: Sequence[Runner], policy: CheckedStorePolicy, metrics: Metrics, clock: Clock
    ) -> None:
        self._l1 = l1
        self._runners = runners
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._queues: list[deque[QueuedObject]] = [deque() for _ in runners]
        self._wake = [asyncio.Event() for _ in runners]
        self._tasks: list[asyncio.Task[None]] = []
        self._batches = 0  # taken from a queue, not yet given back
        self._unstored = Unstored(l1, runners, self._remove, metrics, clock)
        self._to_drop: dict[ObjectKey, QueuedObject] = {}  # to leave L1, but somebody reads it
        self._taken = asyncio.Event()  # from a queue
        self._dealt_with = asyncio.Event()  # a batch
        self._idle = asyncio.Event()
        self._idle.set()
        self._task_numbers = count(1)
        # A batch is leased while it is written: it must stay a small part of L1.
        self._batch_bytes = min(limits.L2_STORE_BATCH_BYTES, l1.core.stats()["capacity_bytes"] // 16)
        self.dropped = 0

    def start(self) -> None:
        for index, runner in enumerate(self._runners):
            for _ in range(limits.L2_STORE_BATCHES_IN_FLIGHT):
                self._tasks.append(spawn(self._work(index), f"store-{runner.name}"))
        if self.drops_from_l1:
            self._tasks.append(spawn(self._offer_again(), "store-again"))

    def add(self, namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> None:
        """Objects as `L1Core.commit` reports them, and the namespaces and hashes that they count in."""
        objects = _of_commit(namespaces, hashes, records)
        self._unstored.committed_again(queued.key for queued in objects)
        self.offer(objects)

    def offer(self, objects: Sequence[QueuedObject]) -> None:
        """Objects that are resident; adapters that have them keep what they have."""
        targets = self._policy.targets([queued.key for queued in objects])
        room = limits.MAX_L2_STORE_QUEUE_OBJECTS - self.queued_objects
        refused = []
        for queued, indices in zip(objects, targets, strict=True):
            self._to_drop.pop(queued.key, None)  # of its former life in L1
            if len(indices) > room:
                refused.append(queued)
                continue
            room -= len(indices)
            queued.adapters_left = len(indices)
            for index in indices:
                self._queues[index].append(queued)
        self._drop(len(refused), "queue_full")
        if self.drops_from_l1:
            self._unstored.add(refused)
        if self.queued_objects:
            self._idle.clear()
        for event in self._wake:
            event.set()

    def take_out(self, namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> list[QueuedObject]:
        """Objects as for `add` that nobody can remember: out of L1 where the policy keeps nothing there. May be called
        from any thread; `note_refused` follows on the loop, with those that stay because somebody reads them."""
        return _taken_out(self._l1, _of_commit(namespaces, hashes, records)) if self.drops_from_l1 else []

    def note_refused(self, objects: int, still_read: Sequence[QueuedObject]) -> None:
        self._to_drop.update((queued.key, queued) for queued in still_read)
        self._drop(objects, "queue_full")
        if self.drops_from_l1:
            self._unstored.note_lost(objects)

    async def wait_for_room(self, objects: int) -> None:
        """Until fewer than that many are queued."""
        while self.queued_objects >= objects:
            self._taken.clear()
            await self._taken.wait()

    @property
    def drops_from_l1(self) -> bool:
        return self._policy.drops_from_l1

    @property
    def queued_objects(self) -> int:
        return sum(map(len, self._queues))

    @property
    def _is_nearly_full(self) -> bool:
        return self.queued_objects >= limits.MAX_L2_STORE_QUEUE_OBJECTS // 2

    @property
    def batches_in_flight(self) -> int:
        return self._batches

    @property
    def unstored_objects(self) -> int:
        return len(self._unstored)

    def discard(self) -> None:
        """Forgets what is not stored yet, and takes it out of L1 where the policy keeps nothing there."""
        for queue in self._queues:
            waiting = list(queue)
            queue.clear()
            self._taken.set()
            for queued in waiting:
                queued.is_discarded = True
            self._finish(waiting)
        self._unstored.clear(remove=True)

    def l1_cleared(self) -> None:
        self._unstored.clear(remove=False)

    async def flush(self, seconds: float) -> bool:
        """Waits until everything was handed to the adapters. False when that took longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return False
        return True

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def make_room(self, wanted_bytes: int) -> tuple[int, int]:
        """Takes out of L1 what waits there for an adapter, the oldest first, for lack of anything else to evict:
        (objects, bytes)."""
        return self._unstored.give_up_bytes(wanted_bytes)

    def check_idle(self) -> None:
        """AssertionError unless nothing is queued, being written or about to leave L1."""
        held = {"queued": self.queued_objects, "batches": self._batches, "leaving L1": len(self._to_drop)}
        assert not any(held.values()), f"The store controller is not idle: {held}"

    def drop_leftovers(self) -> None:
        """Tries again to take out of L1 what somebody was reading when its store ended."""
        waiting, self._to_drop = self._to_drop, {}
        self._remove(list(waiting.values()))

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
        leased = lease_objects(self._l1, batch)
        keys = leased.keys
        if len(keys) < len(batch):
            self._drop(len(batch) - len(keys), "evicted")
        if not keys:
            leased.release()
            return
        number = next(self._task_numbers)
        size_bytes = sum(view.nbytes for view in leased.views)
        log.debug("Submitted store task %d: %d objects, %d bytes to %s", number, len(keys), size_bytes, runner.name)
        self._metrics.l2_store_submitted.labels(runner.name).inc()
        in_flight = self._metrics.num_inflight_l2_stores.labels(runner.name)
        in_flight.inc()
        started = self._clock.monotonic()
        outcomes = await runner.store(keys, leased.views, partial(self._give_back, leased, in_flight.dec))
        seconds = self._clock.monotonic() - started
        self._metrics.l2_store_completed.labels(runner.name).inc()
        stored = sum(outcome is StoreOutcome.STORED for outcome in outcomes)
        if stored == len(outcomes) and seconds > 0:
            self._metrics.l2_store_throughput.labels(runner.name).observe(size_bytes / seconds / 1e9)
        held = 0  # by the adapter now
        for queued, outcome in zip(leased.objects, outcomes, strict=True):
            if outcome in _THERE:
                queued.is_stored = True
                held += 1
        self._drop(len(outcomes) - held, "not_stored")
        log.debug(
            "L2 store task %d completed: %d of %d objects stored, %d there already, in %.1f ms",
            number,
            stored,
            len(outcomes),
            held - stored,
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
        for queued in batch:
            queued.adapters_left -= 1
        if self.drops_from_l1:
            ended = [queued for queued in batch if not queued.adapters_left]
            leaving = [queued for queued in ended if queued.is_stored or queued.is_discarded]
            self._remove(leaving)
            self._unstored.forget(leaving)
            self._unstored.add([queued for queued in ended if not (queued.is_stored or queued.is_discarded)])
        self._dealt_with.set()
        if not self._batches and not self.queued_objects:
            self._idle.set()

    def _remove(self, objects: Sequence[QueuedObject]) -> None:
        """Out of L1; what somebody reads follows when nobody does any more."""
        self._to_drop.update((queued.key, queued) for queued in _taken_out(self._l1, objects))

    # ---- what no adapter took ----------------------------------------------------------------------------------------
    async def _offer_again(self) -> None:
        """Now and then, and as soon as an adapter takes stores again, everything once."""
        wait, periods = 0, 1
        took_stores = [False] * len(self._runners)
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                await self._unstored.count_evicted()
                takes_stores = [runner.takes_stores for runner in self._runners]
                recovered = any(now and not then for now, then in zip(takes_stores, took_stores, strict=True))
                took_stores = takes_stores
                wait -= 1
                if self._unstored and (wait <= 0 or recovered):
                    periods = 1 if await self._offer_unstored() else min(2 * periods, MOST_PERIODS_BETWEEN_OFFERS)
                    wait = periods
            except Exception:  # the root of a task: the next period may do better
                log.exception("Objects could not be offered to L2 again")

    async def _offer_unstored(self) -> bool:
        """Each object once, a batch at a time and behind what is queued, as long as there is an adapter that may take
        it and room to queue it. Whether any was taken."""
        waiting, taken = self._unstored.oldest_first(), 0
        for start in range(0, len(waiting), limits.MAX_L2_BATCH_OBJECTS):
            await asyncio.sleep(0)  # a policy may have no adapter for thousands
            if not any(runner.may_store for runner in self._runners) or self._is_nearly_full:
                break
            page = waiting[start : start + limits.MAX_L2_BATCH_OBJECTS]
            batch = [queued for queued in page if queued in self._unstored]
            self.offer(batch)
            while any(queued.adapters_left for queued in batch):
                self._dealt_with.clear()
                await self._dealt_with.wait()
            taken += sum(queued.is_stored for queued in batch)
        if taken:
            log.info("%d objects that no adapter had taken before are stored", taken)
        return taken > 0


def _of_commit(namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> list[QueuedObject]:
    numbers = array("Q", records)
    objects = []
    for at in range(0, len(numbers), 4):
        position, chunk, _, frame_bytes = numbers[at : at + 4]
        chunk_hash = hashes[chunk * CHUNK_HASH_BYTES : (chunk + 1) * CHUNK_HASH_BYTES]
        objects.append(QueuedObject(ObjectKey(namespaces[position], chunk_hash), frame_bytes))
    return objects


def _taken_out(l1: L1Store, objects: Sequence[QueuedObject]) -> list[QueuedObject]:
    """Out of L1, apart from those that somebody reads, which are returned."""
    if not objects:
        return []
    digests = b"".join(queued.key.namespace.digest for queued in objects)
    if l1.core.remove(digests, b"".join(queued.key.chunk_hash for queued in objects)) == len(objects):
        return []
    return [queued for queued, there in zip(objects, are_resident(l1, objects), strict=True) if there]
