"""Copies single objects between tiers by request, a batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from lmcache._native import NO_SLOT
from lmcache.core import limits
from lmcache.core.frame import parse_header
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet, SlotGrid, pack_keys
from lmcache.core.outcome import HELD
from lmcache.l2.runner import Runner
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.tiering.context import TieringContext
from lmcache.tiering.l2_loads import BatchLoad, L2Loader, LoadTarget
from lmcache.tiering.leases import FOREVER, LeasedObjects, QueuedObject


class ObjectTransfer:
    """Belongs to the storage loop. At most MAX_L2_BATCH_OBJECTS keys a call."""

    def __init__(self, context: TieringContext, loader: L2Loader) -> None:
        self._l1 = context.l1
        self._loader = loader

    async def to_l1(
        self, runner: Runner, keys: Sequence[ObjectKey], frame_bytes: Mapping[Namespace, int]
    ) -> list[ObjectKey]:
        """Loads what that adapter has and L1 lacks, to stay: which keys are in L1 now. `frame_bytes`: of an object of
        each namespace; objects of others are left where they are."""
        exist = await runner.probe(keys)
        by_namespace: dict[Namespace, list[bytes]] = {}
        for key, exists in zip(keys, exist, strict=True):
            if exists and key.namespace in frame_bytes:
                by_namespace.setdefault(key.namespace, []).append(key.chunk_hash)
        for namespace, hashes in by_namespace.items():
            await self._load(runner, namespace, hashes, frame_bytes[namespace])
        resident = self._l1.core.resident_each(*pack_keys(keys))
        return [key for key, is_resident in zip(keys, resident, strict=True) if is_resident]

    async def _load(self, runner: Runner, namespace: Namespace, hashes: Sequence[bytes], size_bytes: int) -> None:
        batch = KeyBatch(NamespaceSet((namespace,), (size_bytes,)), ChunkHashes(b"".join(hashes)))
        await self._loader.wait_for_room(runner, batch.objects * size_bytes)
        reserved = self._l1.reserve(STORAGE_OWNER, batch, FOREVER)
        slots = SlotGrid(reserved.slots, batch.chunks)
        targets = [
            LoadTarget(batch.key(0, chunk), chunk, slots[0, chunk], size_bytes, 0)
            for chunk in range(batch.chunks)
            if slots[0, chunk] != NO_SLOT
        ]
        if targets:
            load = BatchLoad(targets, reserved.reservation, batch.objects, [runner])
            self._loader.join(load)
            self._loader.start(load)
            try:
                await asyncio.shield(load.done)
                self._retain(batch)
            finally:
                self._loader.leave(load)
        else:
            self._retain(batch)

    def _retain(self, batch: KeyBatch) -> None:
        namespace, hashes = batch.namespaces[0], batch.hashes.packed
        self._l1.core.retain(namespace.digest * batch.chunks, hashes)

    async def to_adapter(self, runner: Runner, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Stores what L1 has: which keys the adapter has now."""
        leased = self._lease(keys)
        if not leased.objects:
            leased.release()
            return []
        outcomes = await runner.store(leased.keys, leased.views, leased.release)
        return [key for key, outcome in zip(leased.keys, outcomes, strict=True) if outcome in HELD]

    def _lease(self, keys: Sequence[ObjectKey]) -> LeasedObjects:
        """With the sizes that the headers say."""
        acquired = self._l1.core.acquire_each(STORAGE_OWNER, *pack_keys(keys), FOREVER)
        slots = SlotGrid(acquired.slots, len(keys))
        objects, views = [], []
        for index, key in enumerate(keys):
            slot = slots[0, index]
            if slot == NO_SLOT:
                continue
            try:
                header = parse_header(self._l1.memory.view(slot, limits.FRAME_HEADER_BYTES))
            except ValueError:
                continue  # spoilt: a reader will find that out
            size_bytes = self._l1.frame_bytes(header.payload_bytes)
            objects.append(QueuedObject(key, size_bytes))
            views.append(self._l1.memory.view(slot, size_bytes))
        return LeasedObjects(self._l1, objects, views, acquired.lease)

    def leave_l1(self, keys: Sequence[ObjectKey]) -> int:
        """Removes what nobody reads, and no pin holds: how many."""
        return self._l1.core.remove(*pack_keys(keys))
