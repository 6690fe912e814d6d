"""One operation of an adapter, with a deadline that it may outlive.

Invariant: what the caller lent to an operation (buffers under leases or reservations) is given back once, when the
operation has really ended - not when the caller stopped waiting for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from prometheus_client import Counter

from lmcache.errors import AdapterError, CapacityError
from lmcache.l2.breaker import Breaker

T = TypeVar("T")

log = logging.getLogger("lmcache.l2")


class Hold:
    """Calls `release` when everybody who was added has reported done. Starts with one user, its maker."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._users = 1

    def add(self) -> None:
        assert self._users > 0
        self._users += 1

    def done(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._release()


class Slots:
    """A semaphore that survives deadlines and cancellation on every Python that we support."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self, deadline: float) -> bool:
        """False when the deadline, in the loop's time, came first."""
        if self._free:
            self._free -= 1
            return True
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=max(0.0, deadline - loop.time()))
        except asyncio.CancelledError:
            if turn.cancel():
                self._waiting.remove(turn)
            else:
                self.release()  # it was our turn already
            raise
        if turn.cancel():
            self._waiting.remove(turn)  # it would stay until an operation ends, which may be never
            return False
        return True

    def release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Lane:
    """Operations of one direction: at most `in_flight` at once, abandoned ones included, behind one breaker."""

    def __init__(self, name: str, adapter_name: str, in_flight: int, breaker: Breaker, late: Counter) -> None:
        """`late` counts operations that ran into their deadline."""
        self.name = name  # "loads", "stores"
        self.breaker = breaker
        self.running: set[asyncio.Task[Any]] = set()
        self.abandoned = 0
        self._late = late
        self._adapter_name = adapter_name
        self._slots = Slots(in_flight)

    async def run(
        self, call: Callable[[], Coroutine[Any, Any, T]], hold: Hold, deadline: float, *, asked_for: bool = False
    ) -> T:
        """`deadline` in the loop's time. Every fault is an AdapterError. `asked_for` by an operator: also while
        suspended."""
        if not self.breaker.admits() and not asked_for:
            raise AdapterError(f"{self._adapter_name}: {self.name} are suspended after faults")
        loop = asyncio.get_running_loop()
        if not await self._slots.acquire(deadline):
            raise self.fault("no operation ended in time to start another one", at_once=True)
        hold.add()
        task = loop.create_task(call())
        self.running.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self.running.discard(task)
            self._slots.release()
            hold.done()
            if not task.cancelled():
                task.exception()  # seen: who asked may have been cancelled

        task.add_done_callback(ended)
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - loop.time()))
        if not done:
            self.abandoned += 1
            self._late.inc()
            task.add_done_callback(self._came_late)
            raise self.fault("an operation did not end within its deadline", at_once=True)
        try:
            return task.result()
        except CapacityError:
            raise
        except AdapterError as error:
            self.fault(str(error))
            raise
        except Exception as error:  # the root of an operation: an adapter's defect must not end a controller
            log.exception("%s: unexpected fault", self._adapter_name)
            raise self.fault(f"{type(error).__name__}: {error}") from error

    def ok(self) -> None:
        """The operation did what it should."""
        if self.breaker.succeeded():
            log.info("%s: %s go on", self._adapter_name, self.name)

    def fault(self, reason: str, *, at_once: bool = False) -> AdapterError:
        """Counts a fault and says so when it was the one too many: `at_once` for one that cost a whole deadline."""
        if self.breaker.failed(at_once=at_once):
            log.warning(
                "%s: %s are suspended for %.0f s after faults, the last: %s",
                self._adapter_name,
                self.name,
                self.breaker.open_seconds,
                reason,
            )
        return AdapterError(f"{self._adapter_name}: {reason}")

    def _came_late(self, task: asyncio.Task[Any]) -> None:
        self.abandoned -= 1
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s: an abandoned operation failed: %s", self._adapter_name, task.exception())
