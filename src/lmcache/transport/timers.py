"""What the message loop does later. Belongs to its thread."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache.clock import Clock

_BEFORE_SWEEP = 1024


@dataclass(order=True)
class Timer:
    due: float
    order: int
    action: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.action = None


class Timers:
    """Those that are due at the same time run in the order in which they were added."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[Timer] = []
        self._order = itertools.count()
        self._before_sweep = _BEFORE_SWEEP

    def add(self, delay_seconds: float, action: Callable[[], None]) -> Timer:
        if len(self._heap) >= self._before_sweep:  # cancelled timers do not pile up until they are due
            self._heap = [timer for timer in self._heap if timer.action is not None]
            heapq.heapify(self._heap)
            self._before_sweep = max(_BEFORE_SWEEP, 2 * len(self._heap))
        timer = Timer(self._clock.monotonic() + delay_seconds, next(self._order), action)
        heapq.heappush(self._heap, timer)
        return timer

    def run_due(self, run: Callable[[Callable[[], None]], None]) -> tuple[float | None, bool]:
        """Calls `run` with each action that is due; the milliseconds until the next timer, and whether anything ran."""
        ran = False
        while self._heap:
            timer = self._heap[0]
            if timer.action is None:
                heapq.heappop(self._heap)
                continue
            wait_seconds = timer.due - self._clock.monotonic()
            if wait_seconds > 0:
                return wait_seconds * 1000, ran
            heapq.heappop(self._heap)
            run(timer.action)
            ran = True
        return None, ran
