"""One LRU for each cache salt. The salt that holds most for its limit gives first."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from lmcache.eviction.limits import SaltLimits

K = TypeVar("K", bound=Hashable)


class IsolatedLRU(Generic[K]):
    """Where a tier is smaller than its limits together, they say in which ratio it is shared; a salt without a limit
    gives before all others."""

    def __init__(self, salt_of: Callable[[K], str], limits: SaltLimits) -> None:
        self._salt_of = salt_of
        self._limits = limits
        self._salts: dict[str, OrderedDict[K, int]] = {}  # sizes, oldest first
        self._held_bytes: dict[str, int] = {}

    def add(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            self._charge(key, size).move_to_end(key)

    def add_older(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            if key not in self._salts.get(self._salt_of(key), ()):
                self._charge(key, size).move_to_end(key, last=False)

    def _charge(self, key: K, size: int) -> OrderedDict[K, int]:
        salt = self._salt_of(key)
        order = self._salts.setdefault(salt, OrderedDict())
        self._held_bytes[salt] = self._held_bytes.get(salt, 0) + size - order.get(key, 0)
        order[key] = size
        return order

    def touch(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            order = self._salts.get(self._salt_of(key))
            if order is not None and key in order:
                order.move_to_end(key)

    def remove(self, key: K) -> None:
        salt = self._salt_of(key)
        order = self._salts.get(salt)
        if order is None or key not in order:
            return
        self._held_bytes[salt] -= order.pop(key)
        if not order:
            del self._salts[salt], self._held_bytes[salt]

    def victims(self, wanted_bytes: int) -> list[K]:
        limits = self._limits.all()

        def part(held_bytes: int, salt: str) -> float:
            limit = limits.get(salt, 0)
            return held_bytes / limit if limit else math.inf

        orders = {salt: iter(order.items()) for salt, order in self._salts.items()}
        fullest = [(-part(held, salt), salt, held) for salt, held in self._held_bytes.items()]
        heapq.heapify(fullest)
        chosen: list[K] = []
        while wanted_bytes > 0 and fullest:
            _, salt, held_bytes = fullest[0]
            found = next(orders[salt], None)
            if found is None:
                heapq.heappop(fullest)
                continue
            key, size = found
            chosen.append(key)
            wanted_bytes -= size
            heapq.heapreplace(fullest, (-part(held_bytes - size, salt), salt, held_bytes - size))
        return chosen
