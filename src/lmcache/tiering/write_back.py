"""Copies what became resident in L1 to the adapters.

Every adapter has its own queue, so that a slow one does not hold up a fast one. An object is leased until its write has
really ended. Under a policy that drops objects from L1, an object leaves L1 when every adapter that was to have it has
tried and some adapter took it; objects that none took are kept in unstored.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import compress, count

from lmcache._native import Committed, Fate
from lmcache.core import limits
from lmcache.core.key import Namespace, ObjectKey, accepted_lossy_serde
from lmcache.core.key_batch import KeyBatch, pack_keys
from lmcache.core.outcome import HELD, StoreOutcome
from lmcache.l1.store import L1Store
from lmcache.l2.background import spawn
from lmcache.l2.runner import Runner
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.tracing import StoredTrace
from lmcache.tiering.checked_policies import CheckedStorePolicy
from lmcache.tiering.context import TieringContext
from lmcache.tiering.leases import QueuedObject, are_resident, lease_objects
from lmcache.tiering.unstored import MOST_PERIODS_BETWEEN_OFFERS, Unstored

log = logging.getLogger("lmcache.tiering")

_DROP_REASONS = ("queue_full", "not_served", "evicted", "not_stored")  # there from the start: the first is an increase


class WriteBack:
    """Belongs to the storage loop."""

    def __init__(self, context: TieringContext, policy: CheckedStorePolicy) -> None:
        self._l1 = context.l1
        self._runners = context.runners
        self._policy = policy
        self._metrics = context.metrics
        for reason in _DROP_REASONS:
            self._metrics.l2_store_dropped.labels(reason)
        self._clock = context.clock
        self._period_seconds = context.period_seconds
        self._queues: list[deque[QueuedObject]] = [deque() for _ in self._runners]
        self._wake = [asyncio.Event() for _ in self._runners]
        self._tasks: list[asyncio.Task[None]] = []
        self._batches = 0  # dequeued, not yet ended
        self._batch_objects = [0] * len(self._runners)  # of these, by adapter
        self._is_finishing = False
        self._unstored = Unstored(context, self._remove)
        self._leaving_l1: dict[ObjectKey, QueuedObject] = {}  # but still being read
        self._batch_ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task_numbers = count(1)
        # A batch is leased while it is written: it must stay a small part of L1.
        self._batch_bytes = min(limits.L2_STORE_BATCH_BYTES, self._l1.core.stats()["capacity_bytes"] // 16)
        self._log_limiter = LogLimiter()
        self.dropped = 0

    def start(self) -> None:
        for index, runner in enumerate(self._runners):
            for _ in range(limits.L2_STORE_BATCHES_IN_FLIGHT):
                self._tasks.append(spawn(self._write_queue(index), f"store-{runner.name}"))
        if self.drops_from_l1:
            self._tasks.append(spawn(self._offer_again(), "store-again"))

    def add(self, keys: KeyBatch, committed: Committed, trace: StoredTrace | None = None) -> None:
        """New objects of L1; `keys` are those of their reservation."""
        objects = _of_commit(keys, committed)
        for queued in objects if trace is not None else ():
            queued.trace = trace
        self._unstored.committed_again(queued.key for queued in objects)
        self.offer(objects)

    def offer(self, objects: Sequence[QueuedObject]) -> None:
        """Queues resident objects for the adapters that the policy names, without those that may not have them or whose
        queues are full."""
        refused = []
        full = 0
        now_seconds = self._clock.monotonic()
        for queued, indices in zip(objects, self.targets(objects), strict=True):
            self._leaving_l1.pop(queued.key, None)  # from before it was evicted and stored again
            taking = [index for index in indices if len(self._queues[index]) < self._queue_objects]
            full += len(indices) - len(taking)
            if indices and not taking:
                refused.append(queued)
                continue
            queued.adapters_left = len(taking)
            queued.queued_at = now_seconds
            for index in taking:
                self._queues[index].append(queued)
        self._count_dropped(full, "queue_full")
        if self.drops_from_l1:
            self._unstored.add(refused)
        self._wake_all()

    def targets(self, objects: Sequence[QueuedObject]) -> list[Sequence[int]]:
        """The adapters that the policy names and that may have each of these. Objects without any stay in L1 as all
        do under a policy that keeps it: what no adapter will ever take is not offered again."""
        targets: list[Sequence[int]] = []
        unserved = []
        serving = self._serving({queued.key.namespace for queued in objects})
        for queued, indices in zip(objects, self._policy.targets([queued.key for queued in objects]), strict=True):
            served = serving[queued.key.namespace]
            targets.append(indices if served is None else [index for index in indices if index in served])
            if indices and not targets[-1]:
                unserved.append(queued)
        if unserved:
            self._note_unserved(unserved)
        return targets

    def _note_unserved(self, objects: Sequence[QueuedObject]) -> None:
        self._count_dropped(len(objects), "not_served")
        if self.drops_from_l1 and not self._l1.evicts:
            self._unstored.add_unserved(objects)
        for serde in {accepted_lossy_serde(queued.key.namespace.layout) for queued in objects}:
            if self._log_limiter.due(bool(serde)):  # engines may name any number of them
                log.warning(
                    "No adapter here may have objects of engines that accept %s: they stay in L1 alone (counted in "
                    'lmcache_mp_l2_store_dropped_total{reason="not_served"}, said once)',
                    f"the lossy serde {json.dumps(serde)}" if serde else "exact KV only",
                )

    async def store_in(self, index: int, objects: Sequence[QueuedObject]) -> None:
        """Queues objects for one adapter, behind what is queued, and waits until it has dealt with them. They stay in
        L1 until `settle`."""
        for queued in objects:
            queued.adapters_left = 2  # it, and whoever settles
            self._leaving_l1.pop(queued.key, None)
        self._queues[index].extend(objects)
        self._wake_all()
        while any(queued.adapters_left > 1 for queued in objects):
            self._batch_ended.clear()
            await self._batch_ended.wait()

    def settle(self, objects: Sequence[QueuedObject]) -> None:
        """Every adapter that was to have these has dealt with them."""
        if self.drops_from_l1:
            leaving = [queued for queued in objects if queued.may_leave_l1]
            self._remove(leaving)
            self._unstored.forget(leaving)
            self._unstored.add([queued for queued in objects if not queued.may_leave_l1])

    def _wake_all(self) -> None:
        if self.queued_objects:
            self._idle.clear()
        for event in self._wake:
            event.set()

    def _serving(self, namespaces: Iterable[Namespace]) -> dict[Namespace, set[int] | None]:
        """The adapters that may have objects of each namespace; None for all of them."""
        serving = {
            namespace: {index for index, runner in enumerate(self._runners) if runner.serves(namespace)}
            for namespace in namespaces
        }
        return {
            namespace: served if len(served) < len(self._runners) else None for namespace, served in serving.items()
        }

    def remove_refused(self, keys: KeyBatch, committed: Committed) -> list[QueuedObject]:
        """Objects as for `add` that cannot be queued: removed from L1 under a policy that drops from it. Returns those
        that are still being read. Any thread; `note_refused` follows on the loop."""
        return _remove(self._l1, _of_commit(keys, committed)) if self.drops_from_l1 else []

    def note_refused(self, objects: int, still_read: Sequence[QueuedObject]) -> None:
        self._leaving_l1.update((queued.key, queued) for queued in still_read)
        self._count_dropped(objects, "queue_full")
        if self.drops_from_l1:
            self._unstored.note_lost(objects)

    @property
    def drops_from_l1(self) -> bool:
        return self._policy.drops_from_l1

    @property
    def queued_objects(self) -> int:
        return sum(map(len, self._queues))

    @property
    def _queue_objects(self) -> int:
        """That may wait for one adapter: what a slow one does not take fills its own queue alone."""
        return limits.MAX_L2_STORE_QUEUE_OBJECTS // len(self._queues)

    @property
    def _is_nearly_full(self) -> bool:
        return all(len(queue) >= self._queue_objects // 2 for queue in self._queues)

    def publish(self) -> None:
        """Brings metrics that are read up to date. Any thread."""
        for runner, queue in zip(self._runners, self._queues, strict=True):
            self._metrics.l2_store_queue_depth.labels(runner.name).set(len(queue))

    @property
    def batches_in_flight(self) -> int:
        return self._batches

    @property
    def unstored_objects(self) -> int:
        return len(self._unstored)

    def discard(self) -> None:
        """Forgets what is not stored yet; under a policy that drops from L1 it leaves L1, too."""
        for queue in self._queues:
            waiting = list(queue)
            queue.clear()
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

    async def finish(self, seconds: float) -> None:
        """Begins no more batches, waits that long for those under way, and ends."""
        self._is_finishing = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._batches and (left := deadline - loop.time()) > 0:
            self._batch_ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._batch_ended.wait(), left)
        for task in self._tasks:
            task.cancel()

    def unwritten(self) -> dict[str, int]:
        """Objects by the adapter that was to have them and has not; also after `finish`. Any thread."""
        waiting = (len(queue) + in_batches for queue, in_batches in zip(self._queues, self._batch_objects, strict=True))
        return {runner.name: objects for runner, objects in zip(self._runners, waiting, strict=True) if objects}

    def make_room(self, wanted_bytes: int) -> None:
        """Gives up objects that wait in L1 for an adapter, the oldest first, for lack of anything else to evict."""
        self._unstored.give_up_bytes(wanted_bytes)

    def check_idle(self) -> None:
        """AssertionError unless nothing is queued, being written or about to leave L1."""
        held = {"queued": self.queued_objects, "batches": self._batches, "leaving L1": len(self._leaving_l1)}
        assert not any(held.values()), f"The store controller is not idle: {held}"

    def remove_leftovers(self) -> None:
        """Tries again to remove from L1 what was being read when its store ended."""
        leaving, self._leaving_l1 = self._leaving_l1, {}
        self._remove(list(leaving.values()))

    # ---- one adapter -------------------------------------------------------------------------------------------------
    async def _write_queue(self, index: int) -> None:
        queue, wake = self._queues[index], self._wake[index]
        while True:
            while not queue or self._is_finishing:
                wake.clear()
                await wake.wait()
            batch = self._next_batch(queue)
            self._batches += 1
            self._batch_objects[index] += len(batch)
            try:
                await self._store(self._runners[index], batch)
            except Exception:  # the root of a task: one batch must not end all stores
                log.exception("Storing to %s failed", self._runners[index].name)
            finally:
                self._batches -= 1
                self._finish(batch)
            self._batch_objects[index] -= len(batch)  # not when the task was cancelled: they were not written

    def _next_batch(self, queue: deque[QueuedObject]) -> list[QueuedObject]:
        batch = [queue.popleft()]
        size_bytes = batch[0].frame_bytes
        while queue and len(batch) < limits.MAX_L2_BATCH_OBJECTS:
            size_bytes += queue[0].frame_bytes
            if size_bytes > self._batch_bytes:
                break
            batch.append(queue.popleft())
        return batch

    async def _store(self, runner: Runner, batch: Sequence[QueuedObject]) -> None:
        leased = lease_objects(self._l1, batch)
        keys = leased.keys
        if len(keys) < len(batch):
            self._count_dropped(len(batch) - len(keys), "evicted")
        if not keys:
            leased.release()
            return
        number = next(self._task_numbers)
        size_bytes = sum(view.nbytes for view in leased.views)
        log.debug("Submitted store task %d: %d objects, %d bytes to %s", number, len(keys), size_bytes, runner.name)
        self._metrics.l2_store_submitted.labels(runner.name).inc()
        started = self._clock.monotonic()
        self._metrics.l2_store_queue.labels(runner.name).observe(started - leased.objects[0].queued_at)
        in_flight = self._metrics.num_inflight_l2_stores.labels(runner.name)
        in_flight.inc()

        def ended() -> None:
            leased.release()
            in_flight.dec()

        outcomes = await runner.store(keys, leased.views, ended)
        seconds = self._clock.monotonic() - started
        self._metrics.l2_store_completed.labels(runner.name).inc()
        self._metrics.l2_store.labels(runner.name).observe(seconds)
        for trace, objects in Counter(queued.trace for queued in leased.objects).items():
            if trace is not None:
                trace.written(runner.name, started, started + seconds, objects)
        stored = sum(outcome is StoreOutcome.STORED for outcome in outcomes)
        if stored == len(outcomes) and seconds > 0:
            self._metrics.l2_store_throughput.labels(runner.name).observe(size_bytes / seconds / 1e9)
        held = 0
        stored_bytes = 0
        for queued, outcome in zip(leased.objects, outcomes, strict=True):
            if outcome in HELD:
                queued.is_stored = True
                held += 1
            if outcome is StoreOutcome.STORED:
                stored_bytes += queued.frame_bytes
        self._metrics.l2_stored.labels(runner.name).inc(stored_bytes)
        self._count_dropped(len(outcomes) - held, "not_stored")
        log.debug(
            "L2 store task %d completed: %d of %d objects stored, %d there already, in %.1f ms",
            number,
            stored,
            len(outcomes),
            held - stored,
            seconds * 1e3,
        )

    def _count_dropped(self, objects: int, reason: str) -> None:
        if objects:
            self.dropped += objects
            self._metrics.l2_store_dropped.labels(reason).inc(objects)

    # ---- after the last adapter --------------------------------------------------------------------------------------
    def _finish(self, batch: Sequence[QueuedObject]) -> None:
        """One adapter has tried these."""
        for queued in batch:
            queued.adapters_left -= 1
        self.settle([queued for queued in batch if not queued.adapters_left])
        self._batch_ended.set()
        if not self._batches and not self.queued_objects:
            self._idle.set()

    def _remove(self, objects: Sequence[QueuedObject]) -> None:
        """From L1; an object that is being read follows later."""
        self._leaving_l1.update((queued.key, queued) for queued in _remove(self._l1, objects))

    # ---- what no adapter took ----------------------------------------------------------------------------------------
    async def _offer_again(self) -> None:
        """Offers everything once: after a growing number of periods, and when an adapter takes stores again."""
        periods_left, periods = 0, 1
        took_stores = [False] * len(self._runners)
        while True:
            await asyncio.sleep(self._period_seconds)
            try:
                await self._unstored.count_evicted()
                takes_stores = [runner.takes_stores for runner in self._runners]
                recovered = any(takes and not took for takes, took in zip(takes_stores, took_stores, strict=True))
                took_stores = takes_stores
                periods_left -= 1
                if self._unstored and (periods_left <= 0 or recovered):
                    periods = 1 if await self._offer_unstored() else min(2 * periods, MOST_PERIODS_BETWEEN_OFFERS)
                    periods_left = periods
            except Exception:  # the root of a task: the next period may do better
                log.exception("Objects could not be offered to L2 again")

    async def _offer_unstored(self) -> bool:
        """Each object once, a batch at a time and behind what is queued, as long as there is an adapter that may take
        it and room to queue it. What one has taken may go on waiting for a slower one. Whether any was taken."""
        waiting, taken = self._unstored.to_offer(), 0
        for start in range(0, len(waiting), limits.MAX_L2_BATCH_OBJECTS):
            await asyncio.sleep(0)  # a policy may have no adapter for thousands
            if not any(runner.may_store for runner in self._runners) or self._is_nearly_full:
                break
            page = waiting[start : start + limits.MAX_L2_BATCH_OBJECTS]
            batch = [queued for queued in page if queued in self._unstored and not queued.adapters_left]
            self.offer(batch)
            while any(queued.adapters_left and not queued.is_stored for queued in batch):
                self._batch_ended.clear()
                await self._batch_ended.wait()
            taken += sum(queued.is_stored for queued in batch)
        if taken:
            log.info("%d objects that no adapter had taken before are stored", taken)
        return taken > 0


def _of_commit(keys: KeyBatch, committed: Committed) -> list[QueuedObject]:
    return [QueuedObject(keys.key(record.namespace, record.chunk), record.size_bytes) for record in committed.records]


def _remove(l1: L1Store, objects: Sequence[QueuedObject]) -> list[QueuedObject]:
    """Removes objects from L1 and returns those that stay because they are being read."""
    if not objects:
        return []
    if l1.core.remove(*pack_keys(queued.key for queued in objects), fate=Fate.EVICTED) == len(objects):
        return []
    return list(compress(objects, are_resident(l1, objects)))
