"""Stores in L2 what a restart recovered in L1 and L2 does not have: objects whose store the previous server did not
finish. Payloads are verified first, since recovery checks headers only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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

    async def run(self) -> None:
        for runner in self._runners:
            await runner.wait_for_inventory()
        offered = 0
        for first in range(0, len(self._objects), PAGE_OBJECTS):
            page = [self._queued(index) for index in range(first, min(len(self._objects), first + PAGE_OBJECTS))]
            wanted = await self._verified(await self._wanted(page))
            self._write_back.offer(wanted)
            offered += len(wanted)
            await self._write_back.wait_for_room(PAGE_OBJECTS)  # engines' own stores go first
        if offered:
            log.info("%d objects of the former server's L1 were given to L2", offered)

    def _queued(self, index: int) -> QueuedObject:
        record = self._objects[index]
        namespace = self._l1.recovered.namespaces[record.namespace_digest]
        return QueuedObject(ObjectKey(namespace, record.chunk_hash), record.size_bytes)

    async def _wanted(self, page: Sequence[QueuedObject]) -> list[QueuedObject]:
        """Those that some adapter lacks that may have them; all of them where objects leave L1 once they are stored."""
        if self._write_back.drops_from_l1:
            return list(page)
        lacking: set[ObjectKey] = set()
        for runner in self._runners:
            keys = [queued.key for queued in page if runner.serves(queued.key.namespace)]
            exist = await runner.probe(keys)
            lacking.update(key for key, exists in zip(keys, exist, strict=True) if not exists)
        return [queued for queued in page if queued.key in lacking]

    async def _verified(self, page: Sequence[QueuedObject]) -> list[QueuedObject]:
        """Those whose frame is whole; the others leave L1."""
        if not page:
            return []
        leased = lease_objects(self._l1, page)
        faults = await self._verifier.faults(leased.keys, leased.views, leased.release)
        corrupt = [queued.key for queued, fault in zip(leased.objects, faults, strict=True) if fault]
        if corrupt:
            self._remove_corrupt(corrupt)
        return [queued for queued, fault in zip(leased.objects, faults, strict=True) if not fault]

    def _remove_corrupt(self, keys: Sequence[ObjectKey]) -> None:
        self._l1.core.remove(*pack_keys(keys))
        self._metrics.corrupt_frames.labels("l1").inc(len(keys))
        log.warning("L1: %d objects of the former server are corrupt and dropped", len(keys))
