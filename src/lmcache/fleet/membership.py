"""A server's place in a fleet: it joins, says that it lives, and learns who the others are. A thread of its own; where
the coordinator is away, slow or wrong, the server goes on without it."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from lmcache.clock import Clock
from lmcache.core.limits import MAX_MEMBER_ANSWER_BYTES
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.fleet import messages as m
from lmcache.fleet.event_log import HTTP, EventLogSettings, Heard, heartbeat_path
from lmcache.http.client import JSON_TYPE, HttpRefused, answer_of, request, split_url
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import FleetMemberMetrics

logger = logging.getLogger("lmcache.fleet")

ASK_SECONDS = 10.0
_LEAVE_SECONDS = 1.0
_LOG_SECONDS = 60.0
_MEMBERS_SECONDS = 30.0  # between two looks at a coordinator that does not say whether others are there
_NOT_KNOWN = 404


@dataclass(frozen=True)
class Member:
    """Another server, or this one."""

    instance_id: str
    p2p_advertised_url: str


@dataclass(frozen=True)
class MemberSettings:
    """`url` of the coordinator. An empty `advertise_ip`: the address from which this machine reaches it."""

    url: str
    instance_id: str
    http_port: int
    mq_port: int
    advertise_ip: str = ""
    p2p_advertised_url: str = ""
    heartbeat_seconds: float = 5.0
    flush_seconds: float = 1.0
    event_transport: str = HTTP
    event_log: EventLogSettings | None = None  # of any other transport
    metadata: dict[str, Any] = field(default_factory=dict)
    token: Callable[[], str] = lambda: ""


class _Member(msgspec.Struct):
    """What counts here of a server."""

    instance_id: str
    p2p_advertised_url: str = ""


class _Members(msgspec.Struct):
    instances: list[_Member]
    members: int = 0


class Coordinator:
    """Asks it. Nothing that it answers is believed unless it has the form that it must have."""

    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings

    def ask(
        self, method: str, path: str, body: Any = None, seconds: float = ASK_SECONDS, content_type: str = JSON_TYPE
    ) -> Any:
        """LMCacheError."""
        settings = self._settings
        return request(
            *(settings.url, method, path, body),
            token=settings.token(),
            timeout_seconds=seconds,
            most_answer_bytes=MAX_MEMBER_ANSWER_BYTES,
            content_type=content_type,
        )

    def read(
        self,
        kind: Any,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = JSON_TYPE,
        seconds: float = ASK_SECONDS,
    ) -> Any:
        """The answer as a Struct of that kind."""
        answer = self.ask(method, path, body, seconds, content_type)
        with answer_of(self._settings.url, "a coordinator"):
            return msgspec.convert(answer, kind)

    def own_address(self) -> str:
        """From which this machine reaches it."""
        _, host, port, _ = split_url(self._settings.url, "--coordinator-url")
        try:
            with socket.create_connection((host, port or 80), ASK_SECONDS) as connection:
                address: str = connection.getsockname()[0]
                return address
        except OSError as error:
            raise ServerUnavailable(f"Nothing answers at {self._settings.url} ({error.strerror or error}).") from None


class Membership:
    """`on_joined(incarnation)`: it has joined, and the coordinator knows of batches up to that incarnation.
    `on_heard` gets what it says with a heartbeat. `on_members` gets all servers whenever others
    may be there. All are called by the thread of this."""

    def __init__(
        self,
        settings: MemberSettings,
        metrics: FleetMemberMetrics,
        clock: Clock,
        on_joined: Callable[[int], None],
        on_members: Callable[[Sequence[Member]], None],
        on_heard: Callable[[Heard], None] = lambda heard: None,
    ) -> None:
        self._settings = settings
        self._coordinator = Coordinator(settings)
        self._metrics = metrics
        self._on_joined = on_joined
        self._on_members = on_members
        self._on_heard = on_heard
        self._stop = threading.Event()
        self._limiter = LogLimiter(_LOG_SECONDS, clock)
        self._joined = False
        self._members = -1  # the number that the coordinator gave when they were last looked at
        self._rounds_without_look = 0
        self._thread = threading.Thread(target=self._run, name="fleet-member", daemon=True)

    @property
    def joined(self) -> bool:
        return self._joined

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leaves the fleet, or is soon forgotten there."""
        self._stop.set()
        if self._joined:
            try:
                path = f"/instances/{quote(self._settings.instance_id, safe='')}"
                self._coordinator.ask("DELETE", path, seconds=_LEAVE_SECONDS)
            except LMCacheError as error:
                logger.info("The coordinator was not told that this server ends: %s", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._beat()
                self._limiter.reset()
            except LMCacheError as error:
                self._metrics.coordinator_failures.labels("heartbeat").inc()
                if self._limiter.due():
                    logger.warning("The coordinator at %s cannot be used: %s", self._settings.url, error)
            except Exception:  # the root of the thread
                if self._limiter.due("fault"):
                    logger.exception("The place in the fleet could not be kept")
            self._stop.wait(self._settings.heartbeat_seconds)

    def _beat(self) -> None:
        members = self._heartbeat() if self._joined else None
        if self._stop.is_set():
            return
        if not self._joined:
            self._register()
            members = None
        self._metrics.coordinator_joined.set(1)
        every = max(1, round(_MEMBERS_SECONDS / self._settings.heartbeat_seconds))
        self._rounds_without_look += 1
        if members != self._members if members else self._rounds_without_look >= every or self._members < 0:
            self._look_at_members()

    def _heartbeat(self) -> int | None:
        """The number of the members, None where the coordinator has none."""
        try:
            answer = self._coordinator.ask("PUT", heartbeat_path(self._settings.instance_id))
        except HttpRefused as refusal:
            if refusal.status != _NOT_KNOWN:
                raise
            logger.info("The coordinator does not know this server: it joins again")
            self._joined = False
            self._metrics.coordinator_joined.set(0)
            return None
        if not isinstance(answer, dict):
            return None
        with contextlib.suppress(msgspec.ValidationError):
            self._on_heard(msgspec.convert(answer, Heard))
        members = answer.get("members")
        return members if isinstance(members, int) else None

    def _register(self) -> None:
        settings = self._settings
        body = m.RegisterRequest(
            settings.advertise_ip or self._coordinator.own_address(),
            *(settings.http_port, settings.instance_id, settings.metadata, settings.p2p_advertised_url),
            settings.mq_port,
        )
        answer = self._coordinator.read(m.Registered, "POST", "/instances", msgspec.json.encode(body))
        logger.info("This server has joined the fleet of %s as %s", settings.url, settings.instance_id)
        if settings.event_transport not in (HTTP, answer.event_transport):
            logger.error(
                "The coordinator reads no events by %s, so that it will not know what this server has: start it with "
                "--event-transport %s, or this server with --coordinator-event-transport http",
                *(settings.event_transport, settings.event_transport),
            )
        self._joined = True
        self._members = -1
        self._on_joined(answer.incarnation)

    def _look_at_members(self) -> None:
        answer: _Members = self._coordinator.read(_Members, "GET", "/instances?detail=brief")
        self._members = answer.members
        self._rounds_without_look = 0
        self._metrics.coordinator_members.set(len(answer.instances))
        self._on_members([Member(entry.instance_id, entry.p2p_advertised_url) for entry in answer.instances])
