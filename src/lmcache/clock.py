"""Time as a value that is passed in, so that tests decide what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back; the origin has no meaning."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_seconds: float = 1000.0) -> None:
        self.now_seconds = start_seconds

    def monotonic(self) -> float:
        return self.now_seconds

    def wall(self) -> float:
        return self.now_seconds

    def advance(self, seconds: float) -> None:
        self.now_seconds += seconds
