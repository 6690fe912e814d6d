"""One computation for all that ask at the same time, and a limit on how much of the time it takes.

An answer is computed after its request came, never before: what a caller did is in it. Where requests come faster than
computations are to begin, they wait a moment for the next one, together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

BURST = 20  # computations at once before any waits
REFILL_SECONDS = 0.1  # until one more may begin


class SharedAnswer(Generic[T]):
    """Belongs to one asyncio loop."""

    def __init__(self, compute: Callable[[], Awaitable[T]]) -> None:
        self._compute = compute
        self._next: asyncio.Task[T] | None = None  # has not begun to compute
        self._computing = asyncio.Lock()
        self._budget = float(BURST)
        self._refilled_at = 0.0

    async def get(self) -> T:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        asked_at = asyncio.get_running_loop().time()
        self._budget = min(float(BURST), self._budget + (asked_at - self._refilled_at) / REFILL_SECONDS)
        self._refilled_at = asked_at
        self._budget -= 1
        if self._budget < 0:
            await asyncio.sleep(-self._budget * REFILL_SECONDS)
        async with self._computing:
            self._next = None  # who comes from here on gets the next one
            return await self._compute()
