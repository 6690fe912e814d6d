"""What no adapter took, under a policy that drops objects from L1 once they are stored: it stays in L1 while there is
room there, and is offered again when an adapter takes stores.

Invariant: under such a policy an object of L1 is queued for an adapter, being written, in here, or on some adapter. One
that leaves L1 while it is on no adapter is counted as lost, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.leases import QueuedObject, are_resident

log = logging.getLogger("lmcache.tiering")

PERIOD_SECONDS = 1.0
MOST_PERIODS_BETWEEN_OFFERS = 64
SAID_EVERY_SECONDS = 60.0
_SLICE_OBJECTS = 1024  # looked at without letting others go on


class Unstored:
    """Belongs to the storage loop."""

    def __init__(
        self,
        l1: L1Store,
        runners: Sequence[Runner],
        remove: Callable[[Sequence[QueuedObject]], None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`remove` takes objects out of L1."""
        self._l1 = l1
        self._runners = runners
        self._remove = remove
        self._metrics = metrics
        self._clock = clock
        self._objects: dict[ObjectKey, QueuedObject] = {}  # oldest first
        self._evictions_seen = 0
        self._lost_unsaid = 0
        self._lost_said_until = 0.0
        self._kept_said_until = 0.0

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, objects: Sequence[QueuedObject]) -> None:
        """Beyond the limit the oldest ones are given up."""
        resident = are_resident(self._l1, objects)
        kept = [queued for queued, is_there in zip(objects, resident, strict=True) if is_there]
        self._note_gone([queued for queued, is_there in zip(objects, resident, strict=True) if not is_there])
        for queued in kept:
            self._objects[queued.key] = queued
        if kept:
            self._say_kept()
        surplus = len(self._objects) - limits.MAX_L2_UNSTORED_OBJECTS
        if surplus > 0:
            self._give_up(list(islice(filter(self._waits, self._objects.values()), surplus)))
        self._show()

    def committed_again(self, keys: Iterable[ObjectKey]) -> None:
        """Objects that just became resident: one that is in here was evicted before, and computed once more."""
        if self._objects:
            back = [self._objects.pop(key) for key in keys if key in self._objects]
            self._note_gone(back)
            self._show()

    def __contains__(self, queued: QueuedObject) -> bool:
        return self._objects.get(queued.key) is queued

    def oldest_first(self) -> list[QueuedObject]:
        return list(self._objects.values())

    def forget(self, objects: Iterable[QueuedObject]) -> None:
        """They are stored."""
        for queued in objects:
            if queued in self:
                del self._objects[queued.key]
        self._show()

    def give_up_bytes(self, wanted_bytes: int) -> tuple[int, int]:
        """Takes the oldest out of L1, that many bytes or all there are: (objects, bytes)."""
        oldest: list[QueuedObject] = []
        freed_bytes = 0
        for queued in self._objects.values():
            if freed_bytes >= wanted_bytes:
                break
            if self._waits(queued):
                oldest.append(queued)
                freed_bytes += queued.frame_bytes
        self._give_up(oldest)
        return len(oldest), freed_bytes

    def clear(self, *, remove: bool) -> None:
        """An operator emptied a tier: nothing of it counts as lost. `remove`: L1 still has them."""
        objects = list(self._objects.values())
        self._objects.clear()
        if remove:
            self._remove(objects)
        self._show()

    async def count_evicted(self) -> None:
        """Counts what left L1 meanwhile. Costs nothing while L1 evicts nothing."""
        evictions = self._l1.core.stats()["evicted_objects"]
        if evictions == self._evictions_seen:
            return
        self._evictions_seen = evictions
        remembered = list(self._objects.values())
        for start in range(0, len(remembered), _SLICE_OBJECTS):
            part = [queued for queued in remembered[start : start + _SLICE_OBJECTS] if self._waits(queued)]
            resident = are_resident(self._l1, part)
            self._note_gone([queued for queued, is_there in zip(part, resident, strict=True) if not is_there])
            await asyncio.sleep(0)

    def _waits(self, queued: QueuedObject) -> bool:
        """Whether it is in here and not being offered right now, which ends in `add` or `forget`."""
        return queued in self and not queued.adapters_left

    def _give_up(self, objects: Sequence[QueuedObject]) -> None:
        self._remove(objects)
        self._note_gone(objects)

    def _note_gone(self, objects: Sequence[QueuedObject]) -> None:
        """They are not in L1 any more. What some adapter has after all, by another way, is not lost."""
        if not objects:
            return
        for queued in objects:
            if queued in self:
                del self._objects[queued.key]
        keys = [queued.key for queued in objects]
        held = [any(holds) for holds in zip(*(runner.holds(keys) for runner in self._runners), strict=True)]
        self.note_lost(held.count(False))
        self._show()

    def note_lost(self, objects: int) -> None:
        """Engines were told that these are stored, and now they are nowhere."""
        if not objects:
            return
        self._metrics.l2_store_lost.inc(objects)
        self._lost_unsaid += objects
        now = self._clock.monotonic()
        if now >= self._lost_said_until:
            log.warning(
                "%d objects were lost: they left L1 before any adapter took them; they are computed again when they "
                "are needed (said once a minute at most)",
                self._lost_unsaid,
            )
            self._lost_unsaid = 0
            self._lost_said_until = now + SAID_EVERY_SECONDS

    def _say_kept(self) -> None:
        now = self._clock.monotonic()
        if now >= self._kept_said_until:
            self._kept_said_until = now + SAID_EVERY_SECONDS
            log.warning(
                "%d objects stay in L1 because no adapter took them; they are offered again when one does (said once a "
                "minute at most)",
                len(self._objects),
            )

    def _show(self) -> None:
        self._metrics.l2_store_unstored.set(len(self._objects))
