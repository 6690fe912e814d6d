"""Pre-sized files as raw devices, and one server's view of them, for tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters.raw_block import RawBlockAdapter
from lmcache.l2.adapters.raw_config import RawBlockConfig
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory

META_BYTES = 65536
SLOT_BYTES = 16384  # one frame of FrameMemory's usual payload
READY_SECONDS = 30.0


def make_device(path: Path, slots: int = 64, *, meta_bytes: int = META_BYTES) -> Path:
    with path.open("wb") as file:
        file.truncate(meta_bytes + slots * SLOT_BYTES)
    return path


def build_raw_block(path: Path, **settings: Any) -> RawBlockAdapter:
    spec = {"type": "raw_block", "device_path": str(path), "slot_bytes": SLOT_BYTES, "meta_total_bytes": META_BYTES}
    config = parse_adapter({**spec, **settings}, 0)
    assert isinstance(config, RawBlockConfig)
    return RawBlockAdapter(config)


class RawServer:
    """An open raw_block adapter and what it reported to its inventory."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.adapter = build_raw_block(path, **settings)
        self.inventory = RecordingInventory()

    async def __aenter__(self) -> RawServer:
        await self.adapter.open(self.inventory)
        await asyncio.wait_for(self.inventory.completed.wait(), READY_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.adapter.close()

    async def store(self, wanted: list[ObjectKey]) -> list[StoreOutcome]:
        memory = FrameMemory(len(wanted))
        return await self.adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])

    async def load(self, wanted: list[ObjectKey]) -> list[LoadOutcome]:
        """What is LOADED and verifies is the key's, byte for byte. LOADED that does not verify comes back as CORRUPT:
        that is what the server makes of it."""
        target = FrameMemory(len(wanted))
        outcomes = await self.adapter.load(wanted, target.buffers)
        for slot, (key, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            if outcome is LoadOutcome.LOADED and target.verify(slot, key):
                outcomes[slot] = LoadOutcome.CORRUPT
            assert outcomes[slot] is not LoadOutcome.LOADED or target.holds(slot, key)
        return outcomes
