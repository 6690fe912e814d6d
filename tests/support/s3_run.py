"""An adapter on a bucket in memory: opened, listed, tested, closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lmcache.core.outcome import StoreOutcome
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys
from support.s3_stub import S3Stub

T = TypeVar("T")
SECONDS = 30.0
CREDENTIALS = {"aws_access_key_id": "AKIAPLANTED", "aws_secret_access_key": "planted-secret"}


def run(
    stub: S3Stub, test: Callable[[Adapter, RecordingInventory], Awaitable[T]], endpoint: str = "", **more: Any
) -> T:
    async def whole() -> T:
        specification = {
            "type": "s3",
            "s3_endpoint": endpoint or stub.endpoint,
            "s3_region": "r",
            "s3_num_io_threads": 2,
        }
        specification |= {**CREDENTIALS, **more}
        adapter = build(parse_adapter(specification, 0)).adapter
        inventory = RecordingInventory()
        try:
            await adapter.open(inventory)
            await asyncio.wait_for(inventory.completed.wait(), SECONDS)
            return await asyncio.wait_for(test(adapter, inventory), SECONDS)
        finally:
            await adapter.close()

    return asyncio.run(whole())


async def stored(adapter: Adapter, count: int = 2) -> FrameMemory:
    memory = FrameMemory(count)
    wanted = keys(count)
    assert (
        await adapter.store(wanted, [memory.fill(i, key) for i, key in enumerate(wanted)])
        == [StoreOutcome.STORED] * count
    )
    return memory
