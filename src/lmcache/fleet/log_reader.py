"""The thread of a coordinator that reads what servers tell from a log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec

from lmcache.clock import Clock
from lmcache.core.limits import MAX_FLEET_EVENT_BYTES
from lmcache.errors import LMCacheError
from lmcache.fleet.event_batches import decode_events
from lmcache.fleet.event_log import EventLog
from lmcache.fleet.events import EventIntake
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")

_WAIT_SECONDS = 1.0
_LOG_SECONDS = 60.0
_STOP_SECONDS = 7.0  # a read that the service does not answer


class EventLogReader:
    """From `start` to `stop`. `failures`: reads that failed, and bodies that were no events."""

    def __init__(self, log: EventLog, intake: EventIntake, clock: Clock) -> None:
        self._log = log
        self._intake = intake
        self._limiter = LogLimiter(_LOG_SECONDS, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-event-log", daemon=True)
        self.failures = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)
        self._log.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                for position, body in self._read():
                    self._apply(body)
                    self._intake.log_position = position  # behind what is known: what comes twice is a duplicate
            except LMCacheError as error:
                self.failures += 1
                if self._limiter.due():
                    logger.warning("Servers' events cannot be read: %s", error)
                self._stopping.wait(_WAIT_SECONDS)
            except Exception:  # the root of the thread
                self.failures += 1
                logger.exception("The thread that reads servers' events goes on after a fault")
                self._stopping.wait(_WAIT_SECONDS)

    def _read(self) -> Sequence[tuple[str, bytes]]:
        """Where the log does not go on, what it has comes the next time: numbers of batches show what is missing."""
        known = self._intake.log_position
        found = self._log.read(known, _WAIT_SECONDS) if known else ()
        if not found:
            self._intake.log_position = self._log.retained(known)
        return found

    def _apply(self, body: bytes) -> None:
        try:
            if len(body) > MAX_FLEET_EVENT_BYTES:
                raise msgspec.DecodeError(f"it has {len(body)} bytes, and {MAX_FLEET_EVENT_BYTES} are taken at most")
            request = decode_events(body)
        except msgspec.DecodeError as error:
            self.failures += 1
            if self._limiter.due("body"):
                logger.error("Something in the log is no body of events, and is passed over: %s", error)
            return
        self._intake.apply(request.batches)
