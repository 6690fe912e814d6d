"""In which order an inventory is told what a search of a shared backend found."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

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
