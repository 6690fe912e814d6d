"""A clock for tests."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start_seconds: float = 1000.0) -> None:
        self.now_seconds = start_seconds

    def monotonic(self) -> float:
        return self.now_seconds

    def wall(self) -> float:
        return self.now_seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.now_seconds += seconds
