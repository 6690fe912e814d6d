"""One server's view of an L2 backend: a real adapter under a real runner, without L1 and without a storage loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lmcache.clock import ManualClock
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.registry import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys


class OneServer:
    """Open, with its inventory complete, inside `async with`."""

    def __init__(self, spec: dict[str, Any], clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.metrics = Metrics()
        self.runner = Runner(build(parse_adapter(spec, 0)), self.metrics, self.clock)
        self.memory = FrameMemory(64)

    async def __aenter__(self) -> OneServer:
        await self.runner.open()
        await asyncio.wait_for(self.runner._inventory_complete.wait(), 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert await self.runner.drain(10) and await self.runner.close(10)
        self.runner.ledger.check()

    async def store(self, count: int = 8, seed: int = 0) -> list[StoreOutcome]:
        wanted = keys(count, seed)
        buffers = [self.memory.fill(i, key) for i, key in enumerate(wanted)]
        return await self.runner.store(wanted, buffers, lambda: None)

    async def load(self, count: int = 8, seed: int = 0) -> list[LoadOutcome]:
        """Loads, and checks every byte of what is said to be there."""
        wanted, target = keys(count, seed), FrameMemory(count)
        outcomes = await self.runner.load(wanted, target.buffers, lambda: None)
        for slot, outcome in enumerate(outcomes):
            assert outcome is not LoadOutcome.LOADED or target.holds(slot, wanted[slot])
        return outcomes


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))
