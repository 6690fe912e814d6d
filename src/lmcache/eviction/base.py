"""What an eviction policy is. It orders keys; a controller decides when, and an owner of the bytes carries it out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Knows the keys that may be evicted, and their sizes in bytes, in some order. Not thread-safe: one loop owns it.

    Keys of a call come in prefix order: the suffix of a prompt is of no use without its prefix, so of keys that are
    used together the last one goes first.
    """

    def add(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        """Keys that were just stored; the youngest from now on. A known one gets its new size."""
        ...

    def add_older(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        """Keys found after a restart, youngest first; all are older than whatever is known already. Known ones are
        ignored."""
        ...

    def touch(self, keys: Sequence[K]) -> None:
        """Keys that were just used. Unknown ones are ignored."""
        ...

    def remove(self, key: K) -> None:
        """The key is gone. Unknown ones are ignored."""
        ...

    def victims(self, wanted_bytes: int) -> list[K]:
        """Keys to evict, first the first, that together hold at least `wanted_bytes`, or all there are. They stay known
        until `remove`."""
        ...
