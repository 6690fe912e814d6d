"""Timing and memory that the bench commands share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from lmcache import _native
from lmcache.cli.output import Report
from lmcache.memory.mapping import map_like_l1


class Region:
    """Memory mapped like L1 and touched already, so that no page fault is measured."""

    def __init__(self, size_bytes: int, memory: memoryview | None = None) -> None:
        """`memory`: a part of another region."""
        self.map = map_like_l1(size_bytes) if memory is None else memory
        self.size_bytes = size_bytes
        self.address = _native.buffer_address(self.map)

    def halves(self) -> tuple[Region, Region]:
        half = self.size_bytes // 2
        return Region(half, self.map[:half]), Region(half, self.map[half : 2 * half])

    def pieces(self, size_bytes: int) -> list[memoryview]:
        """The region cut into buffers of that size."""
        return [
            self.map[start : start + size_bytes] for start in range(0, self.size_bytes - size_bytes + 1, size_bytes)
        ]


def timed(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def best_copy_seconds(destination: int, source: int, size_bytes: int, rounds: int) -> float:
    """The best single-thread copy of this machine: the lower median of memcpy and streaming stores."""

    def median(path: str) -> float:
        return statistics.median(
            timed(lambda: _native.copy_plain(destination, source, size_bytes, path)) for _ in range(rounds)
        )

    return min(median("memcpy"), median("stream"))


def add_milliseconds(report: Report, key: str, label: str, seconds: Sequence[float]) -> None:
    """Median and worst of some calls."""
    median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    report.add(f"{key}_ms", label, round(median, 4), f"{median:.3f} ms  (worst {worst:.3f})")


def add_rate(
    report: Report, key: str, label: str, size_bytes: int, seconds: float, limit_seconds: float | None = None
) -> None:
    """MB/s (10^6 bytes), and its share of the machine's limit measured in the same run; None: this is a limit."""
    rate, shown = size_bytes / seconds / 1e6, ""
    if limit_seconds is not None:
        share = limit_seconds / seconds
        report.metrics[f"{key}_share_of_limit"] = round(share, 4)
        shown = f"  ({share:.0%} of the limit)"
    report.add(f"{key}_mb_per_second", label, round(rate, 1), f"{rate:.0f} MB/s{shown}")
