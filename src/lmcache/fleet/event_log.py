"""A log between servers and their coordinator, in a service that the fleet runs already.

Servers append the bodies of `POST /events` (docs/formats/fleet-events.md); the coordinator reads them in their order.
The log may lose its end, its beginning or all of it: numbers of batches show what is missing, and servers are told by
their heartbeats. These also say what was read, so that a server that tells much does not push out what was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import quote

import msgspec

from lmcache.clock import Clock
from lmcache.core.limits import MAX_LOGGED_EVENT_REQUESTS, MAX_TOLD_LOG_REQUESTS
from lmcache.errors import ConfigError
from lmcache.fleet.messages import EventsAnswer

if TYPE_CHECKING:
    from lmcache.fleet.membership import Coordinator

HTTP, VALKEY, KAFKA = "http", "valkey", "kafka"
EVENTS_PATH = "/events"
DEFAULT_STREAM = "lmcache-cache-events"
DEFAULT_GROUP = "lmcache-coordinator"
_ASK_SECONDS = 0.5  # from one question what was read to the next
_STALLED_SECONDS = 5.0  # without anything read: what was appended last may be lost, and one request more shows that


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


def heartbeat_path(instance_id: str) -> str:
    return f"/instances/{quote(instance_id, safe='')}/heartbeat"


class Heard(msgspec.Struct, frozen=True):
    """What counts here of a coordinator's answer to a heartbeat; others say less."""

    incarnation: int = 0
    needs_resync: bool = False
    seq: int = 0
    log_requests: int = 0


class LogPace:
    """How far a server is ahead of the coordinator. `heard` may be called by any thread, all else by one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The incarnation and the last batch of each request that may be unread, the oldest first.
        self._unread: deque[tuple[int, int]] = deque(maxlen=MAX_LOGGED_EVENT_REQUESTS)
        self._heard = Heard(log_requests=MAX_TOLD_LOG_REQUESTS)
        self._moved_at = float("-inf")  # when something was appended, or was seen to have been read

    def heard(self, heard: Heard) -> None:
        self._heard = heard

    def appended(self, incarnation: int, seq: int) -> None:
        self._unread.append((incarnation, seq))
        self._moved_at = self._clock.monotonic()

    @property
    def is_ahead(self) -> bool:
        """Whether the next request is to wait."""
        heard = self._heard
        while self._unread and self._unread[0] <= (heard.incarnation, heard.seq):
            self._unread.popleft()
            self._moved_at = self._clock.monotonic()
        return 0 < heard.log_requests <= len(self._unread)

    @property
    def is_stalled(self) -> bool:
        return self._clock.monotonic() - self._moved_at > _STALLED_SECONDS


class LoggedCoordinator:
    """A coordinator that is told by a log: it answers at once, and nothing is known of what became of it. How far it
    has read, and turns to tell everything, are asked for over HTTP: a log forgets what is not read in time."""

    def __init__(
        self,
        log: EventLog,
        coordinator: Coordinator,
        instance_id: str,
        pace: LogPace,
        told: Callable[[], tuple[int, int]],
        pause: Callable[[float], None],
    ) -> None:
        """`told`: the incarnation and the number of the last batch that was made. `pause` as a `Reporter`'s."""
        self._log = log
        self._coordinator = coordinator
        self._heartbeat = heartbeat_path(instance_id)
        self._pace = pace
        self._told = told
        self._pause = pause

    def read(self, kind: Any, method: str, path: str, body: Any = None, content_type: str = "") -> Any:
        """Bodies are JSON: columns are sent where an answer says that they are taken."""
        if path != EVENTS_PATH:
            return self._coordinator.read(kind, method, path)  # a turn to tell everything
        while self._pace.is_ahead:
            self._pace.heard(self._coordinator.read(Heard, "PUT", self._heartbeat))
            if not self._pace.is_ahead or self._pace.is_stalled:
                break
            self._pause(_ASK_SECONDS)
        self._log.append(body)
        self._pace.appended(*self._told())
        return EventsAnswer(0, 0, 0)
