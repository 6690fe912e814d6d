"""A log between servers and their coordinator, in a service that the fleet runs already.

Servers append the bodies of `POST /events` (docs/formats/fleet-events.md); the coordinator reads them in their order.
The log may lose its end, its beginning or all of it: numbers of batches show what is missing, and servers are told by
their heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmcache.fleet.messages import EventsAnswer

if TYPE_CHECKING:
    from lmcache.fleet.membership import Coordinator

HTTP, VALKEY = "http", "valkey"
EVENTS_PATH = "/events"
DEFAULT_STREAM = "lmcache-cache-events"


class EventLog(Protocol):
    """Used by one thread. Every call ends within seconds, with LMCacheError where the service does not do it."""

    def append(self, body: bytes) -> None: ...

    def read(self, position: str, wait_seconds: float) -> Sequence[tuple[str, bytes]]:
        """Some bodies behind a position, each with its own; "" is before the first that is there. Nothing, where none
        came within that time."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EventLogSettings:
    """`option`: the beginning of the options' names, in front of "url", "stream" and "password-file"."""

    url: str
    stream: str = DEFAULT_STREAM
    password_file: str = ""
    option: str = "--valkey-"


def open_log(settings: EventLogSettings) -> EventLog:
    """ConfigError. Nothing is connected to yet."""
    from lmcache.fleet.valkey_log import ValkeyLog  # its client is slow to import

    return ValkeyLog(settings)


class LoggedCoordinator:
    """A coordinator that is told by a log: it answers at once, and nothing is known of what became of it. Turns to tell
    everything are asked for over HTTP: a log forgets what is not read in time."""

    def __init__(self, log: EventLog, coordinator: Coordinator) -> None:
        self._log = log
        self._coordinator = coordinator

    def read(self, kind: Any, method: str, path: str, body: Any = None, content_type: str = "") -> Any:
        """Bodies are JSON: columns are sent where an answer says that they are taken."""
        if path != EVENTS_PATH:
            return self._coordinator.read(kind, method, path)  # a turn to tell everything
        self._log.append(body)
        return EventsAnswer(0, 0, 0)
