"""Native jobs as futures of one asyncio loop: an eventfd says when results are there, nothing is polled."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lmcache import _native
from lmcache.l2.background import in_thread

T = TypeVar("T")


class JobSource(Protocol):
    """What runs jobs natively. A completion is the job's number, then its results."""

    def event_fd(self) -> int: ...

    def drain(self) -> Sequence[tuple[Any, ...]]: ...

    def close(self) -> None: ...


class Completions(Generic[T]):
    """Construct on the loop that uses it. `decode` makes a T of the results of a job."""

    def __init__(self, source: JobSource, decode: Callable[..., T]) -> None:
        self._source = source
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[asyncio.Future[T], object]] = {}
        self._loop.add_reader(source.event_fd(), self._collect)
        self._closed = False

    def wait(self, job: int, memory: object = None) -> asyncio.Future[T]:
        """For the number that a submission has just returned. `memory` is kept until the job has ended, also when
        nobody waits for it any more."""
        # Results are collected by this loop only, so none can have come between submission and here.
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[job] = future, memory
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
        for job, *results in self._source.drain():
            future, _ = self._waiting.pop(job)
            if not future.done():
                future.set_result(self._decode(*results))


class IoResults(NamedTuple):
    """Element for element: bytes moved or what else was asked for, -1 where it failed; then the errno, else 0."""

    values: memoryview  # i64
    errors: memoryview  # i32


NO_RESULTS = IoResults(memoryview(b"").cast("q"), memoryview(b"").cast("i"))


def words(values: Sequence[int]) -> memoryview:
    """Packed u64, as the native core takes them."""
    return memoryview(array("Q", values))


def ranges(buffers: Sequence[memoryview]) -> tuple[memoryview, memoryview]:
    """Addresses and sizes in bytes."""
    return words([_native.buffer_address(buffer) for buffer in buffers]), words([buffer.nbytes for buffer in buffers])
