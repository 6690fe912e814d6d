"""What the storage loop itself holds in L1 while it moves bytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from lmcache.core.key import CHUNK_HASH_BYTES, ObjectKey
from lmcache.l1.adoption import STORAGE_OWNER
from lmcache.l1.store import L1Store

FOREVER = math.inf  # ended by the code that took it; there is no other life to outlive


class Leased:
    """Objects that were there, in the order asked for, readable until `release`."""

    def __init__(self, l1: L1Store) -> None:
        self.keys: list[ObjectKey] = []
        self.views: list[memoryview] = []
        self.leases: list[int] = []
        self._l1 = l1

    def release(self) -> None:
        for view in self.views:
            view.release()
        for lease in self.leases:
            self._l1.core.release(lease)


def lease_objects(l1: L1Store, objects: Sequence[tuple[ObjectKey, int]]) -> Leased:
    """Leases (key, bytes), each on its own: what was evicted meanwhile is left out. To be copied
    elsewhere is no use: the objects keep their place in the order of eviction."""
    leased = Leased(l1)
    offsets: list[int | None] = [None] * len(objects)
    by_namespace: dict[bytes, list[int]] = {}
    for index, (key, _) in enumerate(objects):
        by_namespace.setdefault(key.namespace.digest, []).append(index)
    for digest, indices in by_namespace.items():
        hashes = b"".join(objects[index][0].chunk_hash for index in indices)
        at = 0
        while at < len(indices):
            # A prefix at a time: what follows a gap is asked for again.
            rest = hashes[at * CHUNK_HASH_BYTES :]
            lease, chunks, found = l1.core.acquire(STORAGE_OWNER, digest, rest, FOREVER, is_use=False)
            if lease:
                leased.leases.append(lease)
                for index, offset in zip(indices[at : at + chunks], array("Q", found), strict=True):
                    offsets[index] = offset
            at += chunks + 1
    for (key, frame_bytes), place in zip(objects, offsets, strict=True):
        if place is not None:
            leased.keys.append(key)
            leased.views.append(l1.memory.view(place, frame_bytes))
    return leased
