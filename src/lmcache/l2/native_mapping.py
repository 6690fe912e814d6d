"""Copies to and from mapped storage as futures of one asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache import _native
from lmcache.l2.completions import Completions, ranges, words


class NativeMapping:
    """Construct on the loop that uses it. `places` are offsets in the mapping. Results: one byte an element, 1: copied;
    what was not copied met a page that the medium could not give."""

    def __init__(self, address: int, size_bytes: int, *, threads: int, flush: bool) -> None:
        self._copier = _native.MappedCopier(address, size_bytes, threads, flush)
        self._completions = Completions(self._copier, bytes)
        self._address = address

    def read(self, places: Sequence[int], buffers: Sequence[memoryview]) -> asyncio.Future[bytes]:
        """Fills the buffers."""
        addresses, sizes = ranges(buffers)
        return self._completions.wait(self._copier.submit_read(addresses, self._addresses(places), sizes), buffers)

    def write(
        self,
        places: Sequence[int],
        buffers: Sequence[memoryview],
        record_places: Sequence[int],
        records: bytes,
        record_bytes: int,
    ) -> asyncio.Future[bytes]:
        """Each buffer, then its record. Nothing more after an element that failed."""
        addresses, sizes = ranges(buffers)
        targets, record_targets = self._addresses(places), self._addresses(record_places)
        job = self._copier.submit_write(targets, addresses, sizes, record_targets, records, record_bytes)
        return self._completions.wait(job, buffers)

    def write_records(self, places: Sequence[int], records: bytes, record_bytes: int) -> asyncio.Future[bytes]:
        nothing = memoryview(bytes(8 * len(places)))
        job = self._copier.submit_write(nothing, nothing, nothing, self._addresses(places), records, record_bytes)
        return self._completions.wait(job)

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        await self._completions.close()

    def _addresses(self, places: Sequence[int]) -> memoryview:
        address = self._address
        return words([address + place for place in places])
