"""Never evicts, and so remembers nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Noop(Generic[K]):
    def add(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        pass

    def add_older(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        pass

    def touch(self, keys: Sequence[K]) -> None:
        pass

    def remove(self, key: K) -> None:
        pass

    def victims(self, wanted_bytes: int) -> list[K]:
        return []
