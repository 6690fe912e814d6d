"""What every controller of the storage loop works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.clock import Clock
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import L2Metrics

PERIOD_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class TieringContext:
    l1: L1Store
    runners: Sequence[Runner]  # one for each --l2-adapter, in that order
    metrics: L2Metrics
    clock: Clock
    period_seconds: float = PERIOD_SECONDS  # between two looks of a controller that wakes by itself
