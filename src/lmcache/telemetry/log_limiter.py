"""Log lines that would repeat without end: one of each kind, or one in a while."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import overload

from lmcache.clock import Clock


class LogLimiter:
    """Says which log lines are due: the first one of each kind, and another one after `interval_seconds`.

    Every kind is remembered: there must be few of them, known to the caller. Any thread; lines that two threads have at
    the same moment may both be due.
    """

    @overload
    def __init__(self) -> None: ...

    @overload
    def __init__(self, interval_seconds: float, clock: Clock) -> None: ...

    def __init__(self, interval_seconds: float = math.inf, clock: Clock | None = None) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock  # None: nothing is due a second time
        self._due_from: dict[Hashable, float] = {}

    def due(self, kind: Hashable = None) -> bool:
        """Whether a line of this kind is to be written now; the caller then writes it."""
        now_seconds = self._clock.monotonic() if self._clock is not None else 0.0
        if now_seconds < self._due_from.get(kind, -math.inf):
            return False
        self._due_from[kind] = now_seconds + self._interval_seconds
        return True

    def reset(self) -> None:
        """Every kind is due again."""
        self._due_from.clear()
