"""How many requests may wait for each adapter at once: so many ask it what it has, and so many load from it.

A request asks one adapter at a time, and has a place for loads while what it loads from that adapter is on its way. So
whoever waits for a slow adapter takes no place from those whom the others serve, who need to hear from it only that it
has no more of their prompt. One that has joined the loads of others has no place for loads.

A question goes on when whoever asked stops waiting for the answer, with its place: its end tells the breaker, and
whoever asks next, what the adapter is worth.

Questions that are to wait for what is being stored elsewhere have places of their own for each such place: how long
they take says nothing of the adapter, and nobody else waits behind them.

No deadlock: a place to ask is given back without waiting for another place, and one for loads before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import ObjectKey
from lmcache.l2.adapter import FollowsHints
from lmcache.l2.runner import ProbeAnswer, Runner
from lmcache.telemetry.metrics import L2Metrics


class _Lane:
    """Questions to one adapter."""

    def __init__(self, max_in_flight: int) -> None:
        self.free = asyncio.Semaphore(max_in_flight)
        self.asked_at: dict[object, float] = {}  # the oldest first
        self.users = 0  # questions, those that wait for a place included


class PrefetchPlaces:
    """Belongs to the storage loop."""

    def __init__(self, runners: Sequence[Runner], max_in_flight: int, metrics: L2Metrics, clock: Clock) -> None:
        """`max_in_flight`: requests an adapter."""
        self._clock = clock
        self._queue_seconds = {runner.name: metrics.l2_prefetch_queue.labels(runner.name) for runner in runners}
        self._lanes = {runner.name: _Lane(max_in_flight) for runner in runners}
        self._waits: dict[tuple[str, str], _Lane] = {}  # by adapter and place, while anybody asks there
        self._loading = {runner.name: asyncio.Semaphore(max_in_flight) for runner in runners}
        self.waiting = 0

    @property
    def questions(self) -> int:
        """That have no answer yet."""
        return sum(len(lane.asked_at) for lanes in (self._lanes, self._waits) for lane in lanes.values())

    async def ask(
        self, runner: Runner, keys: Sequence[ObjectKey], patience_seconds: float | None, hint: Hint | None = None
    ) -> ProbeAnswer | None:
        """Returns the adapter's answer; None when it takes longer than `patience_seconds`, and at once when another
        question has."""
        loop = asyncio.get_running_loop()
        place = _waits_at(runner, hint)
        lane = self._lanes[runner.name] if place is None else self._wait_lane(place)
        now_seconds, asked_at = loop.time(), lane.asked_at
        if patience_seconds is not None and any(now_seconds - at >= patience_seconds for at in asked_at.values()):
            return None
        question = object()
        lane.users += 1
        asking = loop.create_task(self._ask(question, now_seconds, lane, runner, keys, hint))
        asking.add_done_callback(_note_fault)
        asking.add_done_callback(lambda _: self._leave_lane(lane, place))
        try:
            await asyncio.wait({asking}, timeout=patience_seconds)
        finally:
            if not asking.done() and question not in asked_at:  # it waits for a place
                asking.cancel()
                await asyncio.wait({asking})
        return asking.result() if asking.done() and not asking.cancelled() else None

    def _wait_lane(self, place: tuple[str, str]) -> _Lane:
        if place not in self._waits:
            self._waits[place] = _Lane(limits.L2_MAX_WAITS_IN_FLIGHT)
        return self._waits[place]

    def _leave_lane(self, lane: _Lane, place: tuple[str, str] | None) -> None:
        lane.users -= 1
        if place is not None and not lane.users:
            del self._waits[place]

    async def _ask(
        self,
        question: object,
        now_seconds: float,
        lane: _Lane,
        runner: Runner,
        keys: Sequence[ObjectKey],
        hint: Hint | None,
    ) -> ProbeAnswer:
        await self._take(lane.free, runner)
        lane.asked_at[question] = now_seconds
        try:
            return await runner.ask(keys, hint)
        finally:
            del lane.asked_at[question]
            lane.free.release()

    async def take(self, runner: Runner) -> None:
        """For loads."""
        await self._take(self._loading[runner.name], runner)

    def give_back(self, runner: Runner) -> None:
        self._loading[runner.name].release()

    async def _take(self, free: asyncio.Semaphore, runner: Runner) -> None:
        self.waiting += 1
        started = self._clock.monotonic()
        try:
            await free.acquire()
        finally:
            self.waiting -= 1
            self._queue_seconds[runner.name].observe(self._clock.monotonic() - started)


def _waits_at(runner: Runner, hint: Hint | None) -> tuple[str, str] | None:
    """The adapter and its place whose answer waits; None for an answer that comes at once."""
    if hint is None or hint.wait_seconds <= 0 or not isinstance(runner.adapter, FollowsHints):
        return None
    place = runner.adapter.waits_at(hint)
    return (runner.name, place) if place is not None else None


def _note_fault(asking: asyncio.Task[Any]) -> None:
    if not asking.cancelled():
        asking.exception()  # seen: whoever asked may have stopped waiting


class RequestPlace:
    """The place of one request."""

    def __init__(self, places: PrefetchPlaces, runners: Sequence[Runner]) -> None:
        """`runners` in the order in which they are asked."""
        self._places = places
        self._runners = runners
        self._position = -1
        self._held: Runner | None = None
        self._loads = 0  # that have not ended
        self._is_kept = False  # for a load that is about to start

    async def ask(
        self, position: int, keys: Sequence[ObjectKey], patience_seconds: float | None, hint: Hint | None = None
    ) -> ProbeAnswer | None:
        """Asks the adapter at this position, as `PrefetchPlaces.ask` does."""
        return await self._places.ask(self._runners[position], keys, patience_seconds, hint)

    async def move_to(self, position: int) -> None:
        """Before loads from an adapter; back to an earlier one it does not go while it has a place. The old place is
        free while this waits."""
        self._is_kept = True
        if self._held is None or position > self._position:
            self.leave()
            self._position = position
            await self._places.take(self._runners[position])
            self._held = self._runners[position]

    def used_by(self, done: asyncio.Future[Any]) -> None:
        """A load that has started."""
        self._loads += 1
        done.add_done_callback(self._load_ended)

    def leave_when_loaded(self) -> None:
        self._is_kept = False
        if not self._loads:
            self.leave()

    def _load_ended(self, _: object) -> None:
        self._loads -= 1
        if not self._loads and not self._is_kept:
            self.leave()

    def leave(self) -> None:
        if self._held is not None:
            self._places.give_back(self._held)
            self._held = None
