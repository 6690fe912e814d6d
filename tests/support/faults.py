"""An adapter whose faults are decided by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter, Capacity, Inventory


class FaultyAdapter:
    """Passes everything on to `inner`, except where a test sets a fault.

    `gate` cleared: the operations named in `stalls` stall, as long as it stays so, after they have taken their buffers.
    `raises`: every operation but clear raises this; `clear_raises`: clear does.
    `store_outcome`, `load_outcome`: nothing is done, this is the answer.
    `flip`: that many bytes are turned over in everything that is loaded.
    """

    def __init__(self, inner: Adapter) -> None:
        self._inner = inner
        self.inner: Any = inner  # of any class: tests look beyond the contract
        self.gate = asyncio.Event()
        self.gate.set()
        self.stalls = {"store", "load"}
        self.raises: Exception | None = None
        self.clear_raises: Exception | None = None
        self.store_outcome: StoreOutcome | None = None
        self.load_outcome: LoadOutcome | None = None
        self.flip = 0
        self.calls: dict[str, int] = {"store": 0, "load": 0, "probe": 0, "delete": 0}
        self.stalled = 0

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def overhead_bytes(self) -> int:
        return self._inner.overhead_bytes()

    def status(self) -> dict[str, int]:
        return self._inner.status()

    async def open(self, inventory: Inventory) -> None:
        await self._inner.open(inventory)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        await self._enter("store")
        if self.store_outcome is not None:
            return [self.store_outcome] * len(keys)
        return await self._inner.store(keys, buffers)

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        await self._enter("load")
        if self.load_outcome is not None:
            return [self.load_outcome] * len(keys)
        outcomes = await self._inner.load(keys, buffers)
        for buffer in buffers:
            for position in range(self.flip):
                buffer[buffer.nbytes // 2 + position] ^= 0xFF
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await self._enter("probe")
        return await self._inner.probe(keys)

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        await self._enter("delete")
        return await self._inner.delete(keys, corrupt=corrupt)

    async def clear(self) -> tuple[int, int]:
        if self.clear_raises is not None:
            raise self.clear_raises
        return await self._inner.clear()

    async def close(self) -> None:
        await self._inner.close()

    async def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.stalls and not self.gate.is_set():
            self.stalled += 1
            try:
                await self.gate.wait()
            finally:
                self.stalled -= 1
        if self.raises is not None:
            raise self.raises
