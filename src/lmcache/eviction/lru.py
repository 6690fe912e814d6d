"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LRU(Generic[K]):
    def __init__(self) -> None:
        self._sizes: OrderedDict[K, int] = OrderedDict()  # oldest first

    def add(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            self._sizes[key] = size
            self._sizes.move_to_end(key)

    def add_older(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            if key not in self._sizes:
                self._sizes[key] = size
                self._sizes.move_to_end(key, last=False)

    def touch(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def remove(self, key: K) -> None:
        self._sizes.pop(key, None)

    def victims(self, wanted_bytes: int) -> list[K]:
        chosen: list[K] = []
        for key, size in self._sizes.items():
            if wanted_bytes <= 0:
                break
            chosen.append(key)
            wanted_bytes -= size
        return chosen
