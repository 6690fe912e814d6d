"""What the layers of one adapter share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.l2.accounting import Ledger
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.l2.circuit_breaker import CircuitBreaker
from lmcache.l2.layers.operation import Operation, SharedRelease
from lmcache.telemetry.metrics import L2Metrics


@dataclass(eq=False)
class AdapterContext:
    config: AdapterConfig
    adapter: Adapter
    ledger: Ledger
    metrics: L2Metrics
    clock: Clock
    rng: random.Random
    on_change: Callable[[], None]  # what operators see may have changed

    def __post_init__(self) -> None:
        self.name = self.config.name

    @property
    def adapter_calls(self) -> int:
        """Loads that the adapter takes at once, and probes: one over several places bounds what goes to each of them
        itself. 0: as others."""
        return int(getattr(self.adapter, "most_calls", 0))

    def operation(self, lent: SharedRelease | None = None, *, forced: bool = False) -> Operation:
        """One that begins now."""
        deadline = asyncio.get_running_loop().time() + self.config.timeout_seconds
        return Operation(deadline, lent or SharedRelease(), forced)

    def circuit_breaker(self, failures: int) -> CircuitBreaker:
        return CircuitBreaker(
            self.clock,
            failures=failures,
            open_seconds=limits.L2_BREAKER_OPEN_SECONDS,
            max_open_seconds=limits.L2_BREAKER_MAX_OPEN_SECONDS,
        )
