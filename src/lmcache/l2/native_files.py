"""The native file threads as coroutines of one asyncio loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from lmcache import _native
from lmcache.l2.background import in_thread

Results: TypeAlias = "tuple[array[int], array[int]]"  # i64 result and i32 errno per file


class NativeFiles:
    """Construct on the loop that uses it. Results come with the eventfd of the threads, without polling."""

    def __init__(self, threads: int, *, use_odirect: bool, block_bytes: int, read_ahead_bytes: int = 0) -> None:
        self._io = _native.FileIO(threads, use_odirect, block_bytes, read_ahead_bytes)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Results]] = {}
        self._loop.add_reader(self._io.event_fd(), self._collect)
        self._closed = False

    @property
    def buffered_fallbacks(self) -> int:
        return self._io.buffered_fallbacks()

    async def write(
        self, paths: Sequence[str], temporary_paths: Sequence[str], buffers: Sequence[memoryview]
    ) -> Results:
        addresses, sizes = _ranges(buffers)
        return await self._result(self._io.submit_write(paths, temporary_paths, addresses, sizes))

    async def read(self, paths: Sequence[str], buffers: Sequence[memoryview]) -> Results:
        addresses, sizes = _ranges(buffers)
        return await self._result(self._io.submit_read(paths, addresses, sizes))

    async def stat(self, paths: Sequence[str]) -> Results:
        return await self._result(self._io.submit_stat(paths))

    async def unlink(self, paths: Sequence[str]) -> Results:
        return await self._result(self._io.submit_unlink(paths))

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await in_thread("l2-close", self._io.close)
        self._collect()
        self._loop.remove_reader(self._io.event_fd())

    def _result(self, batch: int) -> asyncio.Future[Results]:
        # Results are collected by this loop only, so none can have come between submission and here.
        future: asyncio.Future[Results] = self._loop.create_future()
        self._waiting[batch] = future
        return future

    def _collect(self) -> None:
        for batch, results, errors in self._io.drain():
            future = self._waiting.pop(batch)
            if not future.done():
                future.set_result((array("q", results), array("i", errors)))


def _ranges(buffers: Sequence[memoryview]) -> tuple[memoryview, memoryview]:
    addresses = array("Q", [_native.buffer_address(buffer) for buffer in buffers])
    sizes = array("Q", [buffer.nbytes for buffer in buffers])
    return memoryview(addresses), memoryview(sizes)
