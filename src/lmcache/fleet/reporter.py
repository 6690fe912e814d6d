"""Tells a coordinator what a server has: changes in their order, and everything again where something is not known.

Invariant: what the coordinator has been told of an incarnation, up to the last batch that it took, is what a listing
and the changes behind it say. Where that cannot be kept (a batch is missing there, changes are lost here, either side
was started again), the incarnation is raised and everything is told again. One batch is in memory at a time, and
requests are never waited for by anybody else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from lmcache.clock import Clock
from lmcache.core.limits import REPORTED_ENTRIES
from lmcache.core.object_changes import ChangeSource, Run
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.fleet import messages as m
from lmcache.fleet.event_batches import Stream, is_named, request_body, split
from lmcache.fleet.membership import Coordinator, MemberSettings
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import FleetMemberMetrics

logger = logging.getLogger("lmcache.fleet")

_LOG_SECONDS = 60.0
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
_FIRST_RESYNC_SECONDS, _LAST_RESYNC_SECONDS = 1.0, 300.0  # between two; longer while one follows the other
_QUIET_SECONDS = 60.0  # without a resync, until the next one follows at once
_STALE_STEP = 60_000  # of an incarnation that a coordinator calls stale without saying what it knows


class _Resync(Exception):
    """Everything is to be told again."""


class _Stopped(Exception):
    pass


class EventReporter:
    """A thread of its own, from `start` to `stop`."""

    def __init__(
        self,
        settings: MemberSettings,
        sources: Sequence[ChangeSource],
        metrics: FleetMemberMetrics,
        clock: Clock,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._settings = settings
        self._sources = list(sources)
        self._metrics = metrics
        self._clock = clock
        self._coordinator = coordinator or Coordinator(settings)
        self._lock = threading.Condition()
        self._stopped = False
        self._joins = 0  # how often the server has joined
        self._known_incarnation = 0  # by the coordinator
        self._limiter = LogLimiter(_LOG_SECONDS)
        self._incarnation = 0
        self._joins_seen = 0
        self._stream = Stream(settings.instance_id, 0)
        self._cursors: list[int] = []
        self._stale_step = _STALE_STEP
        self._resync_seconds = _FIRST_RESYNC_SECONDS
        self._resynced_at = float("-inf")
        self._told_capacities_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="fleet-reporter", daemon=True)

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def start(self) -> None:
        self._thread.start()

    def joined(self, known_incarnation: int) -> None:
        """The server has joined, once more maybe: everything is told again. Any thread."""
        with self._lock:
            self._joins += 1
            self._known_incarnation = max(self._known_incarnation, known_incarnation)
            self._lock.notify_all()

    def stop(self) -> None:
        """Does not wait for a request under way."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._until_joined()
            while True:
                try:
                    self._tell_everything()
                    while True:
                        self._wait(self._settings.flush_seconds)
                        self._tell_changes()
                except _Resync as reason:
                    self._metrics.coordinator_resyncs.inc()
                    logger.info("Everything is told to the coordinator again: %s", reason)
                    self._before_resync()
                except (_Stopped, LMCacheError):
                    raise
                except Exception:  # a defect of a source must not end the thread
                    if self._limiter.due("fault"):
                        logger.exception("Events could not be made")
                    self._wait(_LAST_RETRY_SECONDS)
        except (_Stopped, LMCacheError):  # the latter: L1 is closed
            pass
        except Exception:  # the root of the thread
            logger.exception("The thread that tells the coordinator has ended by a fault")

    def _until_joined(self) -> None:
        with self._lock:
            while not self._joins and not self._stopped:
                self._lock.wait()
        self._check()

    def _before_resync(self) -> None:
        """A coordinator that asks for one after the other does not keep this server busy."""
        now = self._clock.monotonic()
        is_quiet = now - self._resynced_at > max(_QUIET_SECONDS, self._resync_seconds)
        self._resync_seconds = (
            _FIRST_RESYNC_SECONDS if is_quiet else min(2 * self._resync_seconds, _LAST_RESYNC_SECONDS)
        )
        if not is_quiet:
            self._sleep(self._resync_seconds)
        with self._lock:
            if self._stopped:
                raise _Stopped

    def _tell_everything(self) -> None:
        with self._lock:
            self._joins_seen = self._joins
            known = self._known_incarnation
        now_ms = int(self._clock.wall() * 1000)
        self._incarnation = max(now_ms, self._incarnation + 1, known + 1)
        self._resynced_at = self._clock.monotonic()
        self._stream = Stream(self._settings.instance_id, self._incarnation)
        self._cursors = [source.cursor() for source in self._sources]
        first = self._sources[0]
        self._send(self._stream.mark("begin", first, self._clock.wall()))
        self._tell_capacities()
        for source in self._sources:
            start, more = 0, True
            while more:
                page = source.objects(start, REPORTED_ENTRIES)
                self._tell(source, page.runs)
                start, more = page.next_start, page.next_start > 0
        self._send(self._stream.mark("end", first, self._clock.wall()))

    def _tell_changes(self) -> None:
        for index, source in enumerate(self._sources):
            while True:
                cursor = self._cursors[index]
                page = source.changes(cursor, REPORTED_ENTRIES)
                if page.lost:
                    raise _Resync(f"changes of {source.backend or source.tier} are lost")
                self._tell(source, page.runs)
                self._cursors[index] = page.next_cursor
                if page.next_cursor == cursor or not page.runs:
                    break
        if self._clock.monotonic() - self._told_capacities_at >= self._settings.heartbeat_seconds:
            self._tell_capacities()  # which also shows a gap where nothing changes

    def _tell_capacities(self) -> None:
        for source in self._sources:
            self._send(self._stream.capacity(source, self._clock.wall()))
        self._told_capacities_at = self._clock.monotonic()

    def _tell(self, source: ChangeSource, runs: Sequence[Run]) -> None:
        for run in runs:
            if is_named(run.namespace):
                for part in split(run, REPORTED_ENTRIES):
                    self._send(self._stream.changes(source, part, self._clock.wall()))
                    self._metrics.coordinator_events.inc(len(part.hashes) // 32)

    # ---- requests ----------------------------------------------------------------------------------------------------
    def _send(self, batch: bytes) -> None:
        """Until the coordinator has taken it; _Resync where it wants everything."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            self._check()
            try:
                answer: m.EventsAnswer = self._coordinator.read(
                    m.EventsAnswer, "POST", "/events", request_body([batch])
                )
            except (ServerUnavailable, LMCacheError) as error:
                self._metrics.coordinator_failures.labels("events").inc()
                if self._limiter.due("events"):
                    logger.warning("Events do not reach the coordinator at %s: %s", self._settings.url, error)
                self._wait(retry_seconds)
                retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)
                continue
            self._read(answer)
            return

    def _read(self, answer: m.EventsAnswer) -> None:
        instance_id = self._settings.instance_id
        if answer.stale:
            known = answer.incarnations.get(instance_id, 0)
            if known >= self._incarnation:
                self._incarnation = min(known, 2**62)
            elif instance_id not in answer.resync:
                self._incarnation += self._stale_step
                self._stale_step = min(2 * self._stale_step, 2**40)
            raise _Resync("it knows a later incarnation of this server, or none")
        if instance_id in answer.resync:
            raise _Resync("it misses batches")

    # ---- waits -------------------------------------------------------------------------------------------------------
    def _check(self) -> None:
        with self._lock:
            if self._stopped:
                raise _Stopped
            if self._joins != self._joins_seen and self._joins_seen:
                raise _Resync("the server has joined again")

    def _wait(self, seconds: float) -> None:
        self._sleep(seconds)
        self._check()

    def _sleep(self, seconds: float) -> None:
        """Less where the server stops, or joins again."""
        deadline = self._clock.monotonic() + seconds
        with self._lock:
            while not self._stopped and self._joins == self._joins_seen:
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return
                self._lock.wait(left)
