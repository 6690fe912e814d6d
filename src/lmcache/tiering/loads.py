"""Loads of batches of objects from L2 into reserved slots of L1. Requests for the same objects share one load.

Invariants:
- An object becomes resident only after its frame verified in place.
- Slots go back to L1 (commit or abort) only when no adapter writes into them any more.
- New objects are leased from their commit until every request that waits for the load has taken its own lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.clock import Clock
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, MissReason
from lmcache.l1.adoption import STORAGE_OWNER
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.leases import FOREVER
from lmcache.tiering.verifier import Verifier

log = logging.getLogger("lmcache.tiering")

_WORST = {
    LoadOutcome.MISSING: MissReason.NOT_STORED,
    LoadOutcome.CORRUPT: MissReason.CORRUPT,
    LoadOutcome.FAILED: MissReason.L2_FAILED,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One object to load. `place` is its index in the reservation, [namespace][chunk]."""

    key: ObjectKey
    place: int
    offset: int
    frame_bytes: int
    source: int  # position in the load's order of adapters: the first one that has it


class Load:
    """One reservation on its way. `done` is set, with the reason of each object that is not there, when the outcome is
    known to those who wait."""

    def __init__(self, slots: Sequence[Slot], reservation: int, places: int, runners: Sequence[Runner]) -> None:
        """`runners` in the order in which they are asked."""
        self.slots = slots
        self.runners = runners
        self.reservation = reservation
        self.places = places
        self.done: asyncio.Future[dict[ObjectKey, MissReason]] = asyncio.get_running_loop().create_future()
        self.waiting = 0
        self.lease = 0
        self.operations = 0  # of adapters that may still write into the slots
        self.operations_ended = asyncio.Event()
        self.operations_ended.set()

    @property
    def size_bytes(self) -> int:
        return sum(slot.frame_bytes for slot in self.slots)


