"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LRU(Generic[K]):
    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # oldest first

    def add(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def add_older(self, keys: Sequence[K]) -> None:
        for key in keys:
            if key not in self._order:
                self._order[key] = None
                self._order.move_to_end(key, last=False)

    def touch(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        self._order.pop(key, None)

    def victims(self, size_of: Callable[[K], int], wanted_bytes: int) -> list[K]:
        chosen: list[K] = []
        for key in self._order:
            if wanted_bytes <= 0:
                break
            chosen.append(key)
            wanted_bytes -= size_of(key)
        return chosen
