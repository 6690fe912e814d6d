"""Ranges of one open device or file, moved natively, as coroutines."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from lmcache import _native
from lmcache.l2.completions import NO_RESULTS, Completions, IoResults, ranges, words

log = logging.getLogger("lmcache.l2")


def usable_queue_depth(io_engine: str, queue_depth: int, name: str) -> int:
    """0, for threads, unless `io_engine` is "io_uring" and this process may use it. `name` of who asks, for the log."""
    if io_engine != "io_uring":
        return 0
    refusal = _native.io_uring_refusal()
    if refusal:
        log.warning("%s: io_uring is refused (%s); threads do the I/O", name, os.strerror(refusal))
        return 0
    return queue_depth


class NativeDevice:
    """Construct on the loop that uses it. `queue_depth` 0: `threads` threads, else io_uring (OSError where it is
    refused). `fd` is closed by the caller, afterwards."""

    def __init__(self, fd: int, threads: int, queue_depth: int, *, align_bytes: int, copy_always: bool = False) -> None:
        self.io = _native.DeviceIO(fd, threads, queue_depth, align_bytes, copy_always)
        self._completions = Completions(self.io, IoResults)

    @property
    def copied(self) -> int:
        return self.io.copied()

    async def wait(self, job: int, memory: object) -> IoResults:
        """For a job that was submitted to `io` in this step of the loop; 0: none. `memory` is kept until it has
        ended."""
        return await self._completions.wait(job, memory) if job else NO_RESULTS

    async def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> IoResults:
        addresses, sizes = ranges(buffers)
        return await self.wait(self.io.submit_write(words(offsets), addresses, sizes, b""), buffers)

    async def sync(self) -> int:
        """Everything that has been written is on the medium; 0 or an errno."""
        _, errors = await self._completions.wait(self.io.submit_sync())
        return errors[0]

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        await self._completions.close()
