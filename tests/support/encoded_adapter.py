"""An adapter below a serde, seen as one adapter, so that the contract runs on what a server does with both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmcache.clock import SystemClock
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.adapter_contract import AdapterContract
from lmcache.testing.frames import FrameMemory

CLOSE_SECONDS = 20.0
ZSTD = {"type": "zstd", "smallest_saving": 0}
AESGCM = {"type": "aesgcm", "master_key_env": "MASTER_KEY_OF_THE_CONTRACT"}

_HALF = bytes(value & 15 for value in range(256))  # of the bits
Served = dict[ObjectKey, tuple[ObjectKey, int]]  # by stored key: what it stands for, and the bytes of its frame


class EncodedContract(AdapterContract):
    """To derive from before the contract of an adapter: the same on that adapter below `serde`."""

    serde: ClassVar[dict[str, Any]] = ZSTD
    most_steps = 5000

    def build(self, folder: Path) -> Adapter:
        self.served: Served = getattr(self, "served", {})
        return _EncodedAdapter(super().build(folder), self.serde, self.served)

    @pytest.fixture(autouse=True)
    def _prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A master key, and payloads that become smaller, but for those of the random operations."""
        payload_of = FrameMemory.payload_of
        monkeypatch.setattr(FrameMemory, "payload_of", lambda *key: payload_of(*key).translate(_HALF))
        monkeypatch.setenv(AESGCM["master_key_env"], "5" * 64)


class _EncodedAdapter(Adapter):
    """Sizes are those of what is served, as L1 knows them; `served` outlives the adapter."""

    def __init__(self, inner: Adapter, serde: dict[str, Any], served: Served) -> None:
        configured = build(parse_adapter({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1, "serde": serde}, 0))
        self._inner = inner
        self._runner = Runner(replace(configured, adapter=inner), Metrics(enabled=False).l2, SystemClock())
        self._served = served

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def overhead_bytes(self) -> int:
        return self._inner.overhead_bytes()

    def status(self) -> dict[str, Any]:
        return self._inner.status()

    async def open(self, inventory: Inventory) -> None:
        await self._runner.open()
        assert await self._runner.wait_for_inventory()
        for stored in self._runner.known():
            inventory.found([self._served[key] for key in stored])
        inventory.complete()

    async def close(self) -> None:
        assert await self._runner.drain(CLOSE_SECONDS)
        self._runner.check_idle()
        assert await self._runner.close(CLOSE_SECONDS)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        for stored, key, buffer in zip(self._runner.stored_keys(keys), keys, buffers, strict=True):
            self._served[stored] = key, buffer.nbytes
        return await self._runner.store(keys, buffers, _nothing)

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        return await self._runner.load(keys, buffers, _nothing)

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        exist = await self._runner.probe(keys)
        stored = self._runner.stored_keys(keys)
        return [self._served[key][1] if exists else None for key, exists in zip(stored, exist, strict=True)]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        if not corrupt:
            return await self._runner.delete(keys)
        await self._runner.corrupted(keys, "so says the test")
        return [not is_known for is_known in self._runner.knows(keys)]

    async def clear(self) -> tuple[int, int]:
        served_bytes = sum(self._served[key][1] for page in self._runner.known() for key in page)
        return (await self._runner.clear())[0], served_bytes


def _nothing() -> None:
    """What a buffer is released to."""
