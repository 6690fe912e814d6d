"""How many requests may wait for each adapter at once: so many ask it what it has, and so many load from it.

A request asks one adapter at a time, and has a place for loads with the last one that it loads from. So whoever waits
for a slow adapter takes no place from those whom the others serve, who need to hear from it only that it has no more of
their prompt. One that has joined the loads of others has no place for loads.

No deadlock: a place to ask is given back without waiting for another place, and one for loads before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lmcache.core.key import ObjectKey
from lmcache.l2.runner import Runner


class PrefetchPlaces:
    """Belongs to the storage loop."""

    def __init__(self, runners: Sequence[Runner], max_in_flight: int) -> None:
        """`max_in_flight`: requests an adapter."""
        self._asking = {runner.name: asyncio.Semaphore(max_in_flight) for runner in runners}
        self._loading = {runner.name: asyncio.Semaphore(max_in_flight) for runner in runners}
        self.waiting = 0

    @asynccontextmanager
    async def to_ask(self, runner: Runner) -> AsyncIterator[None]:
        await self._take(self._asking[runner.name])
        try:
            yield
        finally:
            self._asking[runner.name].release()

    async def take(self, runner: Runner) -> None:
        """For loads."""
        await self._take(self._loading[runner.name])

    def give_back(self, runner: Runner) -> None:
        self._loading[runner.name].release()

    async def _take(self, free: asyncio.Semaphore) -> None:
        self.waiting += 1
        try:
            await free.acquire()
        finally:
            self.waiting -= 1


class RequestPlace:
    """Of one request."""

    def __init__(self, places: PrefetchPlaces, runners: Sequence[Runner]) -> None:
        """`runners` in the order in which they are asked."""
        self._places = places
        self._runners = runners
        self._position = -1
        self._held: Runner | None = None

    async def probe(self, position: int, keys: Sequence[ObjectKey]) -> list[bool]:
        """As the adapter's."""
        runner = self._runners[position]
        async with self._places.to_ask(runner):
            return await runner.probe(keys)

    async def move_to(self, position: int) -> None:
        """Before loads from an adapter; back to an earlier one it does not go. The old place is free while this
        waits."""
        if position > self._position:
            self.leave()
            self._position = position
            await self._places.take(self._runners[position])
            self._held = self._runners[position]

    def leave(self) -> None:
        if self._held is not None:
            self._places.give_back(self._held)
            self._held = None
