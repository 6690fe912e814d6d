"""Tells a coordinator what a server has: changes in their order, and everything again where something is not known.

Invariant: what the coordinator has taken of an incarnation is what a listing and the changes behind it say. Where that
cannot be kept (a batch is missing there, changes are lost here, either side was started again), the incarnation is
raised and everything is told again. The batches of one page are in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from lmcache.clock import Clock
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.object_changes import ChangeSource, Run
from lmcache.errors import LMCacheError
from lmcache.fleet import messages as m
from lmcache.fleet.event_batches import Fields, Stream, is_named, split
from lmcache.fleet.event_log import EVENTS_PATH
from lmcache.http.client import JSON_TYPE, HttpRefused
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import FleetMemberMetrics

logger = logging.getLogger("lmcache.fleet")

_LOG_SECONDS = 60.0
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
_FIRST_RESYNC_SECONDS, _LAST_RESYNC_SECONDS = 1.0, 300.0  # between two; longer while one follows the other
_QUIET_SECONDS = 60.0  # without a resync, until the next one follows at once
_STALE_STEP = 60_000  # of an incarnation that a coordinator calls stale without saying what it knows
_MOST_INCARNATION = 2**62  # that is believed
_AFTER_REFUSAL_SECONDS = 3600.0  # from one resync to the next
_NEVER_TAKEN = (400, 413, 422)  # answers to a body that will be no other the next time
_NO_TURNS = (404, 405)  # of a coordinator that has none, or does not know this server


class ResyncNeeded(Exception):
    """Everything is to be told again; the text says why."""


class Answering(Protocol):
    """A coordinator."""

    def read(self, kind: Any, method: str, path: str, body: Any = None, content_type: str = JSON_TYPE) -> Any:
        """The answer as that Struct. LMCacheError without one."""
        ...


class Reporter:
    """Used by one thread. `pause(seconds)` is how it waits; what that raises ends what it does."""

    def __init__(
        self,
        instance_id: str,
        sources: Sequence[ChangeSource],
        coordinator: Answering,
        metrics: FleetMemberMetrics,
        clock: Clock,
        pause: Callable[[float], None],
        capacity_seconds: float,
    ) -> None:
        """`capacity_seconds`: how often capacities are told, which also shows a gap where nothing changes."""
        self._instance_id = instance_id
        self._sources = list(sources)
        self._coordinator = coordinator
        self._metrics = metrics
        self._clock = clock
        self._pause = pause
        self._capacity_seconds = capacity_seconds
        self._limiter = LogLimiter(_LOG_SECONDS, clock)
        self._stream = Stream(instance_id, 0)
        self._cursors: list[int] = []
        self._stale_step = _STALE_STEP
        self._known_incarnation = 0  # by the coordinator
        self._resync_seconds = _FIRST_RESYNC_SECONDS
        self._resynced_at = float("-inf")
        self._told_capacities_at = float("-inf")
        self._has_left_out = False  # something, since everything was told
        self._may_pack = True  # until columns are refused, by whoever is in between

    @property
    def incarnation(self) -> int:
        return self._stream.incarnation

    @property
    def last_batch(self) -> tuple[int, int]:
        """Its incarnation and number."""
        return self._stream.incarnation, self._stream.seq

    def know(self, incarnation: int) -> None:
        """The coordinator has batches up to this one: the next is above."""
        self._known_incarnation = max(self._known_incarnation, min(incarnation, _MOST_INCARNATION))

    def seconds_until_resync(self) -> float:
        """How long to wait before everything is told again: a coordinator that asks for one after the other does not
        keep this server busy."""
        if self._clock.monotonic() - self._resynced_at > max(_QUIET_SECONDS, self._resync_seconds):
            self._resync_seconds = _FIRST_RESYNC_SECONDS
            return 0.0
        self._resync_seconds = min(2 * self._resync_seconds, _LAST_RESYNC_SECONDS)
        return self._resync_seconds

    def tell_everything(self) -> None:
        """ResyncNeeded: it is to be begun once more."""
        self._resynced_at = self._clock.monotonic()
        self._await_turn()
        incarnation = max(int(self._clock.wall() * 1000), self._stream.incarnation + 1, self._known_incarnation + 1)
        self._stream = Stream(self._instance_id, incarnation)
        self._resynced_at = self._clock.monotonic()
        self._has_left_out = False
        self._cursors = [source.cursor() for source in self._sources]
        first = self._sources[0]
        self._send([self._stream.mark("begin", first, self._clock.wall())])
        self._tell_capacities()
        for source in self._sources:
            start, more = 0, True
            while more:
                page = source.objects(start, self._stream.most_objects)
                self._tell(source, page.runs)
                start, more = page.next_start, page.next_start > 0
        self._send([self._stream.mark("end", first, self._clock.wall())])

    def _await_turn(self) -> None:
        """Others may be telling everything, too. ResyncNeeded."""
        path = f"/instances/{quote(self._instance_id, safe='')}/resync"
        while True:
            self._pause(0.0)
            try:
                answer = self._answer(Any, path, _NO_TURNS)
            except HttpRefused:
                return
            wait_seconds = answer.get("wait_seconds") if isinstance(answer, dict) else None
            if not isinstance(wait_seconds, (int, float)) or not wait_seconds > 0:  # others answer whatever they do
                return
            self._pause(min(wait_seconds, _LAST_RETRY_SECONDS))

    def tell_changes(self) -> None:
        """What has come and gone since. ResyncNeeded."""
        if self._has_left_out and self._clock.monotonic() - self._resynced_at > _AFTER_REFUSAL_SECONDS:
            raise ResyncNeeded("it has refused some of it, and may take it now")
        for index, source in enumerate(self._sources):
            more = True
            while more:
                page = source.changes(self._cursors[index], self._stream.most_objects_sent)
                if page.lost:
                    raise ResyncNeeded(f"changes of {source.backend or source.tier} are lost")
                self._tell(source, page.runs)
                more = page.next_cursor != self._cursors[index] and bool(page.runs)
                self._cursors[index] = page.next_cursor
        if self._clock.monotonic() - self._told_capacities_at >= self._capacity_seconds:
            self._tell_capacities()

    def _tell_capacities(self) -> None:
        self._send([self._stream.capacity(source, self._clock.wall()) for source in self._sources])
        self._told_capacities_at = self._clock.monotonic()

    def _tell(self, source: ChangeSource, runs: Sequence[Run]) -> None:
        """A request for the runs of a page, unless they are many."""
        batches: list[Fields] = []
        entries = 0
        for run in runs:
            for part in split(run, self._stream.most_objects) if is_named(run.namespace) else ():
                batches.append(self._stream.changes(source, part, self._clock.wall()))
                entries += len(part.hashes) // CHUNK_HASH_BYTES
                if entries >= self._stream.most_objects_sent:
                    self._send_changes(batches, entries)
                    batches, entries = [], 0
        if batches:
            self._send_changes(batches, entries)

    def _send_changes(self, batches: list[Fields], entries: int) -> None:
        self._send(batches)
        self._metrics.coordinator_events.inc(entries)

    def _send(self, batches: list[Fields]) -> None:
        """Until the coordinator has taken them, or said that it never will: these are left out, as if they had never
        been, and what comes after them is told. Everything is told again an hour later: a proxy may have said so."""
        self._pause(0.0)
        try:
            answer = self._answer(m.EventsAnswer, EVENTS_PATH, _NEVER_TAKEN, *self._stream.request(batches))
        except HttpRefused as refusal:
            self._metrics.coordinator_failures.labels("events").inc()
            if self._stream.packs:
                self._may_pack = False
                raise ResyncNeeded("it takes no columns") from None
            self._stream.seq -= len(batches)  # none of them has been applied
            self._has_left_out = True
            if self._limiter.due("refused"):
                logger.error("The coordinator takes some events not at all, they are left out: %s", refusal)
            return
        self._take(answer)

    def _answer(
        self, kind: Any, path: str, final: Sequence[int], body: bytes | None = None, content_type: str = JSON_TYPE
    ) -> Any:
        """As soon as there is one. HttpRefused with one of the statuses that are `final`."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            try:
                return self._coordinator.read(kind, "POST", path, body, content_type)
            except LMCacheError as error:
                if isinstance(error, HttpRefused) and error.status in final:
                    raise
                self._metrics.coordinator_failures.labels("events").inc()
                if self._limiter.due():
                    logger.warning("Events do not reach the coordinator: %s", error)
            self._pause(retry_seconds)
            retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)

    def _take(self, answer: m.EventsAnswer) -> None:
        self._stream.packs = answer.packed and self._may_pack
        wants_all = self._instance_id in answer.resync
        if answer.stale:
            known = answer.incarnations.get(self._instance_id, 0)
            self.know(known)
            if known < self._stream.incarnation and not wants_all:
                self.know(self._stream.incarnation + self._stale_step)
                self._stale_step = min(2 * self._stale_step, _MOST_INCARNATION)
            raise ResyncNeeded("it knows a later incarnation of this server, or no server of that name")
        if wants_all:
            raise ResyncNeeded("it misses batches")
