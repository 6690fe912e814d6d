"""What the storage loop itself holds in L1 while it moves bytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.core.key import CHUNK_HASH_BYTES, ObjectKey
from lmcache.l1.adoption import STORAGE_OWNER
from lmcache.l1.store import L1Store

FOREVER = math.inf  # ended by the code that took it; there is no other life to outlive


@dataclass(slots=True, eq=False)
class QueuedObject:
    """An object of L1 on its way to the adapters. What is known of the way is kept here, and so ends with it."""

    key: ObjectKey
    frame_bytes: int
    adapters_left: int = 0  # that have not dealt with it yet
    is_stored: bool = False  # by one of them
    is_discarded: bool = False  # an operator asked for it


class Leased:
    """Objects that were there, in the order asked for, readable until `release`."""

    def __init__(self, l1: L1Store) -> None:
        self.objects: list[QueuedObject] = []
        self.views: list[memoryview] = []
        self.leases: list[int] = []
        self._l1 = l1

    @property
    def keys(self) -> list[ObjectKey]:
        return [queued.key for queued in self.objects]

    def release(self) -> None:
        for view in self.views:
            try:
                view.release()
            except BufferError:
                pass  # an adapter from outside keeps an export: what it reads there from now on is its own affair
        for lease in self.leases:
            self._l1.core.release(lease)


def lease_objects(l1: L1Store, objects: Sequence[QueuedObject]) -> Leased:
    """Leases each on its own: what was evicted meanwhile is left out. To be copied elsewhere is no use: the objects
    keep their place in the order of eviction."""
    leased = Leased(l1)
    offsets: list[int | None] = [None] * len(objects)
    for digest, hashes, indices in _by_namespace(objects):
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
    for queued, place in zip(objects, offsets, strict=True):
        if place is not None:
            leased.objects.append(queued)
            leased.views.append(l1.memory.view(place, queued.frame_bytes))
    return leased


def are_resident(l1: L1Store, objects: Sequence[QueuedObject]) -> list[bool]:
    resident = [False] * len(objects)
    for digest, hashes, indices in _by_namespace(objects):
        at = 0
        while at < len(indices):
            chunks = l1.core.probe(digest, hashes[at * CHUNK_HASH_BYTES :])
            for index in indices[at : at + chunks]:
                resident[index] = True
            at += chunks + 1
    return resident


def _by_namespace(objects: Sequence[QueuedObject]) -> list[tuple[bytes, memoryview, list[int]]]:
    """Of each namespace its digest, the hashes of its objects and their positions."""
    positions: dict[bytes, list[int]] = {}
    for index, queued in enumerate(objects):
        positions.setdefault(queued.key.namespace.digest, []).append(index)
    return [
        (digest, memoryview(b"".join(objects[index].key.chunk_hash for index in indices)), indices)
        for digest, indices in positions.items()
    ]
