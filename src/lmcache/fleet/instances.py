"""The servers that have joined, and when they were last heard of."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from lmcache.core import limits
from lmcache.core.address import http_url
from lmcache.environment import Environment
from lmcache.errors import ConfigError, LMCacheError
from lmcache.fleet.messages import RegisterRequest

logger = logging.getLogger("lmcache.fleet")

_DEAF_PART = 0.25  # of the timeout: so long without a word from any server is more than the pause between two


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


@dataclass
class Instance:
    instance_id: str
    ip: str
    http_port: int
    metadata: dict[str, Any]
    p2p_advertised_url: str
    mq_port: int
    has_token: bool  # it joined with the admin token: it may get that one, too
    joined_at: float
    heard_at: float
    token_digest: bytes = b""  # of the token that it joined with
    expires_from: float = field(init=False)  # its silence counts since then: `heard_at`, or later

    def __post_init__(self) -> None:
        self.expires_from = self.heard_at

    @property
    def url(self) -> str:
        return http_url(self.ip, self.http_port, tls=bool(self.metadata.get("http_tls")))


class InstanceListener(Protocol):
    """What is told of servers that come and go, by the thread that changed them."""

    def joined(self, instance: Instance) -> None: ...

    def left(self, instance_id: str) -> None: ...


class NoListener:
    def joined(self, instance: Instance) -> None:
        pass

    def left(self, instance_id: str) -> None:
        pass


class Instances:
    """Thread-safe."""

    def __init__(
        self, environment: Environment, timeout_seconds: float, listener: InstanceListener | None = None
    ) -> None:
        self._clock = environment.clock
        self._random_bytes = environment.random_bytes
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._known: dict[str, Instance] = {}
        # Another number whenever somebody else is there, also after a restart.
        self._members = int.from_bytes(environment.random_bytes(4), "little") | 1
        self._looked_at = self._heard_at = self._clock.monotonic()  # `_heard_at`: of any server, or that look
        self._deaf_seconds = 0.0  # since that look
        self._listener = listener or NoListener()

    def register(self, request: RegisterRequest, *, token: str = "") -> tuple[Instance, bool]:
        """The server, and whether one of that name was there. `token`: the admin token that it came with.
        LMCacheError beyond MAX_FLEET_INSTANCES."""
        if len(msgspec.json.encode(request.metadata)) > limits.MAX_FLEET_METADATA_BYTES:
            raise ConfigError(f'The body: "metadata" has at most {limits.MAX_FLEET_METADATA_BYTES} bytes of JSON.')
        try:
            msgspec.msgpack.encode(request.metadata)
        except OverflowError:  # JSON has such numbers, a checkpoint has not
            raise ConfigError(
                f'The body: whole numbers in "metadata" are from {-(2**63)} to {2**64 - 1}; write others as strings.'
            ) from None
        joined_at = self._clock.monotonic()
        instance = Instance(
            request.instance_id or f"instance-{self._random_bytes(6).hex()}",
            *(request.ip, request.http_port, request.metadata, request.p2p_advertised_url, request.mq_port),
            *(bool(token), joined_at, joined_at, digest_of(token) if token else b""),
        )
        with self._lock:
            self._hear()
            before = self._known.get(instance.instance_id)
            if before is None and len(self._known) >= limits.MAX_FLEET_INSTANCES:
                raise LMCacheError(f"{limits.MAX_FLEET_INSTANCES} servers have joined; no other one can.")
            if before is not None and before.has_token and not token:
                raise ConfigError(
                    f"{instance.instance_id} joined with the admin token, and can be replaced with it only."
                )
            self._known[instance.instance_id] = instance
            self._members += 1
        if before is not None and (before.ip, before.http_port) != (instance.ip, instance.http_port):
            logger.warning(
                "%s is at %s now, and was at %s: two servers must not have one --instance-id",
                *(instance.instance_id, instance.url, before.url),
            )
        else:
            logger.info("%s has joined, at %s", instance.instance_id, instance.url)
        self._listener.joined(instance)
        return instance, before is not None

    def restore(self, instances: list[Instance]) -> None:
        """Takes the servers of a checkpoint, as if each had just been heard of."""
        with self._lock:
            self._known.update({instance.instance_id: instance for instance in instances})

    def heartbeat(self, instance_id: str, token: str = "") -> bool:
        """False: it is to register again, as does one that comes with another admin token than it joined with: it must
        show that it is at the address that gets the token."""
        with self._lock:
            instance = self._known.get(instance_id)
            if instance is None or (token and instance.has_token and digest_of(token) != instance.token_digest):
                return False
            instance.heard_at = instance.expires_from = self._hear()
            return True

    def _hear(self) -> float:
        monotonic = self._clock.monotonic()
        if monotonic - self._heard_at > _DEAF_PART * self._timeout_seconds:
            self._deaf_seconds += monotonic - self._heard_at
        self._heard_at = monotonic
        return monotonic

    def remove(self, instance_id: str) -> bool:
        """It has left by itself. Whether it was there."""
        has_left = self._remove(instance_id)
        if has_left:
            logger.info("%s has left", instance_id)
        return has_left

    def _remove(self, instance_id: str, silent_before: float = math.inf) -> bool:
        with self._lock:
            instance = self._known.get(instance_id)
            if instance is None or instance.expires_from >= silent_before:
                return False
            del self._known[instance_id]
            self._members += 1
        self._listener.left(instance_id)
        return True

    def look(self, round_seconds: float) -> float:
        """Once a round, which was to take so long; the time of this look. Where the round took longer and no server was
        heard for long, this coordinator could hear nobody: that is no silence of a server's."""
        with self._lock:
            monotonic = self._hear()
            late_seconds = monotonic - self._looked_at - round_seconds
            excused_seconds = min(self._deaf_seconds, late_seconds)
            self._looked_at, self._deaf_seconds = monotonic, 0.0
            if excused_seconds > 0:
                for instance in self._known.values():
                    instance.expires_from = min(instance.expires_from + excused_seconds, monotonic)
        return monotonic

    def expire(self, looked_at: float | None = None) -> list[str]:
        """Removes those that were silent for too long, at that time or now."""
        limit = (self._clock.monotonic() if looked_at is None else looked_at) - self._timeout_seconds
        with self._lock:
            silent = [name for name, instance in self._known.items() if instance.expires_from < limit]
        gone = [name for name in silent if self._remove(name, silent_before=limit)]
        for name in gone:
            logger.warning("%s was silent for %g s and is gone", name, self._timeout_seconds)
        return gone

    def find(self, instance_id: str) -> Instance:
        """LMCacheError (ConfigError) where there is none."""
        with self._lock:
            instance = self._known.get(instance_id)
        if instance is None:
            raise ConfigError(f"No server {instance_id!r} has joined; GET /instances lists those that have.")
        return instance

    def knows(self, instance_id: str) -> bool:
        with self._lock:
            return instance_id in self._known

    def all(self) -> list[Instance]:
        with self._lock:
            return list(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    @property
    def members(self) -> int:
        return self._members
