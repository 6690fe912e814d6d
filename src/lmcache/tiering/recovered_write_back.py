"""Stores in L2 what a restart recovered in L1 and L2 does not have: objects whose store the previous server did not
finish. Payloads are verified first, since recovery checks headers only.

Each adapter is given its objects at its own speed, a page at a time: a slow one delays no other. Under a policy that
drops objects from L1, an object leaves when the last of its adapters has dealt with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import compress

from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import pack_keys
from lmcache.tiering.context import TieringContext
from lmcache.tiering.leases import QueuedObject, lease_objects
from lmcache.tiering.verifier import Verifier
from lmcache.tiering.write_back import WriteBack

log = logging.getLogger("lmcache.tiering")

PAGE_OBJECTS = 256
_ALL = 1 << 32


class RecoveredWriteBack:
    """Belongs to the storage loop. Its objects are those that are resident when it is made, before engines come."""

    def __init__(self, context: TieringContext, write_back: WriteBack, verifier: Verifier) -> None:
        self._l1 = context.l1
        self._runners = context.runners
        self._metrics = context.metrics
        self._write_back = write_back
        self._verifier = verifier
        self._objects = self._l1.core.list_objects(0, _ALL)
        # A byte for each object:
        self._is_planned = bytearray(len(self._objects))
        self._is_due = [bytearray(len(self._objects)) for _ in self._runners]  # for that adapter
        self._is_stored = bytearray(len(self._objects))  # by some adapter
        self._is_whole = bytearray(len(self._objects))  # verified

    async def run(self) -> None:
        await asyncio.gather(*(self._bring_all(index) for index in range(len(self._runners))))

    async def _bring_all(self, index: int) -> None:
        runner = self._runners[index]
        await runner.wait_for_inventory()
        offered = 0
        for first in range(0, len(self._objects), PAGE_OBJECTS):
            offered += await self._bring(index, self._due(index, first))
        if offered:
            log.info("%s: was given %d objects of the previous server's L1", runner.name, offered)

    def _due(self, index: int, first: int) -> list[int]:
        """The numbers of the objects of a page that this adapter is to have."""
        numbers = range(first, min(len(self._objects), first + PAGE_OBJECTS))
        if not self._is_planned[first]:
            objects = [self._queued(number) for number in numbers]
            for number, indices in zip(numbers, self._write_back.targets(objects), strict=True):
                self._is_planned[number] = True
                for target in indices:
                    self._is_due[target][number] = True
        return list(compress(numbers, self._is_due[index][first : numbers.stop]))

    def _queued(self, number: int) -> QueuedObject:
        record = self._objects[number]
        namespace = self._l1.recovered.namespaces[record.namespace_digest]
        return QueuedObject(ObjectKey(namespace, record.chunk_hash), record.size_bytes)

    async def _bring(self, index: int, numbers: Sequence[int]) -> int:
        """Until the adapter has dealt with these; how many it lacked."""
        page = {number: self._queued(number) for number in numbers}
        exist = await self._runners[index].probe([queued.key for queued in page.values()])
        for queued, exists in zip(page.values(), exist, strict=True):
            queued.is_stored = exists
        wanted = await self._verified({number: queued for number, queued in page.items() if not queued.is_stored})
        if wanted:
            await self._write_back.store_in(index, wanted)
        self._settle(index, page)
        return len(wanted)

    async def _verified(self, page: dict[int, QueuedObject]) -> list[QueuedObject]:
        """Those whose frame is whole; corrupt ones leave L1, and are due no more."""
        unknown = [queued for number, queued in page.items() if not self._is_whole[number]]
        corrupt: set[ObjectKey] = set()
        if unknown:
            leased = lease_objects(self._l1, unknown)
            faults = await self._verifier.faults(leased.keys, leased.views, leased.release)
            corrupt = {key for key, fault in zip(leased.keys, faults, strict=True) if fault}
        gone = []
        for number, queued in page.items():
            if queued.key not in corrupt:
                self._is_whole[number] = True
            elif any(is_due[number] for is_due in self._is_due):  # else another adapter's turn found it
                gone.append(queued.key)
                for is_due in self._is_due:
                    is_due[number] = False
        if gone:
            self._remove_corrupt(gone)
        return [queued for queued in page.values() if queued.key not in corrupt]

    def _settle(self, index: int, page: dict[int, QueuedObject]) -> None:
        ended = []
        for number, queued in page.items():
            if not self._is_due[index][number]:
                continue  # corrupt
            self._is_due[index][number] = False
            self._is_stored[number] |= queued.may_leave_l1
            if not any(is_due[number] for is_due in self._is_due):
                queued.adapters_left, queued.is_stored = 0, bool(self._is_stored[number])
                ended.append(queued)
        self._write_back.settle(ended)

    def _remove_corrupt(self, keys: Sequence[ObjectKey]) -> None:
        self._l1.core.remove(*pack_keys(keys))
        self._metrics.corrupt_frames.labels("l1").inc(len(keys))
        log.warning("L1: %d objects of the previous server are corrupt and dropped", len(keys))
