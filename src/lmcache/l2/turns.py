"""So many at once; others wait for their turn, until their deadline."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """A semaphore that survives deadlines and cancellation on every Python that we support."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._has_ended = False

    async def acquire(self, deadline: float) -> bool:
        """False when the deadline, in the loop's time, or `end` came first."""
        if self._has_ended:
            return False
        if self._free:
            self._free -= 1
            return True
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=max(0.0, deadline - loop.time()))
        except asyncio.CancelledError:
            if not turn.done():
                self._waiting.remove(turn)
            elif turn.result():
                self.release()  # it was our turn already
            raise
        if turn.done():
            return turn.result()
        self._waiting.remove(turn)  # it would stay until another one is done, which may be never
        return False

    def release(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(True)
        else:
            self._free += 1

    def end(self) -> None:
        """Nobody gets a turn any more, those who wait included. Idempotent."""
        self._has_ended = True
        while self._waiting:
            self._waiting.popleft().set_result(False)
