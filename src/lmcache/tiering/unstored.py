"""Objects that no adapter took, under a policy that removes objects from L1 once they are stored. They stay in L1 while
there is room and are offered again when an adapter takes stores. Where L1 evicts nothing, objects that no adapter may
have are here, too, so that they make room.

Invariant: under such a policy an object of L1 is queued for an adapter, being written, in this set, or on some adapter.
One that leaves L1 while no adapter has it is counted as lost, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.tiering.context import TieringContext
from lmcache.tiering.leases import QueuedObject, are_resident

log = logging.getLogger("lmcache.tiering")

MOST_PERIODS_BETWEEN_OFFERS = 64
LOG_INTERVAL_SECONDS = 60.0  # as the lines say
_SLICE_OBJECTS = 1024  # checked before other tasks run


class Unstored:
    """Belongs to the storage loop."""

    def __init__(self, context: TieringContext, remove: Callable[[Sequence[QueuedObject]], None]) -> None:
        """`remove` takes objects out of L1."""
        self._l1 = context.l1
        self._runners = context.runners
        self._metrics = context.metrics
        self._remove = remove
        self._objects: dict[ObjectKey, QueuedObject] = {}  # oldest first
        self._evictions_seen = 0
        self._lost_unlogged = 0
        self._log_limiter = LogLimiter(LOG_INTERVAL_SECONDS, context.clock)

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, objects: Sequence[QueuedObject]) -> None:
        """Beyond the limit the oldest ones are given up."""
        resident = are_resident(self._l1, objects)
        kept = {queued.key: queued for queued in compress(objects, resident)}
        self._note_gone([queued for queued in objects if queued.key not in kept])
        self._objects.update(kept)
        if any(queued.is_served for queued in kept.values()):
            self._log_kept()
        surplus = len(self._objects) - limits.MAX_L2_UNSTORED_OBJECTS
        if surplus > 0:
            self._give_up(list(islice(filter(self._waits, self._objects.values()), surplus)))
        self._update_gauge()

    def add_unserved(self, objects: Sequence[QueuedObject]) -> None:
        """Those that no adapter will ever take, where L1 evicts nothing: they wait for nobody but make room."""
        for queued in objects:
            queued.is_served = False
        self.add(objects)

    def committed_again(self, keys: Iterable[ObjectKey]) -> None:
        """Objects that just became resident: one of this set was evicted before, and computed once more."""
        if self._objects:
            self._note_gone([self._objects.pop(key) for key in keys if key in self._objects])
            self._update_gauge()

    def __contains__(self, queued: QueuedObject) -> bool:
        return self._objects.get(queued.key) is queued

    def to_offer(self) -> list[QueuedObject]:
        """The oldest first."""
        return [queued for queued in self._objects.values() if queued.is_served]

    def forget(self, objects: Iterable[QueuedObject]) -> None:
        """They are stored."""
        for queued in objects:
            if queued in self:
                del self._objects[queued.key]
        self._update_gauge()

    def give_up_bytes(self, wanted_bytes: int) -> None:
        """Removes the oldest from L1, that many bytes or all of them."""
        oldest: list[QueuedObject] = []
        for queued in filter(self._waits, self._objects.values()):
            if wanted_bytes <= 0:
                break
            oldest.append(queued)
            wanted_bytes -= queued.frame_bytes
        self._give_up(oldest)

    def clear(self, *, remove: bool) -> None:
        """An operator emptied a tier: nothing of it counts as lost. `remove`: L1 still has them."""
        objects = list(self._objects.values())
        self._objects.clear()
        if remove:
            self._remove(objects)
        self._update_gauge()

    async def count_evicted(self) -> None:
        """Counts objects that L1 has evicted. Costs nothing while L1 evicts nothing."""
        evictions = self._l1.core.stats()["evicted_objects"]
        if evictions == self._evictions_seen:
            return
        self._evictions_seen = evictions
        waiting = list(self._objects.values())
        for start in range(0, len(waiting), _SLICE_OBJECTS):
            part = [queued for queued in waiting[start : start + _SLICE_OBJECTS] if self._waits(queued)]
            resident = are_resident(self._l1, part)
            self._note_gone([queued for queued, is_resident in zip(part, resident, strict=True) if not is_resident])
            await asyncio.sleep(0)

    def _waits(self, queued: QueuedObject) -> bool:
        """Whether it is in this set and not being offered right now, which ends in `add` or `forget`."""
        return queued in self and not queued.adapters_left

    def _give_up(self, objects: Sequence[QueuedObject]) -> None:
        self._remove(objects)
        self._note_gone(objects)

    def _note_gone(self, objects: Sequence[QueuedObject]) -> None:
        """They have left L1. An object that some adapter holds all the same is not lost."""
        if not objects:
            return
        for queued in objects:
            if queued in self:
                del self._objects[queued.key]
        keys = [queued.key for queued in objects]
        known = [any(flags) for flags in zip(*(runner.knows(keys) for runner in self._runners), strict=True)]
        self.note_lost(known.count(False))
        self._update_gauge()

    def note_lost(self, objects: int) -> None:
        """Engines count on these being stored, and now they are nowhere."""
        if not objects:
            return
        self._metrics.l2_store_lost.inc(objects)
        self._lost_unlogged += objects
        if self._log_limiter.due("lost"):
            log.warning(
                "%d objects were lost: they left L1 before any adapter took them; they are computed again when they "
                "are needed (said once a minute at most)",
                self._lost_unlogged,
            )
            self._lost_unlogged = 0

    def _log_kept(self) -> None:
        if self._log_limiter.due("kept"):
            log.warning(
                "%d objects stay in L1 because no adapter took them; they are offered again when one does (said once a "
                "minute at most)",
                len(self._objects),
            )

    def _update_gauge(self) -> None:
        self._metrics.l2_store_unstored.set(len(self._objects))
