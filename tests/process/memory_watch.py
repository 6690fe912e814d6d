"""Whether the memory of processes stays flat while they work."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
_GROWTH = 0.10  # of what a process takes once it is warm
_SLACK_BYTES = 16 * MIB  # of allocators


def private_bytes(pid: int) -> int:
    """Resident memory of a process that it shares with nobody; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def children(pid: int) -> list[int]:
    """Of a process, by their ids; none once it is gone."""
    try:
        return [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:
        return []


def tree_bytes(pid: int) -> int:
    """The same of a process with all its children."""
    return private_bytes(pid) + sum(map(tree_bytes, children(pid)))


def shared_memory_bytes() -> int:
    """Taken in /dev/shm by anybody."""
    room = os.statvfs("/dev/shm")
    return (room.f_blocks - room.f_bfree) * room.f_frsize


class MemoryWatch:
    def __init__(self, **sources: Callable[[], int]) -> None:
        self._sources = sources
        self._samples: dict[str, list[int]] = defaultdict(list)
        self._began = time.monotonic()

    def sample(self) -> None:
        for name, source in self._sources.items():
            self._samples[name].append(source())

    def check(self) -> str:
        """Compares the end with the time when everything had been used once: after a third of the samples."""
        lines = []
        for name, samples in self._samples.items():
            tenth = max(1, len(samples) // 10)
            warm = statistics.median(samples[len(samples) // 3 :][:tenth])
            end = statistics.median(samples[-tenth:])
            lines.append(f"{name} {warm / MIB:.1f} -> {end / MIB:.1f} MiB")
            assert end <= warm * (1 + _GROWTH) + _SLACK_BYTES, f"memory grows: {lines[-1]}, {samples[::tenth]}"
        return f"{time.monotonic() - self._began:.0f} s: " + ", ".join(lines)
