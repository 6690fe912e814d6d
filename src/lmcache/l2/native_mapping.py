"""Copies to and from mapped storage as coroutines of one asyncio loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from lmcache import _native
from lmcache.l2.background import in_thread


class NativeMapping:
    """`places` are offsets in the mapping. Construct on the loop that uses it. Results: one byte an element, 1: copied;
    what was not copied met a page that the medium could not give."""

    def __init__(self, address: int, size_bytes: int, *, threads: int, flush: bool) -> None:
        self._copier = _native.MappedCopier(address, size_bytes, threads, flush)
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[asyncio.Future[bytes], object]] = {}
        self._loop.add_reader(self._copier.event_fd(), self._collect)
        self._closed = False

    def read(self, places: Sequence[int], buffers: Sequence[memoryview]) -> asyncio.Future[bytes]:
        """Fills the buffers."""
        addresses, sizes = _ranges(buffers)
        return self._result(self._copier.submit_read(addresses, self._words(places), sizes), buffers)

    def write(
        self,
        places: Sequence[int],
        buffers: Sequence[memoryview],
        record_places: Sequence[int],
        records: bytes,
        record_bytes: int,
    ) -> asyncio.Future[bytes]:
        """Each buffer, then its record. Nothing more after an element that failed."""
        addresses, sizes = _ranges(buffers)
        targets, record_targets = self._words(places), self._words(record_places)
        job = self._copier.submit_write(targets, addresses, sizes, record_targets, records, record_bytes)
        return self._result(job, buffers)

    def write_records(self, places: Sequence[int], records: bytes, record_bytes: int) -> asyncio.Future[bytes]:
        nothing = memoryview(bytes(8 * len(places)))
        job = self._copier.submit_write(nothing, nothing, nothing, self._words(places), records, record_bytes)
        return self._result(job, None)

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await in_thread("l2-close", self._copier.close)
        self._collect()
        self._loop.remove_reader(self._copier.event_fd())

    def _words(self, places: Sequence[int]) -> memoryview:
        address = self._address
        return memoryview(array("Q", [address + place for place in places]))

    def _result(self, job: int, memory: object) -> asyncio.Future[bytes]:
        # Results are collected by this loop only, so none can have come between submission and here. The memory is kept
        # until the job has ended, also when nobody waits for it any more.
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[job] = future, memory
        return future

    def _collect(self) -> None:
        for job, results in self._copier.drain():
            future, _ = self._waiting.pop(job)
            if not future.done():
                future.set_result(results)


def _ranges(buffers: Sequence[memoryview]) -> tuple[memoryview, memoryview]:
    addresses = array("Q", [_native.buffer_address(buffer) for buffer in buffers])
    sizes = array("Q", [buffer.nbytes for buffer in buffers])
    return memoryview(addresses), memoryview(sizes)
