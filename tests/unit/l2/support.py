"""One server's view of an L2 backend: a real adapter under a real runner, without L1 and without a storage loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.accounting import Ledger
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys
from manual_clock import ManualClock

Opened = TypeVar("Opened", bound="OneServer")


def eviction_order(ledger: Ledger) -> list[ObjectKey]:
    """Everything that may go now, the first to go first. It stays."""
    victims = ledger.victims(1 << 50, 1 << 20).keys
    ledger.not_evicted(victims)
    return victims


class OneServer:
    """Open, with its inventory complete, inside `async with`."""

    def __init__(self, spec: dict[str, Any], clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.metrics = Metrics()
        self.runner = Runner(build(parse_adapter(spec, 0)), self.metrics.l2, self.clock)
        self.memory = FrameMemory(64)

    async def __aenter__(self: Opened) -> Opened:
        await self.runner.open()
        assert await self.runner.wait_for_inventory(20)
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
