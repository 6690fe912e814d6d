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

    def sleep(self, seconds: float) -> None:
        """Returns when `monotonic` has gone on by that much."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def wall_ns(clock: Clock) -> int:
    """Nanoseconds since 1970-01-01 UTC, in steps of a quarter of a microsecond."""
    return int(clock.wall() * 1e9)
