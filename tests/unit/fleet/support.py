"""A server of a fleet that is a dict: what it has, its changes in a ring, and what a directory should say of it."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque

from lmcache.core.key import Namespace
from lmcache.core.object_changes import ChangePage, ObjectsPage, Run
from lmcache.fleet.directory import Directory

LAYOUT = "5e" * 16
PAGE_OBJECTS = 7


def namespace(number: int) -> Namespace:
    return Namespace(f"model-{number % 2}", 2, number % 2, 0, LAYOUT, ("", "salt")[number // 2 % 2])


def chunk_hash(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


Object = tuple[int, int]  # numbers of its namespace and its chunk


class DictTier:
    """A `ChangeSource`. Its ring has the last `ring` changes. An object keeps its record, as in a real index."""

    def __init__(self, tier: str = "l1", backend: str = "", ring: int = 50) -> None:
        self.tier = tier
        self.backend = backend
        self.shared = False
        self.capacity = 1 << 20
        self.held: dict[Object, int] = {}
        self._records: list[Object | None] = []
        self._ring: deque[tuple[bool, Object, int]] = deque(maxlen=ring)
        self._written = 0

    def add(self, key: Object, size_bytes: int) -> None:
        if key not in self.held:
            hole = self._records.index(None) if None in self._records else len(self._records)
            self._records[hole : hole + 1] = [key]
        self.held[key] = size_bytes
        self._ring.append((True, key, size_bytes))
        self._written += 1

    def remove(self, key: Object) -> None:
        if (size_bytes := self.lose(key)) is not None:
            self._ring.append((False, key, size_bytes))
            self._written += 1

    def lose(self, key: Object) -> int | None:
        """Behind the back of the server."""
        if key in self.held:
            self._records[self._records.index(key)] = None
        return self.held.pop(key, None)

    def capacity_bytes(self) -> int:
        return self.capacity

    def cursor(self) -> int:
        return self._written

    def changes(self, cursor: int, most: int) -> ChangePage:
        first = self._written - len(self._ring)
        if cursor < first:
            return ChangePage((), self._written, lost=True)
        page = list(self._ring)[cursor - first :][:PAGE_OBJECTS]
        return ChangePage([run(key, size, added=added) for added, key, size in page], cursor + len(page))

    def objects(self, start: int, most: int) -> ObjectsPage:
        page = self._records[start : start + PAGE_OBJECTS]
        end = start + len(page)
        runs = [run(key, self.held[key], added=True) for key in page if key is not None]
        return ObjectsPage(runs, end if end < len(self._records) else 0)


def run(key: Object, size_bytes: int, *, added: bool) -> Run:
    return Run(namespace(key[0]), chunk_hash(key[1]), array("Q", [size_bytes]).tobytes(), added)


def shown(key: Object) -> tuple[str, int, str, str, str]:
    """Model, rank, salt, namespace and chunk hash of an object, as a directory says them."""
    of = namespace(key[0])
    return of.model_name, of.rank, of.cache_salt, of.digest.hex(), chunk_hash(key[1]).hex()


def truth(instance_id: str, tiers: list[DictTier]) -> dict[tuple[object, ...], int]:
    return {
        (instance_id, tier.tier, tier.backend, *shown(key)): size for tier in tiers for key, size in tier.held.items()
    }


def told(directory: Directory) -> dict[tuple[object, ...], int]:
    """All that the directory says, by pages."""
    found: dict[tuple[object, ...], int] = {}
    offset, more = 0, True
    while more:
        entries, offset = directory.list_keys("", "", "", offset, 100)
        for entry in entries:
            key, place = entry.key, entry.placement
            name = (place.instance_id, place.tier, place.backend, key.model_name, key.kv_rank, key.cache_salt)
            assert (*name, key.namespace, key.chunk_hash_hex) not in found
            found[(*name, key.namespace, key.chunk_hash_hex)] = place.size_bytes
        more = offset > 0
    return found
