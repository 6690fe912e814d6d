"""Where the server is, and how long a lookup may hold up the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.errors import ConfigError

URL_VARIABLE, TIMEOUT_VARIABLE = "LMCACHE_SERVER_URL", "LMCACHE_LOOKUP_TIMEOUT_MS"
DEFAULT_URL = "tcp://localhost:5555"
DEFAULT_LOOKUP_SECONDS = 0.1
MAX_LOOKUP_SECONDS = 10.0
HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True)
class TensorrtSettings:
    """`lookup_seconds`: the engine schedules nothing else while it asks about a request."""

    url: str
    lookup_seconds: float

    @classmethod
    def read(cls, llm_args: Any, environment: Mapping[str, str]) -> TensorrtSettings:
        """ConfigError names the variable and what it may be."""
        given = getattr(getattr(llm_args, "kv_connector_config", None), "server_url", None)
        url = given or environment.get(URL_VARIABLE) or DEFAULT_URL
        return cls(str(url), _lookup_seconds(environment.get(TIMEOUT_VARIABLE, "")))

    def client(
        self,
        on_new_server: Callable[[Client], None] | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> Client:
        """A client with these settings, not started. Shared memory alone: a load that ends with a connection could not
        be computed instead, because the engine takes no word of failed loads."""
        return Client(
            self.url,
            environment=environment,
            heartbeat_interval_seconds=HEARTBEAT_SECONDS,
            transfer=WantedTransfer.SHM,
            on_new_server=on_new_server,
        )


def _lookup_seconds(text: str) -> float:
    if not text:
        return DEFAULT_LOOKUP_SECONDS
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= MAX_LOOKUP_SECONDS:
        raise ConfigError(
            f"{TIMEOUT_VARIABLE} is {text!r}; it must be a number of milliseconds above 0, at most "
            f"{MAX_LOOKUP_SECONDS * 1000:g}."
        )
    return seconds
