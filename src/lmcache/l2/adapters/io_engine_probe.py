"""Which engine moves files faster here: threads or io_uring, tried on a few files in the folder itself.

Files are opened, made and renamed by each thread beside the others, and by the ring's one thread one after the other;
in exchange the ring saves the kernel from switching threads. Which counts for more depends on the disk, the kernel and
the processor. A short trial is noisy, so threads stand unless io_uring is clearly faster in every round.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache import _native
from lmcache.clock import Clock
from lmcache.core.limits import FRAME_ALIGN_BYTES
from lmcache.environment import Environment
from lmcache.l2.completions import words

FILES = 8
FILE_BYTES = 128 << 10
ROUNDS = 2  # of each engine
TRIAL_BYTES = 2 * ROUNDS * FILES * FILE_BYTES  # of the folder, until its files are deleted
TRIAL_SECONDS = 0.05  # a start waits no longer; threads stand then
SMALLEST_CAPACITY_BYTES = 1 << 30  # with less, or with less free on the disk, the trial is not worth its room
CLEAR_LEAD = 1.25  # io_uring has to be that much faster


@dataclass(frozen=True)
class Trial:
    """Seconds that each round took to write the files and read them back."""

    threads: Sequence[float]
    ring: Sequence[float]

    @property
    def prefers_ring(self) -> bool:
        return max(self.ring) * CLEAR_LEAD < min(self.threads)


def trial_paths(folder: str, writer_id: str) -> list[str]:
    """Files of the trial and their temporary names. If a server is killed before it has deleted them, they go like the
    rest of its temporary files."""
    return [f"{folder}/{writer_id}.{number}.tmp" for number in range(2 * 2 * ROUNDS * FILES)]


def try_engines(paths: Sequence[str], depth: int, use_odirect: bool, environment: Environment) -> Trial | None:
    """Both at the same depth, on `trial_paths`, which the caller deletes. Blocks; begins no round after TRIAL_SECONDS.
    None: io_uring is refused, the disk fails or is nearly full, or the time was too short."""
    clock = environment.clock
    deadline = clock.monotonic() + TRIAL_SECONDS
    seconds: dict[int, list[float]] = {0: [], depth: []}
    try:
        room = os.statvfs(os.path.dirname(paths[0]))
        if _native.io_uring_refusal() or room.f_bavail * room.f_frsize < SMALLEST_CAPACITY_BYTES:
            return None
        with mmap.mmap(-1, FILES * FILE_BYTES) as memory:
            memory.write(environment.random_bytes(FILE_BYTES) * FILES)
            for number in range(2 * ROUNDS):
                if clock.monotonic() > deadline:
                    return None
                queue_depth = depth if number % 2 else 0
                part = paths[2 * number * FILES : 2 * (number + 1) * FILES]
                seconds[queue_depth].append(measure_round(memory, part, depth, queue_depth, use_odirect, clock))
    except OSError:
        return None
    return Trial(seconds[0], seconds[depth])


def measure_round(
    memory: mmap.mmap, paths: Sequence[str], threads: int, queue_depth: int, use_odirect: bool, clock: Clock
) -> float:
    """`paths`: the files, then their temporary names. OSError where a file cannot be moved."""
    start = _native.buffer_address(memoryview(memory))
    addresses = words([start + index * FILE_BYTES for index in range(FILES)])
    sizes = words([FILE_BYTES] * FILES)
    io = _native.FileIO(threads, use_odirect, FRAME_ALIGN_BYTES, 0, queue_depth)
    try:
        started = clock.monotonic()
        io.submit_write(paths[:FILES], paths[FILES:], addresses, sizes)
        _await(io)
        io.submit_read(paths[:FILES], addresses, sizes)
        _await(io)
        return clock.monotonic() - started
    finally:
        io.close()


def _await(io: _native.FileIO) -> None:
    select.select([io.event_fd()], [], [])
    for _, _, errors in io.drain():
        fault = next((error for error in errors if error), 0)
        if fault:
            raise OSError(fault, os.strerror(fault))
