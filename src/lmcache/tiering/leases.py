"""Objects of L1 that the storage loop leases while it copies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache._native import NO_SLOT
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import SlotGrid, pack_keys
from lmcache.l1.store import L1Store
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.telemetry.tracing import StoredTrace

FOREVER = math.inf  # ended by the code that took it, or with the process


@dataclass(slots=True, eq=False)
class QueuedObject:
    """An object of L1 on its way to the adapters."""

    key: ObjectKey
    frame_bytes: int
    queued_at: float = 0.0
    trace: StoredTrace | None = None
    adapters_left: int = 0  # that have not dealt with it yet
    is_stored: bool = False  # by one of them
    is_served: bool = True  # some adapter may have it
    is_discarded: bool = False  # an operator cleared L2 before it was stored

    @property
    def may_leave_l1(self) -> bool:
        return self.is_stored or self.is_discarded


class LeasedObjects:
    """Objects of L1 with a view of each one's frame, readable until `release`."""

    def __init__(self, l1: L1Store, objects: list[QueuedObject], views: list[memoryview], lease: int) -> None:
        self.objects = objects
        self.views = views
        self._l1 = l1
        self._lease = lease

    @property
    def keys(self) -> list[ObjectKey]:
        return [queued.key for queued in self.objects]

    def release(self) -> None:
        for view in self.views:
            try:
                view.release()
            except BufferError:
                pass  # an adapter from outside still exports it: what it reads from now on is undefined
        self._l1.core.release(self._lease)


def lease_objects(l1: L1Store, objects: Sequence[QueuedObject]) -> LeasedObjects:
    """Leases those that are resident, in the order given. Copying is no use: they keep their place in the order of
    eviction."""
    digests, hashes = pack_keys(queued.key for queued in objects)
    acquired = l1.core.acquire_each(STORAGE_OWNER, digests, hashes, FOREVER)
    slots = SlotGrid(acquired.slots, len(objects))
    resident, views = [], []
    for index, queued in enumerate(objects):
        slot = slots[0, index]
        if slot != NO_SLOT:
            resident.append(queued)
            views.append(l1.memory.view(slot, queued.frame_bytes))
    return LeasedObjects(l1, resident, views, acquired.lease)


def are_resident(l1: L1Store, objects: Sequence[QueuedObject]) -> list[bool]:
    return [flag != 0 for flag in l1.core.resident_each(*pack_keys(queued.key for queued in objects))]
