"""Brings to L2 what a restart found in L1 and L2 does not have: commits whose store the former server did not live to
see. Payloads are verified first, since nobody has looked at them since they were found."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

from lmcache.core.key import CHUNK_HASH_BYTES, NAMESPACE_DIGEST_BYTES, ObjectKey
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.leases import QueuedObject, lease_objects
from lmcache.tiering.store import StoreController
from lmcache.tiering.verifier import Verifier

log = logging.getLogger("lmcache.tiering")

PAGE_OBJECTS = 256
_ALL = 1 << 32


class CatchUp:
    """Belongs to the storage loop. Its objects are those that are resident when it is made, before engines come."""

    def __init__(
        self, l1: L1Store, runners: Sequence[Runner], store: StoreController, verifier: Verifier, metrics: Metrics
    ) -> None:
        self._l1 = l1
        self._runners = runners
        self._store = store
        self._verifier = verifier
        self._metrics = metrics
        digests, self._positions, self._hashes, self._sizes, _ = l1.core.list_objects(0, _ALL)
        self._namespaces = [
            l1.adoption.namespaces[digests[at : at + NAMESPACE_DIGEST_BYTES]]
            for at in range(0, len(digests), NAMESPACE_DIGEST_BYTES)
        ]

    async def run(self) -> None:
        for runner in self._runners:
            await runner.wait_for_inventory()
        positions, sizes = array("I", self._positions), array("Q", self._sizes)
        offered = 0
        for first in range(0, len(positions), PAGE_OBJECTS):
            page = [
                QueuedObject(
                    ObjectKey(
                        self._namespaces[positions[index]],
                        self._hashes[index * CHUNK_HASH_BYTES : (index + 1) * CHUNK_HASH_BYTES],
                    ),
                    sizes[index],
                )
                for index in range(first, min(len(positions), first + PAGE_OBJECTS))
            ]
            wanted = await self._verified(await self._wanted(page))
            self._store.offer(wanted)
            offered += len(wanted)
            await self._store.wait_for_room(PAGE_OBJECTS)  # engines' own stores go first
        if offered:
            log.info("%d objects of the former server's L1 were given to L2", offered)

    async def _wanted(self, page: Sequence[QueuedObject]) -> list[QueuedObject]:
        """Those that some adapter does not have; all of them where they are to leave L1 afterwards."""
        if self._store.drops_from_l1:
            return list(page)
        lacking: set[ObjectKey] = set()
        keys = [queued.key for queued in page]
        for runner in self._runners:
            there = await runner.probe(keys)
            lacking.update(key for key, has in zip(keys, there, strict=True) if not has)
        return [queued for queued in page if queued.key in lacking]

    async def _verified(self, page: Sequence[QueuedObject]) -> list[QueuedObject]:
        """Those whose frame is whole; the others leave L1."""
        if not page:
            return []
        leased = lease_objects(self._l1, page)
        faults = await self._verifier.faults(leased.keys, leased.views, leased.release)
        corrupt = [queued.key for queued, fault in zip(leased.objects, faults, strict=True) if fault]
        if corrupt:
            self._drop(corrupt)
        return [queued for queued, fault in zip(leased.objects, faults, strict=True) if not fault]

    def _drop(self, keys: Sequence[ObjectKey]) -> None:
        digests = b"".join(key.namespace.digest for key in keys)
        self._l1.core.remove(digests, b"".join(key.chunk_hash for key in keys))
        self._metrics.corrupt_frames.labels("l1").inc(len(keys))
        log.warning("L1: %d objects of the former server are corrupt and dropped", len(keys))
