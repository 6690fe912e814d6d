"""A log between servers and their coordinator, in a service that the fleet runs already.

Servers append the bodies of `POST /events` (docs/formats/fleet-events.md); the coordinator reads them in their order.
The log may lose its end, its beginning or all of it: numbers of batches show what is missing, and servers are told by
their heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lmcache.errors import ConfigError
from lmcache.fleet.messages import EventsAnswer

if TYPE_CHECKING:
    from lmcache.fleet.membership import Coordinator

HTTP, VALKEY, KAFKA = "http", "valkey", "kafka"
EVENTS_PATH = "/events"
DEFAULT_STREAM = "lmcache-cache-events"
DEFAULT_GROUP = "lmcache-coordinator"


class EventLog(Protocol):
    """Used by one thread. Every call ends within seconds, with LMCacheError where the service does not do it."""

    def append(self, body: bytes) -> None: ...

    def read(self, position: str, wait_seconds: float) -> Sequence[tuple[str, bytes]]:
        """Some bodies behind a position that `retained` or this gave, each with its own. Nothing, where none came
        within that time, or where the log does not go on there."""
        ...

    def retained(self, position: str) -> str:
        """The position, if the log goes on there, else the one before the oldest body to read: bodies were dropped, the
        log began anew, or the position is "" or one of another log."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ValkeySettings:
    """`option`: the beginning of the options' names, in front of "url", "stream" and "password-file"."""

    transport: ClassVar[str] = VALKEY
    package: ClassVar[str] = "redis"
    url: str
    stream: str = DEFAULT_STREAM
    password_file: str = ""
    option: str = "--valkey-"


@dataclass(frozen=True)
class KafkaSettings:
    """`option`: the beginning of the options' names, in front of "bootstrap-servers" and "config-file"."""

    transport: ClassVar[str] = KAFKA
    package: ClassVar[str] = "confluent-kafka"
    bootstrap_servers: str
    topic: str = DEFAULT_STREAM
    config_file: str = ""
    group_id: str = DEFAULT_GROUP
    option: str = "--kafka-"


EventLogSettings = ValkeySettings | KafkaSettings


def open_log(settings: EventLogSettings) -> EventLog:
    """ConfigError. Nothing is connected to yet."""
    try:  # clients are slow to import
        if isinstance(settings, KafkaSettings):
            from lmcache.fleet.kafka_log import KafkaLog

            return KafkaLog(settings)
        from lmcache.fleet.valkey_log import ValkeyLog

        return ValkeyLog(settings)
    except ImportError:
        raise ConfigError(
            f"The event transport {settings.transport} needs the package {settings.package}, which is not installed: "
            f"pip install 'lmcache[{settings.transport}]'."
        ) from None


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
