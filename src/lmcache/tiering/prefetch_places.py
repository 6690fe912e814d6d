"""How many requests may wait for each adapter at once.

A request has one place at a time, with the last adapter that it has asked. So requests that wait for a slow adapter
take no place from those whom the adapters before it serve. One that has joined the loads of others has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache.l2.runner import Runner


class PrefetchPlaces:
    """Belongs to the storage loop."""

    def __init__(self, runners: Sequence[Runner], max_in_flight: int) -> None:
        """`max_in_flight`: requests an adapter."""
        self._free = {runner.name: asyncio.Semaphore(max_in_flight) for runner in runners}
        self.waiting = 0

    async def take(self, runner: Runner) -> None:
        self.waiting += 1
        try:
            await self._free[runner.name].acquire()
        finally:
            self.waiting -= 1

    def give_back(self, runner: Runner) -> None:
        self._free[runner.name].release()


class RequestPlace:
    """Of one request."""

    def __init__(self, places: PrefetchPlaces, runners: Sequence[Runner]) -> None:
        """`runners` in the order in which they are asked."""
        self._places = places
        self._runners = runners
        self._position = -1
        self._held: Runner | None = None

    async def move_to(self, position: int) -> None:
        """Before an adapter is asked; back to an earlier one it does not go. The old place is free while this waits."""
        if position > self._position:
            self.leave()
            self._position = position
            await self._places.take(self._runners[position])
            self._held = self._runners[position]

    def leave(self) -> None:
        if self._held is not None:
            self._places.give_back(self._held)
            self._held = None
