"""Simulated time, and real threads that run one at a time, so that a seed decides every interleaving.

A thread of the code under test runs until it waits for something; then the next one whose wait is over goes on. Nothing
else moves the clock than waiting does.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable


class _Killed(BaseException):
    """Ends a thread where it waits."""


class Turn:
    """A thread of the code under test."""

    def __init__(self, world: World, run: Callable[[], None], name: str) -> None:
        self.name = name
        self.ready: Callable[[], bool] = lambda: True
        self.deadline = float("inf")
        self.go = threading.Semaphore(0)
        self.ended = False
        self.killed = False
        self.frozen_until = 0.0
        self.fault: BaseException | None = None
        self._world = world
        self._run = run
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self.go.acquire()
        try:
            if not self.killed:
                self._run()
        except _Killed:
            pass
        except BaseException as error:
            self.fault = error
        self.ended = True
        self._world.back.release()

    def join(self) -> None:
        self._thread.join(10.0)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.back = threading.Semaphore(0)
        self.faults: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._turns: list[Turn] = []
        self._current: Turn | None = None

    # ---- clock -------------------------------------------------------------------------------------------------------
    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    # ---- what happens ------------------------------------------------------------------------------------------------
    def at(self, delay_seconds: float, action: Callable[[], None]) -> None:
        """`action` must not wait."""
        heapq.heappush(self._events, (self.now + delay_seconds, next(self._order), action))

    def block(self, ready: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """What every wait of the code under test comes to. Whether it is ready; False when the time is over first."""
        if ready():
            return True
        if seconds <= 0:
            return False
        deadline = self.now + seconds
        turn = self._current
        if turn is not None:
            turn.ready, turn.deadline = ready, deadline
            self.back.release()
            turn.go.acquire()
            if turn.killed:
                raise _Killed
            return ready()
        while True:
            self._run_turns()
            if ready():
                return True
            next_at = min(self._next_at(), deadline)
            if next_at == float("inf"):
                raise AssertionError("waits for something that nothing will bring")
            self.now = max(self.now, next_at)
            if self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            elif self.now >= deadline:
                return ready()

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, seconds)

    def _next_at(self) -> float:
        at = self._events[0][0] if self._events else float("inf")
        for turn in self._turns:
            at = min(at, turn.frozen_until) if turn.frozen_until > self.now else min(at, turn.deadline)
        return at

    def _run_turns(self) -> None:
        progress = True
        while progress:
            progress = False
            for turn in list(self._turns):
                if turn.frozen_until > self.now or not (turn.deadline <= self.now or turn.ready()):
                    continue
                progress = True
                self._resume(turn)

    def _resume(self, turn: Turn) -> None:
        self._current = turn
        turn.go.release()
        self.back.acquire()
        self._current = None
        if turn.ended:
            self._turns.remove(turn)
            turn.join()
            if turn.fault is not None:
                raise AssertionError(f"thread {turn.name} failed") from turn.fault

    # ---- threads -----------------------------------------------------------------------------------------------------
    def start_thread(self, run: Callable[[], None], name: str) -> Turn:
        turn = Turn(self, run, name)
        self._turns.append(turn)
        return turn

    def freeze(self, seconds: float, belongs: Callable[[str], bool] = lambda name: True) -> None:
        """Those threads do not run for a while: their process is stopped or starved."""
        for turn in self._turns:
            if belongs(turn.name):
                turn.frozen_until = self.now + seconds

    def kill(self, belongs: Callable[[str], bool]) -> None:
        """Those threads end where they wait."""
        for turn in [turn for turn in self._turns if belongs(turn.name)]:
            turn.killed = True
            with contextlib.suppress(AssertionError):
                self._resume(turn)

    def close(self) -> None:
        while self._turns:
            self.kill(lambda name: True)
