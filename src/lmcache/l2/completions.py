"""Batches of native I/O as coroutines of one asyncio loop: results come with an eventfd, without polling."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from lmcache import _native
from lmcache.l2.background import in_thread

Results: TypeAlias = "tuple[memoryview, memoryview]"  # i64 result and i32 errno per element
NO_RESULTS: Results = memoryview(b"").cast("q"), memoryview(b"").cast("i")


class NativeIO(Protocol):
    def event_fd(self) -> int: ...

    def drain(self) -> list[tuple[int, bytes, bytes]]: ...

    def close(self) -> None: ...


class Completions:
    """Construct on the loop that uses it."""

    def __init__(self, io: NativeIO) -> None:
        self._source = io
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[asyncio.Future[Results], object]] = {}
        self._loop.add_reader(io.event_fd(), self._collect)
        self._closed = False

    def of(self, batch: int, memory: object = None) -> asyncio.Future[Results]:
        """For the number that a submission has just returned. `memory` is kept until the batch has ended, also when
        nobody waits for it any more."""
        # Results are collected by this loop only, so none can have come between submission and here.
        future: asyncio.Future[Results] = self._loop.create_future()
        self._waiting[batch] = future, memory
        return future

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await in_thread("l2-close", self._source.close)
        self._collect()
        self._loop.remove_reader(self._source.event_fd())

    def _collect(self) -> None:
        for batch, results, errors in self._source.drain():
            future, _ = self._waiting.pop(batch)
            if not future.done():
                future.set_result((memoryview(results).cast("q"), memoryview(errors).cast("i")))


def words(values: Sequence[int]) -> memoryview:
    """Packed u64, as the native core takes them."""
    return memoryview(array("Q", values))


def ranges(buffers: Sequence[memoryview]) -> tuple[memoryview, memoryview]:
    """Addresses and sizes in bytes."""
    return words([_native.buffer_address(buffer) for buffer in buffers]), words([buffer.nbytes for buffer in buffers])
