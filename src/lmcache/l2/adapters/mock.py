"""Keeps objects in memory behind a link of a given bandwidth. For tests of everything around an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from lmcache.core.key import ObjectKey
from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter, Capacity
from lmcache.l2.adapter_config import AdapterConfig, Gigabytes


class MockConfig(AdapterConfig, frozen=True, kw_only=True):
    """Memory behind a link of a given bandwidth, for trying things out."""

    bounds_itself = True

    max_size_gb: Annotated[Gigabytes, Meta(description="bytes that objects may take, in GB of 2^30")]
    mock_bandwidth_gb: Annotated[Gigabytes, Meta(description="bandwidth of the link, in GB of 2^30 bytes a second")]

    @property
    def limit_bytes(self) -> int:
        return int(min(self.max_size_gb, self.max_capacity_gb or self.max_size_gb) * GIB)


class MockAdapter(Adapter):
    capacity = Capacity()

    def __init__(self, capacity: Capacity, bytes_per_second: float) -> None:
        self.capacity = capacity
        self.objects: dict[ObjectKey, bytes] = {}
        self.bytes_per_second = bytes_per_second
        self._link_free_at = 0.0

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        await self._transfer(sum(buffer.nbytes for buffer in buffers))
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            outcomes.append(StoreOutcome.ALREADY_THERE if key in self.objects else StoreOutcome.STORED)
            self.objects.setdefault(key, bytes(buffer))
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        await self._transfer(sum(len(self.objects.get(key, b"")) for key in keys))
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            frame = self.objects.get(key)
            if frame is None:
                outcomes.append(LoadOutcome.MISSING)
            elif len(frame) > buffer.nbytes:
                del self.objects[key]
                outcomes.append(LoadOutcome.CORRUPT)
            else:
                buffer.cast("B")[: len(frame)] = frame
                outcomes.append(LoadOutcome.LOADED)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [len(self.objects[key]) if key in self.objects else None for key in keys]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        for key in keys:
            self.objects.pop(key, None)
        return [True] * len(keys)

    async def clear(self) -> tuple[int, int]:
        cleared = len(self.objects), sum(map(len, self.objects.values()))
        self.objects.clear()
        return cleared

    async def close(self) -> None:
        pass

    async def _transfer(self, size_bytes: int) -> None:
        """Waits until the link, which carries one transfer after the other, has carried this one."""
        now_seconds = asyncio.get_running_loop().time()
        self._link_free_at = max(now_seconds, self._link_free_at) + size_bytes / self.bytes_per_second
        await asyncio.sleep(self._link_free_at - now_seconds)


def build(config: MockConfig) -> MockAdapter:
    return MockAdapter(Capacity(config.limit_bytes), config.mock_bandwidth_gb * GIB)
