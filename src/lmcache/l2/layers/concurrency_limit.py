"""So many calls at once, abandoned ones included: a backend that hangs does not collect buffers without end."""

from __future__ import annotations

import asyncio
from collections import deque

from lmcache.errors import AdapterError, DeadlineError
from lmcache.l2.layers.operation import CallLayer, Operation, SharedRelease, Start, T


class ConcurrencyLimit:
    """A semaphore that survives deadlines and cancellation on every Python that we support."""

    def __init__(self, adapter_name: str, max_running: int, inner: CallLayer) -> None:
        self._adapter_name = adapter_name
        self._inner = inner
        self._free = max_running
        self.is_closed = False  # nothing begins any more, neither what waited for its turn nor what is tried again
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, start: Start[T], operation: Operation) -> T:
        if not await self.acquire(operation.deadline):
            raise DeadlineError(f"{self._adapter_name}: no operation ended in time to start another one")
        if self.is_closed:
            self.release()
            raise AdapterError(f"{self._adapter_name}: it is being closed")
        operation.lent.add_user()
        lent = SharedRelease(operation.lent.done, self.release)
        try:
            return await self._inner.run(start, Operation(operation.deadline, lent))
        finally:
            lent.done()

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
