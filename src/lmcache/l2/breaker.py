"""Leaves a failing backend alone, and tries again with one operation at a time."""

from __future__ import annotations

from lmcache.clock import Clock


class Breaker:
    """Closed (everything passes), open for a while after `failures` in a row, one trial, closed or open for longer."""

    def __init__(self, clock: Clock, *, failures: int, open_seconds: float, max_open_seconds: float) -> None:
        self._clock = clock
        self._failures_allowed = failures
        self._first_open_seconds = open_seconds
        self._max_open_seconds = max_open_seconds
        self._open_seconds = open_seconds
        self._failures = 0
        self._next_trial_at: float | None = None  # None: closed

    @property
    def is_open(self) -> bool:
        return self._next_trial_at is not None

    @property
    def open_seconds(self) -> float:
        return self._open_seconds

    def admits(self) -> bool:
        """Whether an operation may start. While open, True once per period: that operation is the trial."""
        if self._next_trial_at is None:
            return True
        now = self._clock.monotonic()
        if now < self._next_trial_at:
            return False
        # If nothing is ever heard of this trial, the next one starts a period later.
        self._next_trial_at = now + self._open_seconds
        return True

    def succeeded(self) -> bool:
        """True when this closed it."""
        was_open = self.is_open
        self._failures = 0
        self._next_trial_at = None
        self._open_seconds = self._first_open_seconds
        return was_open

    def failed(self) -> bool:
        """True when this opened it."""
        was_open = self.is_open
        self._failures += 1
        if was_open:
            self._open_seconds = min(2 * self._open_seconds, self._max_open_seconds)
        if was_open or self._failures >= self._failures_allowed:
            self._next_trial_at = self._clock.monotonic() + self._open_seconds
        return self.is_open and not was_open
