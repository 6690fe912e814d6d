"""Loads of batches of objects from L2 into reserved slots of L1. Requests for the same objects share one load.

Invariants:
- An object becomes resident only after its frame verified in place.
- Slots go back to L1 (commit or abort) only when no adapter writes into them any more.
- New objects are leased from their commit until every request that waits for the load has taken its own lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, MissReason
from lmcache.l2.runner import ProbeAnswer, Runner
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.telemetry.tracing import TierTime
from lmcache.tiering.context import TieringContext
from lmcache.tiering.leases import FOREVER
from lmcache.tiering.verifier import Verifier

log = logging.getLogger("lmcache.tiering")

_MISS_REASONS = {
    LoadOutcome.MISSING: MissReason.NOT_STORED,
    LoadOutcome.CORRUPT: MissReason.CORRUPT,
    LoadOutcome.FAILED: MissReason.L2_FAILED,
}

# Which of these objects the adapter at a position of a load's order has; None where it is late to say so.
Ask: TypeAlias = Callable[[int, Sequence[ObjectKey]], Awaitable["ProbeAnswer | None"]]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where one object is loaded to. `place` is its index in the reservation, [namespace][chunk]."""

    key: ObjectKey
    place: int
    slot: int  # offset in L1
    frame_bytes: int
    source: int  # position in the load's order of adapters: the first one that has it


class BatchLoad:
    """The load into one reservation. `done` gives the reason of each object that could not be loaded."""

    def __init__(
        self,
        targets: Sequence[LoadTarget],
        reservation: int,
        places: int,
        runners: Sequence[Runner],
        ask: Ask | None = None,
    ) -> None:
        """`runners` in the order in which they are asked; by `ask`, for what those before them did not give after
        all."""
        self.targets = targets
        self.runners = runners
        self.ask = ask
        self.reservation = reservation
        self.places = places
        self.done: asyncio.Future[dict[ObjectKey, MissReason]] = asyncio.get_running_loop().create_future()
        self.times: list[TierTime] = []
        self.waiting = 0  # requests
        self.lease = 0  # on what was committed, for those
        self.operations = 0  # of adapters that may still write into the slots
        self.operations_ended = asyncio.Event()
        self.operations_ended.set()

    @property
    def size_bytes(self) -> int:
        return sum(target.frame_bytes for target in self.targets)

    @property
    def adapter(self) -> str:
        """The last one that it needs."""
        return self.runners[max(target.source for target in self.targets)].name


