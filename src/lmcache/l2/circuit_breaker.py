"""A circuit breaker: stops operations on a failing backend, and tries again with one at a time."""

from __future__ import annotations

from lmcache.clock import Clock


class CircuitBreaker:
    """Closed (everything passes), open for a while after `failures` in a row or a costly one, one trial, closed or open
    for longer."""

    def __init__(self, clock: Clock, *, failures: int, open_seconds: float, max_open_seconds: float) -> None:
        self._clock = clock
        self._failures_allowed = failures
        self._first_open_seconds = open_seconds
        self._max_open_seconds = max_open_seconds
        self._open_seconds = open_seconds
        self._failures = 0
        self._next_trial_at: float | None = None  # None: closed
        self._trial_runs = False

    @property
    def is_open(self) -> bool:
        return self._next_trial_at is not None

    @property
    def trial_runs(self) -> bool:
        return self._trial_runs

    @property
    def open_seconds(self) -> float:
        return self._open_seconds

    @property
    def would_admit(self) -> bool:
        """What `admits` would say, without beginning a trial."""
        return self._next_trial_at is None or self._clock.monotonic() >= self._next_trial_at

    def admits(self) -> bool:
        """Whether an operation may start. While open, True once per period: that operation is the trial."""
        if not self.would_admit:
            return False
        if self.is_open:
            self._trial_runs = True
            # If nothing is ever heard of this trial, the next one starts a period later.
            self._next_trial_at = self._clock.monotonic() + self._open_seconds
        return True

    def succeeded(self) -> bool:
        """True when this closed it."""
        was_open = self.is_open
        self._failures = 0
        self._next_trial_at = None
        self._trial_runs = False
        self._open_seconds = self._first_open_seconds
        return was_open

    def failed(self, *, at_once: bool = False) -> bool:
        """True when this opened it. `at_once`: another one of this kind would be one too many."""
        was_open = self.is_open
        self._failures += 1
        if was_open and not self._trial_runs:
            return False  # it began before
        self._trial_runs = False
        if was_open:
            self._open_seconds = min(2 * self._open_seconds, self._max_open_seconds)
        if was_open or at_once or self._failures >= self._failures_allowed:
            self._next_trial_at = self._clock.monotonic() + self._open_seconds
        return self.is_open and not was_open
