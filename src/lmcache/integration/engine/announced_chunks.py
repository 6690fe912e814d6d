"""The chunks that an engine could announce to routers: what it remembers of each, and in which tiers it has announced
it. Bounded: those that were seen longest ago are forgotten first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from lmcache.core import limits

T = TypeVar("T")


class ChunkName(NamedTuple):
    cache_salt: str
    chunk_hash: bytes


@dataclass(slots=True)
class _Entry(Generic[T]):
    described: T
    tiers: int = 0  # announced


class TierChange(NamedTuple, Generic[T]):
    """`added` and `removed` are sets of tiers as bits."""

    described: T
    added: int
    removed: int


@dataclass
class AnnouncedChunks(Generic[T]):
    """For one thread.

    Invariant: what was announced and not taken back is in `tiers` of an entry. So an entry that is dropped gives a
    change that takes it back."""

    most_chunks: int = limits.MAX_CHUNKS_ANNOUNCED
    most_salts: int = limits.MAX_SALTS_FOLLOWED
    _chunks: dict[ChunkName, _Entry[T]] = field(default_factory=dict)  # seen longest ago first
    _salts: dict[str, int] = field(default_factory=dict)  # and how many chunks each has

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[ChunkName]:
        """The youngest first."""
        return reversed(self._chunks)

    @property
    def salts(self) -> list[str]:
        """Those of the chunks that are remembered."""
        return list(self._salts)

    def __contains__(self, name: ChunkName) -> bool:
        return name in self._chunks

    def touch(self, name: ChunkName) -> None:
        """It is the youngest from now on, if it is remembered."""
        entry = self._chunks.pop(name, None)
        if entry is not None:
            self._chunks[name] = entry

    def has_room_for(self, salt: str) -> bool:
        return salt in self._salts or len(self._salts) < self.most_salts

    def remember(self, name: ChunkName, described: T) -> TierChange[T] | None:
        """A chunk that is not remembered, of a salt that there is room for. What becomes of the one that is forgotten
        for it."""
        forgotten = self._forget(next(iter(self._chunks))) if len(self._chunks) >= self.most_chunks else None
        self._chunks[name] = _Entry(described)
        self._salts[name.cache_salt] = self._salts.get(name.cache_salt, 0) + 1
        return forgotten

    def now_in(self, name: ChunkName, tiers: int) -> TierChange[T] | None:
        """None for a chunk that is not remembered; a change without tiers where that was announced already."""
        entry = self._chunks.get(name)
        if entry is None:
            return None
        before, entry.tiers = entry.tiers, tiers
        return TierChange(entry.described, tiers & ~before, before & ~tiers)

    def is_announced(self, name: ChunkName) -> bool:
        entry = self._chunks.get(name)
        return entry is not None and entry.tiers != 0

    def of_salt(self, salt: str) -> list[ChunkName]:
        return [name for name in self if name.cache_salt == salt]

    def take_all_back(self) -> list[TierChange[T]]:
        """Nothing is announced any more; all is remembered."""
        return [change for name in self if (change := self.now_in(name, 0)) is not None and change.removed]

    def announced(self) -> list[tuple[T, int]]:
        """What is announced, and in which tiers."""
        return [(entry.described, entry.tiers) for name in self if (entry := self._chunks[name]).tiers]

    def clear(self) -> None:
        """Forgets everything. To be called when nothing is announced."""
        self._chunks.clear()
        self._salts.clear()

    def _forget(self, name: ChunkName) -> TierChange[T]:
        entry = self._chunks.pop(name)
        self._salts[name.cache_salt] -= 1
        if not self._salts[name.cache_salt]:
            del self._salts[name.cache_salt]
        return TierChange(entry.described, 0, entry.tiers)
