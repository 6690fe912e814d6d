"""What a search of a shared backend found, as columns, and in which order an inventory is told of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence

from lmcache import _native
from lmcache.core.key import Namespace
from lmcache.l2.adapter import ObjectColumns

MAX_TIME_NS = 2**63 - 1  # in the year 2262; what holds times has 64 bits


def slices(
    order: array[int], used_ns: array[int], newer_than_ns: int, slice_objects: int
) -> Iterator[tuple[array[int], bool]]:
    """The rows in `order`, youngest first by `used_ns`, as `Inventory.found` wants them: those from that time on as
    newer than all that is known, the oldest slice of them first, then the others, whose oldest slice is the last."""
    newer = bisect_left(order, -newer_than_ns, key=lambda row: -used_ns[row])
    for start in reversed(range(0, newer, slice_objects)):
        yield order[start : min(start + slice_objects, newer)], True
    for start in range(newer, len(order), slice_objects):
        yield order[start : start + slice_objects], False


class FoundObjects:
    """Row i is of the namespace at `positions[i]` and has the 32 bytes of `hashes` from 32 i on."""

    def __init__(self) -> None:
        self.positions = array("I")
        self.hashes = bytearray()
        self.sizes = array("Q")  # bytes
        self.used_ns = array("q")  # since 1970

    def __len__(self) -> int:
        return len(self.sizes)

    def append(self, position: int, chunk_hash: bytes, size_bytes: int, used_ns: int) -> None:
        self.positions.append(position)
        self.hashes += chunk_hash
        self.sizes.append(size_bytes)
        self.used_ns.append(used_ns)

    def order_rows(self, unnamed: Container[int]) -> array[int]:
        """The rows, youngest first. Nobody asks for objects of `unnamed` namespaces, so that these are the oldest.
        Blocks, for ten million a second."""
        if unnamed:
            for row, position in enumerate(self.positions):
                if position in unnamed:
                    self.used_ns[row] = 0
        return array("I", _native.youngest_first(memoryview(self.used_ns)))

    def newest_ns(self, order: array[int]) -> int:
        """When the last of them was used; 0 where there is none."""
        return self.used_ns[order[0]] if order else 0

    def slices(
        self, namespaces: Sequence[Namespace], order: array[int], newer_than_ns: int, slice_objects: int
    ) -> Iterator[tuple[ObjectColumns, bool]]:
        """What `Inventory.found` gets, and whether as newer: see `slices`."""
        for rows, newer in slices(order, self.used_ns, newer_than_ns, slice_objects):
            yield ObjectColumns(namespaces, self.positions, self.hashes, self.sizes, rows), newer
