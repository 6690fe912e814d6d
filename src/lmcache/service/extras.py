"""The extras of a session: content of single chunks beside their tokens (images ...), packed."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping

from lmcache.core.key import CHUNK_HASH_BYTES

_TYPE_CODE = next(code for code in "IL" if array(code).itemsize == 4)


class Extras:
    """Immutable; in the order of chunks."""

    __slots__ = ("_chunks", "_digests")

    def __init__(self, by_chunk: Mapping[int, bytes] | None = None) -> None:
        ordered = sorted(by_chunk.items()) if by_chunk else []
        self._chunks = array(_TYPE_CODE, [chunk for chunk, _ in ordered])
        self._digests = b"".join([digest for _, digest in ordered])

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def size_bytes(self) -> int:
        return len(self._chunks) * self._chunks.itemsize + len(self._digests)

    def between(self, first: int, end: int) -> dict[int, bytes]:
        """The extras of chunks `first` to `end` - 1, by chunk counted from `first`."""
        start, stop = bisect_left(self._chunks, first), bisect_left(self._chunks, end)
        size, digests = CHUNK_HASH_BYTES, self._digests
        return {
            chunk - first: digests[index * size : (index + 1) * size]
            for index, chunk in enumerate(self._chunks[start:stop], start)
        }