class L2Loader:
    """Belongs to the storage loop."""

    def __init__(self, context: TieringContext, verifier: Verifier, *, retains: bool) -> None:
        """`retains`: what was loaded stays in L1 after its use."""
        self._l1 = context.l1
        self._metrics = context.metrics
        self._clock = context.clock
        self._verifier = verifier
        self._retains = retains
        self._by_key: dict[ObjectKey, BatchLoad] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes_of: Counter[str] = Counter()  # in flight, by adapter: one that is slow holds up no other
        self.abandoned_bytes = 0  # of slots that a late operation may still write into
        self._bytes_freed = asyncio.Event()

    def find(self, key: ObjectKey) -> BatchLoad | None:
        return self._by_key.get(key)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of loads that somebody may wait for."""
        return self._bytes_of.total()

    async def wait_for_room(self, runner: Runner, size_bytes: int) -> None:
        """Until so much more of this adapter may be in flight; one load alone may be larger than the limit."""
        while (held := self._bytes_of[runner.name]) and held + size_bytes > limits.MAX_L2_PREFETCH_BYTES_IN_FLIGHT:
            self._bytes_freed.clear()
            await self._bytes_freed.wait()

    def start(self, load: BatchLoad) -> None:
        self._bytes_of[load.adapter] += load.size_bytes
        for target in load.targets:
            self._by_key[target.key] = load
        task = asyncio.get_running_loop().create_task(self._run(load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def join(self, load: BatchLoad) -> None:
        load.waiting += 1

    def leave(self, load: BatchLoad) -> None:
        """A request that joined has taken its own lease, or waits no more."""
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

    async def _run(self, load: BatchLoad) -> None:
        missing = {target.key: MissReason.L2_FAILED for target in load.targets}
        try:
            missing = await self._fill(load)
            if load.operations:
                # A late operation writes somewhere into these slots: nothing of them can be published.
                missing = {target.key: MissReason.L2_DEADLINE for target in load.targets}
                self._l1.core.quarantine(load.reservation)  # their keys can be loaded or stored elsewhere
            else:
                self._publish(load, missing)
        except Exception:  # the root of a task: waiting requests get a miss
            log.exception("A load from L2 failed")
        finally:
            for target in load.targets:
                del self._by_key[target.key]
            self._count(load, missing)
            load.done.set_result(missing)
            self._bytes_of -= Counter({load.adapter: load.size_bytes})  # adapters without any are left out
            self._bytes_freed.set()
            await self._end_operations(load)
            self._l1.core.abort(load.reservation)  # nothing, where it was committed

    async def _end_operations(self, load: BatchLoad) -> None:
        """Abandoned bytes are counted apart: the adapter's concurrency limit bounds them, and loads from other adapters
        need not wait for them."""
        if load.operations:
            self.abandoned_bytes += load.size_bytes
            try:
                await load.operations_ended.wait()
            finally:
                self.abandoned_bytes -= load.size_bytes

    def _publish(self, load: BatchLoad, missing: dict[ObjectKey, MissReason]) -> None:
        if not load.waiting and not self._retains:
            return  # no request would ever use it
        written = bytearray(load.places)
        for target in load.targets:
            written[target.place] = target.key not in missing
        owner = STORAGE_OWNER if load.waiting else 0
        load.lease = self._l1.core.commit(
            load.reservation, written, lease_owner=owner, deadline=FOREVER, temporary=not self._retains
        ).lease

    async def _fill(self, load: BatchLoad) -> dict[ObjectKey, MissReason]:
        """Asks the adapters in order, each for what those before it did not give. Returns what none gave, and why."""
        missing: dict[ObjectKey, MissReason] = {}
        remaining = list(load.targets)
        for position, runner in enumerate(load.runners):
            wanted = [target for target in remaining if target.source == position]
            before = [target for target in remaining if target.source < position]
            wanted += await self._given_instead(load, position, before, missing)
            if not wanted:
                continue
            failed = await self._load(runner, load, wanted)
            loaded = {target.key for target in wanted} - failed.keys()
            missing.update(failed)
            for key in loaded:
                missing.pop(key, None)
            remaining = [target for target in remaining if target.key not in loaded]
            if load.operations:
                break
        return missing

    async def _given_instead(
        self, load: BatchLoad, position: int, targets: Sequence[LoadTarget], missing: dict[ObjectKey, MissReason]
    ) -> list[LoadTarget]:
        """Those that this adapter has. One that is late keeps nobody from what has been loaded already: whoever waits
        for the rest asks it again."""
        if not targets or load.ask is None:
            return []
        nothing = ProbeAnswer([False] * len(targets), MissReason.L2_DEADLINE)
        exist, fault = await load.ask(position, [target.key for target in targets]) or nothing
        if fault is not None:  # nobody knows whether it has the others
            missing.update((target.key, fault) for target, exists in zip(targets, exist, strict=True) if not exists)
        return list(compress(targets, exist))

    async def _load(
        self, runner: Runner, load: BatchLoad, targets: Sequence[LoadTarget]
    ) -> dict[ObjectKey, MissReason]:
        keys = [target.key for target in targets]
        views = [self._l1.memory.view(target.slot, target.frame_bytes) for target in targets]
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
        load.times.append(TierTime(f"l2 {runner.name}", started, started + seconds, len(targets)))
        self._metrics.l2_load_completed.labels(runner.name).inc()
        self._metrics.l2_load.labels(runner.name).observe(seconds)
        failed = {
            key: _MISS_REASONS[outcome]
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome is not LoadOutcome.LOADED
        }
        size_bytes = sum(target.frame_bytes for target in targets if target.key not in failed)
        self._metrics.l2_loaded.labels(runner.name).inc(size_bytes)
        if not failed and seconds > 0:
            self._metrics.l2_load_throughput.labels(runner.name).observe(size_bytes / seconds / 1e9)
        if load.operations or runner.verifies:
            return failed
        corrupt = await self._verify([target for target in targets if target.key not in failed])
        if corrupt:
            await runner.corrupted(list(corrupt), next(iter(corrupt.values())))
            failed.update(dict.fromkeys(corrupt, MissReason.CORRUPT))
        return failed

    async def _verify(self, targets: Sequence[LoadTarget]) -> dict[ObjectKey, str]:
        """What did not verify, and why."""
        views = [self._l1.memory.view(target.slot, target.frame_bytes) for target in targets]
        faults = await self._verifier.faults([target.key for target in targets], views)
        return {target.key: fault for target, fault in zip(targets, faults, strict=True) if fault}

    def _count(self, load: BatchLoad, missing: dict[ObjectKey, MissReason]) -> None:
        self._metrics.l2_prefetch_load_completed.inc(len(load.targets) - len(missing))
        for reason in missing.values():
            self._metrics.l2_prefetch_failure.labels(reason.value).inc()
