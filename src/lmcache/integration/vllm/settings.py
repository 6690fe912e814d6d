"""What `kv_connector_extra_config` says."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.lookup_client import LOOKUP_SECONDS
from lmcache.core.key import SERDE_NAME
from lmcache.core.limits import MAX_HANDOVER_WAIT_SECONDS
from lmcache.errors import ConfigError
from lmcache.integration.engine.connection_settings import (
    CURVE_KEYS,
    ConnectionSettings,
    read_connection,
    read_flag,
    read_seconds,
    warn_of_unknown_keys,
)
from lmcache.integration.engine.server_order import PRIVATE_FLAGS, ServerOrder, autostart_order, split_options
from lmcache.integration.vllm.handover import HANDOVER_SECONDS
from lmcache.transport.curve_keys import CurveFiles

log = logging.getLogger("lmcache.vllm")

_TIMEOUT = "lmcache.mp.mq_timeout"
_SAVE_DECODE = "lmcache.mp.save_decode_cache"
_LOAD_OR_RECOMPUTE = "lmcache.mp.load_or_recompute"
_LOSSY_SERDE = "lmcache.mp.lossy_serde"
_LOOKUP_TIMEOUT = "lmcache.mp.lookup_timeout"
_HANDOVER_TIMEOUT = "lmcache.mp.handover_timeout"
_AUTOSTART = "lmcache.mp.autostart"
_SERVER_ARGS, _KEEP = "lmcache.mp.autostart.server_args", "lmcache.mp.autostart.keep"
_EVENTS_SHARED_L2 = "lmcache.mp.kv_events_shared_l2"
_WAIT_TIMEOUT = "lmcache.mp.autostart.wait_timeout"
_KEYS = (
    *(_TIMEOUT, _SAVE_DECODE, _LOAD_OR_RECOMPUTE, _LOSSY_SERDE, _LOOKUP_TIMEOUT),
    *(_EVENTS_SHARED_L2, _HANDOVER_TIMEOUT),
    *(_AUTOSTART, _SERVER_ARGS, _WAIT_TIMEOUT, _KEEP),
)
SHORT_START_SECONDS = 3.0
DEFAULT_WAIT_SECONDS = 90.0


@dataclass(frozen=True)
class ConnectorSettings(ConnectionSettings):
    """The keys `lmcache.*` of `kv_connector_extra_config`, checked. docs/how-to/connect_vllm.md lists them.

    Shapes and units: one value a key; times are seconds. `mq_timeout_seconds` is None unless it was given: then a start
    waits so long for the server, and fails without. Otherwise it waits `SHORT_START_SECONDS`, and the engine runs
    uncached until a server is there. `lossy_serde` is the name of the lossy serde whose outcome this engine accepts, ""
    where it must be given exact KV. `curve` names the files of keys, None where the server asks for none. `autostart`
    is the server that the engine starts where none answers, None where it starts none.

    Errors: ConfigError from `read` names the key and what it may be. A key that is not known is a warning, with the
    nearest known name.

    Example:

    >>> from lmcache.integration.vllm.settings import ConnectorSettings
    >>> settings = ConnectorSettings.read({"lmcache.mp.host": "tcp://10.0.0.7", "lmcache.mp.port": 5556})
    >>> settings.url, settings.heartbeat_interval_seconds
    ('tcp://10.0.0.7:5556', 10.0)
    >>> ConnectorSettings.read({"lmcache.mp.heartbeat_interval": 0})
    Traceback (most recent call last):
    ...
    lmcache.errors.ConfigError: lmcache.mp.heartbeat_interval is 0; it must be from 0.05 to 3600 seconds.
    """

    mq_timeout_seconds: float | None = None
    save_decode_cache: bool = False
    load_or_recompute: bool = True
    lossy_serde: str = ""
    autostart: ServerOrder | None = None
    wait_timeout_seconds: float = DEFAULT_WAIT_SECONDS
    lookup_timeout_seconds: float = LOOKUP_SECONDS
    handover_timeout_seconds: float = HANDOVER_SECONDS
    events_shared_l2: bool = False

    def client(
        self,
        on_new_server: Callable[[Client], None] | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
        *,
        quiet_start: bool = False,
    ) -> Client:
        """A client with these settings, not started."""
        return super().client(on_new_server, environment, quiet_start=quiet_start or self.autostart is not None)

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, has_own_server: bool = False) -> ConnectorSettings:
        """ConfigError names the key and what it may be. `has_own_server`: one is started, whatever `autostart` says."""
        warn_of_unknown_keys(extra, "kv_connector_extra_config", _KEYS)
        connection = read_connection(extra)
        url, curve = connection["url"], connection["curve"]
        starts = read_flag(extra, _AUTOSTART, default=False)
        for key in (_SERVER_ARGS, _KEEP, _WAIT_TIMEOUT):
            if extra.get(key) and not (starts or has_own_server):
                log.warning("%s has no effect, as %s is not true", key, _AUTOSTART)
        return cls(
            **connection,
            mq_timeout_seconds=read_seconds(extra, _TIMEOUT, None),
            save_decode_cache=read_flag(extra, _SAVE_DECODE, default=False),
            load_or_recompute=read_flag(extra, _LOAD_OR_RECOMPUTE, default=True),
            lossy_serde=_lossy_serde(extra),
            autostart=_autostart(extra, url, curve) if starts else None,
            wait_timeout_seconds=read_seconds(extra, _WAIT_TIMEOUT, DEFAULT_WAIT_SECONDS),
            lookup_timeout_seconds=read_seconds(extra, _LOOKUP_TIMEOUT, LOOKUP_SECONDS),
            handover_timeout_seconds=read_seconds(
                extra, _HANDOVER_TIMEOUT, HANDOVER_SECONDS, MAX_HANDOVER_WAIT_SECONDS
            ),
            events_shared_l2=read_flag(extra, _EVENTS_SHARED_L2, default=False),
        )


def _lossy_serde(extra: Mapping[str, Any]) -> str:
    name = extra.get(_LOSSY_SERDE, "")
    if name != "" and not (isinstance(name, str) and SERDE_NAME.fullmatch(name)):
        raise ConfigError(
            f"{_LOSSY_SERDE} is {name!r}; it must be the name of a lossy serde of the server, such as fp8."
        )
    return str(name)


def private_server_options(extra: Mapping[str, Any]) -> list[str]:
    """Options for a server that no other engine reaches. ConfigError names the key that cannot be had for it."""
    if not read_flag(extra, _AUTOSTART, default=True):
        raise ConfigError(f"{_AUTOSTART} is false, and nothing names a server: name one by mp_host, or leave it out.")
    if read_flag(extra, _KEEP, default=False):
        raise ConfigError(
            f"{_KEEP} is true, and no later engine reaches a server that has a socket of its own: use "
            f"LMCacheMPConnector with {_AUTOSTART}, or keep KV in local_disk."
        )
    for key in CURVE_KEYS:
        if extra.get(key):
            raise ConfigError(f"{key} is given, and nothing names a server that asks for a key: name one by mp_host.")
    with _of_server_args():
        return split_options(_server_args(extra), PRIVATE_FLAGS)


def without_autostart(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that mean the same, whoever starts the server and where."""
    return {key: value for key, value in extra.items() if key not in (_AUTOSTART, _SERVER_ARGS, _KEEP)}


def _server_args(extra: Mapping[str, Any]) -> str | list[Any]:
    arguments = extra.get(_SERVER_ARGS, [])
    if not isinstance(arguments, (str, list)):
        raise ConfigError(f"{_SERVER_ARGS} is {arguments!r}; it must be text or a list, such as '--l1-size-gb 20'.")
    return arguments


def _autostart(extra: Mapping[str, Any], url: str, curve: CurveFiles | None) -> ServerOrder:
    arguments, keep = _server_args(extra), read_flag(extra, _KEEP, default=False)
    with _of_server_args():
        return autostart_order(url, arguments, os.environ, keep=keep, curve=curve)


@contextlib.contextmanager
def _of_server_args() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{_SERVER_ARGS}: {problem}" for problem in error.problems)) from None
