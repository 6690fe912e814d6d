"""Deletes from a backend what its policy can spare. Beside the layers: they use it, and the storage loop does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from lmcache.core.key import ObjectKey
from lmcache.l2.accounting import CapacityReservation
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.deletion import DELETE_SLICE_OBJECTS, AdapterDeletion


class Freed(NamedTuple):
    objects: int
    size_bytes: int


class AdapterEviction:
    def __init__(self, context: AdapterContext, deletion: AdapterDeletion) -> None:
        self._context = context
        self._ledger = context.ledger
        self._deletion = deletion
        self._taking_turns = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    async def evict(self, wanted_bytes: int) -> Freed:
        """At least that many bytes, if the policy and the backend let it. Ends when the backend is suspended."""
        async with self._taking_turns:
            self._idle.clear()
            try:
                freed = await self._evict(wanted_bytes)
            finally:
                self._idle.set()
        self._context.metrics.l2_evicted_objects.labels(self._context.name).inc(freed.objects)
        self._context.on_change()
        return freed

    async def _evict(self, wanted_bytes: int) -> Freed:
        objects = freed_bytes = chosen_bytes = 0
        undeleted: list[list[ObjectKey]] = []  # no victims again in this call
        try:
            while chosen_bytes < wanted_bytes:
                victims = self._ledger.victims(wanted_bytes - chosen_bytes, DELETE_SLICE_OBJECTS)
                if not victims.keys:
                    break
                chosen_bytes += victims.size_bytes
                undeleted.append(victims.keys)
                are_gone = await self._deletion.delete_uncounted(victims.keys)
                gone = [key for key, is_gone in zip(victims.keys, are_gone, strict=True) if is_gone]
                undeleted[-1] = [key for key, is_gone in zip(victims.keys, are_gone, strict=True) if not is_gone]
                freed_bytes += self._ledger.evicted(gone)
                objects += len(gone)
                self._wake_waiting()
                if self._deletion.is_suspended:
                    break
        finally:
            for keys in reversed(undeleted):  # the youngest first: each then finds its previous place at once
                self._ledger.not_evicted(keys)
        return Freed(objects, freed_bytes)

    def _wake_waiting(self) -> None:
        """An eviction of many slices goes on without those whose objects are gone."""
        self._idle.set()
        self._idle.clear()

    async def some_ended(self, deadline: float) -> bool:
        """Until some deletions have ended, or the eviction under way has. False when the deadline, in the loop's time,
        came first."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            return False
        return True

    async def evict_above_watermark(self) -> Freed:
        eviction = self._context.config.eviction
        if eviction is None or self._ledger.fraction <= eviction.trigger_watermark:
            return Freed(0, 0)
        return await self.evict(self.share_bytes)

    @property
    def share_bytes(self) -> int:
        """What is evicted at a time, `eviction_ratio` of what is there."""
        eviction = self._context.config.eviction
        return int(eviction.eviction_ratio * self._ledger.used_bytes) if eviction else 0

    async def make_room(
        self, keys: Sequence[ObjectKey], charges_bytes: Sequence[int], reservation: CapacityReservation
    ) -> int:
        """Evicts what it takes and reserves: how many of the objects, from the first one on, have room."""
        ledger, limit_bytes = self._ledger, self._ledger.capacity.limit_bytes
        count, total_bytes = len(keys), sum(charges_bytes)
        while limit_bytes is not None and count and total_bytes > limit_bytes:
            count -= 1
            total_bytes -= charges_bytes[count]
        keys = keys[:count]
        while lacking_bytes := ledger.lacking_bytes(keys, total_bytes):
            if not (await self.evict(lacking_bytes)).size_bytes:
                break
        else:
            reservation.reserve(keys, total_bytes)
            return count
        for index, key in enumerate(keys):
            if ledger.lacking_bytes([key], charges_bytes[index]):
                return index
            reservation.reserve([key], charges_bytes[index])
        return count
