"""The thread of a server that tells a coordinator what it has. Nothing else waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from lmcache.clock import Clock
from lmcache.core.object_changes import ChangeSource
from lmcache.errors import LMCacheError
from lmcache.fleet.event_log import Heard, LoggedCoordinator, LogPace, open_log
from lmcache.fleet.membership import Coordinator, MemberSettings
from lmcache.fleet.reporter import Answering, Reporter, ResyncNeeded
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import FleetMemberMetrics

logger = logging.getLogger("lmcache.fleet")

_AFTER_FAULT_SECONDS = 30.0
_FAULT_LOG_SECONDS = 600.0
_STOP_SECONDS = 0.5


class _Stopped(Exception):
    pass


class EventReporting:
    """From `start` to `stop`. Begins when the server has joined."""

    def __init__(
        self, settings: MemberSettings, sources: Sequence[ChangeSource], metrics: FleetMemberMetrics, clock: Clock
    ) -> None:
        self._flush_seconds = settings.flush_seconds
        self._metrics = metrics
        self._clock = clock
        self._limiter = LogLimiter(_FAULT_LOG_SECONDS, clock)
        self._changed = threading.Condition()
        self._stopped = False
        self._joins = 0  # how often the server has joined
        self._joins_told = 0  # for which everything has been told, or is being told
        self._known_incarnation = 0
        self._asked = False  # for everything, by a coordinator that answers nothing else
        self._pace: LogPace | None = None  # where heartbeats alone say what became of what was told
        coordinator: Answering = Coordinator(settings)
        if settings.event_log is not None:
            self._pace = LogPace(clock)
            coordinator = LoggedCoordinator(
                open_log(settings.event_log),
                Coordinator(settings),
                settings.instance_id,
                self._pace,
                lambda: self._reporter.last_batch,
                self._pause,
            )
        self._reporter = Reporter(
            settings.instance_id,
            sources,
            coordinator,
            metrics,
            clock,
            self._pause,
            capacity_seconds=settings.heartbeat_seconds,
        )
        self._thread = threading.Thread(target=self._run, name="fleet-reporter", daemon=True)

    @property
    def incarnation(self) -> int:
        return self._reporter.incarnation

    def start(self) -> None:
        self._thread.start()

    def joined(self, known_incarnation: int) -> None:
        """The server has joined, maybe once more: everything is told. Any thread."""
        with self._changed:
            self._joins += 1
            self._known_incarnation = max(self._known_incarnation, known_incarnation)
            self._changed.notify_all()

    def heard(self, heard: Heard) -> None:
        """What the coordinator knows of this server. Any thread."""
        if self._pace is None:
            return
        self._pace.heard(heard)
        own, known = self._reporter.incarnation, heard.incarnation
        if own and (known > own or (heard.needs_resync and known == own)):
            with self._changed:
                self._asked = True
                self._known_incarnation = max(self._known_incarnation, known)

    def stop(self) -> None:
        """Ends it before what it reads is closed, unless a request is under way: that one is not waited for long."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        try:
            self._sleep(float("inf"))
            while True:
                self._check_stopped()
                try:
                    self._report()
                except ResyncNeeded as reason:
                    logger.info("Everything is told to the coordinator again: %s", reason)
                    self._await_resync()
                except LMCacheError as error:  # L1 is closed, or a tier does not answer
                    logger.debug("Nothing can be told to the coordinator: %s", error)
                    self._sleep(_AFTER_FAULT_SECONDS)
                except _Stopped:
                    raise
                except Exception:  # the root of the thread: some of what was to be told may be lost
                    if self._limiter.due():
                        logger.exception("By a fault, everything is told to the coordinator again")
                    self._await_resync(_AFTER_FAULT_SECONDS)
        except _Stopped:
            pass

    def _await_resync(self, least_seconds: float = 0.0) -> None:
        self._metrics.coordinator_resyncs.inc()
        self._sleep(max(least_seconds, self._reporter.seconds_until_resync()), heeds_joins=False)

    def _report(self) -> None:
        with self._changed:
            self._joins_told = self._joins
            self._asked = False
            known = self._known_incarnation
        self._reporter.know(known)
        self._reporter.tell_everything()
        while True:
            self._pause(self._flush_seconds)
            self._reporter.tell_changes()

    def _pause(self, seconds: float) -> None:
        if seconds:
            self._sleep(seconds)
        self._check_stopped()
        if self._joins != self._joins_told:
            raise ResyncNeeded("this server has joined again")
        if self._asked:
            raise ResyncNeeded("it misses batches, or knows later ones")

    def _check_stopped(self) -> None:
        if self._stopped:
            raise _Stopped

    def _sleep(self, seconds: float, *, heeds_joins: bool = True) -> None:
        """Less where the server stops, or joins."""
        deadline = self._clock.monotonic() + seconds
        with self._changed:
            while not self._stopped and not (heeds_joins and self._joins != self._joins_told):
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
