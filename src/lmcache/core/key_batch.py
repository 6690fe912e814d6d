"""Many keys at once, packed as the wire and the native core take them, and the slots that belong to them.

A batch is every object of some namespaces and some consecutive chunks. Whatever has an element for each of them is
ordered [namespace][chunk].
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from lmcache._native import NO_SLOT
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey

SLOT_BYTES = 8  # u64: an offset in L1, or NO_SLOT


class ChunkHashes(Sequence[bytes]):
    """The hashes of consecutive chunks. `packed` has 32 bytes each; a slice is again ChunkHashes."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        if len(packed) % CHUNK_HASH_BYTES:
            raise ValueError(f"{len(packed)} bytes are not hashes of {CHUNK_HASH_BYTES} bytes each")
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // CHUNK_HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> ChunkHashes: ...
    def __getitem__(self, index: int | slice) -> bytes | ChunkHashes:
        if isinstance(index, slice):
            count = len(self.packed) // CHUNK_HASH_BYTES
            first, end, step = index.indices(count)
            if step != 1:
                raise ValueError("chunk hashes are sliced without a step")
            if end - first == count:
                return self
            return ChunkHashes(self.packed[first * CHUNK_HASH_BYTES : end * CHUNK_HASH_BYTES])
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no chunk {index} among {len(self)}")
        first = index % len(self) * CHUNK_HASH_BYTES
        return self.packed[first : first + CHUNK_HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        packed = self.packed
        for first in range(0, len(packed), CHUNK_HASH_BYTES):
            yield packed[first : first + CHUNK_HASH_BYTES]

    @property
    def size_bytes(self) -> int:
        return len(self.packed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkHashes) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"ChunkHashes({len(self)} chunks)"


@dataclass(frozen=True)
class NamespaceSet:
    """Namespaces of one cache salt in the order of the wire: [rank][group], or [group] for one rank.

    frame_bytes: of an object of each. tail_chunks: of how many chunks at the end of a hit each must have objects, 0 for
    all; empty: no namespace has a tail.
    """

    namespaces: tuple[Namespace, ...]
    frame_bytes: tuple[int, ...]
    tail_chunks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.namespaces)

    def __getitem__(self, index: int) -> Namespace:
        return self.namespaces[index]

    @property
    def cache_salt(self) -> str:
        return self.namespaces[0].cache_salt

    @cached_property
    def digests(self) -> bytes:
        """32 bytes a namespace."""
        return b"".join(namespace.digest for namespace in self.namespaces)

    @cached_property
    def scope(self) -> int:
        """32 bits that tell these namespaces from others."""
        return int.from_bytes(self.namespaces[0].digest[:4], "little")

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in all namespaces."""
        return sum(self.frame_bytes)

    def hit_bytes(self, first: int, end: int, chunks: int) -> int:
        """What the chunks `first` to `end` - 1 of a hit of `chunks` chunks take, tails considered."""
        if not self.tail_chunks:
            return (end - first) * self.chunk_bytes
        needed = (max(first, self.first_needed(position, chunks)) for position in range(len(self)))
        return sum(max(0, end - start) * size for start, size in zip(needed, self.frame_bytes, strict=True))

    @cached_property
    def sizes(self) -> bytes:
        """`frame_bytes` as u64."""
        return struct.pack(f"<{len(self.frame_bytes)}Q", *self.frame_bytes)

    @cached_property
    def tails(self) -> bytes:
        """`tail_chunks` as u32."""
        return struct.pack(f"<{len(self.tail_chunks)}I", *self.tail_chunks)

    def first_needed(self, namespace: int, chunks: int) -> int:
        """The first chunk of that namespace that a hit of `chunks` chunks needs."""
        tail = self.tail_chunks[namespace] if self.tail_chunks else 0
        return max(0, chunks - tail) if tail else 0


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Names the objects of `namespaces` and the chunks of `hashes`. A slice is that of the chunks."""

    namespaces: NamespaceSet
    hashes: ChunkHashes

    @property
    def chunks(self) -> int:
        return len(self.hashes)

    @property
    def objects(self) -> int:
        return len(self.namespaces) * len(self.hashes)

    def __getitem__(self, chunks: slice) -> KeyBatch:
        hashes = self.hashes[chunks]
        return self if hashes is self.hashes else KeyBatch(self.namespaces, hashes)

    def key(self, namespace: int, chunk: int) -> ObjectKey:
        return ObjectKey(self.namespaces[namespace], self.hashes[chunk])


class SlotGrid:
    """Offsets of slots in L1, [namespace][chunk]. `packed` is u64; NO_SLOT where there is none."""

    __slots__ = ("_view", "chunks", "packed")

    def __init__(self, packed: bytes, chunks: int) -> None:
        if len(packed) % (SLOT_BYTES * chunks) if chunks else packed:
            raise ValueError(f"{len(packed)} bytes are not rows of {chunks} slots")
        self.packed = packed
        self.chunks = chunks
        self._view: memoryview | None = None  # made by the first look at a single slot: most grids are only passed on

    @property
    def namespaces(self) -> int:
        return len(self.packed) // (SLOT_BYTES * self.chunks) if self.chunks else 0

    @property
    def size_bytes(self) -> int:
        return len(self.packed)

    def __getitem__(self, place: tuple[int, int]) -> int:
        """The slot at (namespace, chunk)."""
        namespace, chunk = place
        if not 0 <= chunk < self.chunks or namespace < 0:
            raise IndexError(f"there is no slot at namespace {namespace}, chunk {chunk}")
        if self._view is None:
            self._view = memoryview(self.packed).cast("Q")
        return self._view[namespace * self.chunks + chunk]

    def row(self, namespace: int, first_chunk: int = 0, end_chunk: int | None = None) -> bytes:
        """Slots of some chunks of a namespace, packed."""
        first = namespace * self.chunks
        end_chunk = self.chunks if end_chunk is None else end_chunk
        return self.packed[(first + first_chunk) * SLOT_BYTES : (first + end_chunk) * SLOT_BYTES]

    def places(self) -> Iterator[tuple[int, int]]:
        """(namespace, chunk) of every slot that there is, in order."""
        for index, slot in enumerate(memoryview(self.packed).cast("Q")):
            if slot != NO_SLOT:
                yield divmod(index, self.chunks)

    def followed_by(self, other: SlotGrid) -> SlotGrid:
        """A batch of the chunks here and, behind them, those of `other`, which has the same namespaces."""
        if not self.chunks or not other.chunks:
            return self if self.chunks else other
        rows = (row for index in range(self.namespaces) for row in (self.row(index), other.row(index)))
        return SlotGrid(b"".join(rows), self.chunks + other.chunks)


NO_HASHES = ChunkHashes()
NO_SLOTS = SlotGrid(b"", 0)


def pack_keys(keys: Iterable[ObjectKey]) -> tuple[bytes, bytes]:
    """Digests of namespaces and chunk hashes, 32 bytes a key each, for calls that take keys pair by pair."""
    keys = list(keys)
    digests = b"".join([key.namespace.digest for key in keys])
    return digests, b"".join([key.chunk_hash for key in keys])