class Loader:
    """Belongs to the storage loop."""

    def __init__(
        self,
        l1: L1Store,
        *,
        retains: bool,
        verifier: Verifier,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._l1 = l1
        self._retains = retains
        self._verifier = verifier
        self._metrics = metrics
        self._clock = clock
        self._by_key: dict[ObjectKey, Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes_in_flight = 0  # of loads that somebody may wait for
        self.abandoned_bytes = 0  # of slots that a late operation may still write into
        self.bytes_freed = asyncio.Event()

    def find(self, key: ObjectKey) -> Load | None:
        return self._by_key.get(key)

    def start(self, load: Load) -> None:
        self.bytes_in_flight += load.size_bytes
        for slot in load.slots:
            self._by_key[slot.key] = load
        task = asyncio.get_running_loop().create_task(self._run(load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def join(self, load: Load) -> None:
        load.waiting += 1

    def leave(self, load: Load) -> None:
        """One who joined has taken its own lease, or waits no more."""
        load.waiting -= 1
        if load.waiting == 0 and load.lease:
            self._l1.core.release(load.lease)
            load.lease = 0

    def check_idle(self) -> None:
        """AssertionError unless no load is under way."""
        held = {"keys": len(self._by_key), "loads": len(self._tasks), "bytes": self.bytes_in_flight}
        assert not any(held.values()), f"The loader is not idle: {held}"

    async def drain(self, seconds: float) -> bool:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=max(0.0, seconds))
        return not self._tasks

    async def _run(self, load: Load) -> None:
        missing = {slot.key: MissReason.L2_FAILED for slot in load.slots}
        try:
            missing = await self._fill(load)
            if load.operations:
                # A late operation writes somewhere into these slots: nothing of them can be published.
                missing = {slot.key: MissReason.L2_DEADLINE for slot in load.slots}
                self._l1.core.quarantine(load.reservation)  # their keys can be loaded or stored elsewhere
            else:
                self._publish(load, missing)
        except Exception:  # the root of a task: waiting requests get a miss
            log.exception("A load from L2 failed")
        finally:
            for slot in load.slots:
                del self._by_key[slot.key]
            self._count(load, missing)
            load.done.set_result(missing)
            self.bytes_in_flight -= load.size_bytes
            self.bytes_freed.set()
            await self._end_operations(load)
            self._l1.core.abort(load.reservation)  # nothing, where it was committed

    async def _end_operations(self, load: Load) -> None:
        """What is given up counts apart: an adapter's lane bounds it, and other adapters need not wait for it."""
        if load.operations:
            self.abandoned_bytes += load.size_bytes
            try:
                await load.operations_ended.wait()
            finally:
                self.abandoned_bytes -= load.size_bytes

    def _publish(self, load: Load, missing: dict[ObjectKey, MissReason]) -> None:
        if not load.waiting and not self._retains:
            return  # nobody would ever use it
        written = bytearray(load.places)
        for slot in load.slots:
            written[slot.place] = slot.key not in missing
        owner = STORAGE_OWNER if load.waiting else 0
        _, load.lease, _ = self._l1.core.commit(load.reservation, written, owner, FOREVER, temporary=not self._retains)

    async def _fill(self, load: Load) -> dict[ObjectKey, MissReason]:
        """Asks the adapters in order, each for what the ones before did not give; what none gave, and why."""
        missing: dict[ObjectKey, MissReason] = {}
        todo = list(load.slots)
        for position, runner in enumerate(load.runners):
            now = [slot for slot in todo if slot.source == position]
            now += await self._has(runner, [slot for slot in todo if slot.source < position])
            if not now:
                continue
            failed = await self._load(runner, load, now)
            loaded = {slot.key for slot in now} - failed.keys()
            missing.update(failed)
            for key in loaded:
                missing.pop(key, None)
            todo = [slot for slot in todo if slot.key not in loaded]
            if load.operations:
                break
        return missing

    async def _has(self, runner: Runner, slots: Sequence[Slot]) -> list[Slot]:
        if not slots:
            return []
        there = await runner.probe([slot.key for slot in slots])
        return [slot for slot, has in zip(slots, there, strict=True) if has]

    async def _load(self, runner: Runner, load: Load, slots: Sequence[Slot]) -> dict[ObjectKey, MissReason]:
        keys = [slot.key for slot in slots]
        views = [self._l1.memory.view(slot.offset, slot.frame_bytes) for slot in slots]
        in_flight = self._metrics.num_inflight_l2_loads.labels(runner.name)
        in_flight.inc()
        load.operations += 1
        load.operations_ended.clear()

        def ended() -> None:
            in_flight.dec()
            load.operations -= 1
            if not load.operations:
                load.operations_ended.set()

        started = self._clock.monotonic()
        outcomes = await runner.load(keys, views, ended)
        seconds = self._clock.monotonic() - started
        self._metrics.l2_load_completed.labels(runner.name).inc()
        failed = {
            key: _WORST[outcome]
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome is not LoadOutcome.LOADED
        }
        if not failed and seconds > 0:
            size_bytes = sum(slot.frame_bytes for slot in slots)
            self._metrics.l2_load_throughput.labels(runner.name).observe(size_bytes / seconds / 1e9)
        if load.operations or runner.verifies:
            return failed
        corrupt = await self._verify([slot for slot in slots if slot.key not in failed])
        if corrupt:
            await runner.corrupted(list(corrupt), next(iter(corrupt.values())))
            failed.update(dict.fromkeys(corrupt, MissReason.CORRUPT))
        return failed

    async def _verify(self, slots: Sequence[Slot]) -> dict[ObjectKey, str]:
        """What did not verify, and why."""
        views = [self._l1.memory.view(slot.offset, slot.frame_bytes) for slot in slots]
        faults = await self._verifier.faults([slot.key for slot in slots], views)
        return {slot.key: fault for slot, fault in zip(slots, faults, strict=True) if fault}

    def _count(self, load: Load, missing: dict[ObjectKey, MissReason]) -> None:
        self._metrics.l2_prefetch_load_completed.inc(len(load.slots) - len(missing))
        for reason in missing.values():
            self._metrics.l2_prefetch_failure.labels(reason.value).inc()
