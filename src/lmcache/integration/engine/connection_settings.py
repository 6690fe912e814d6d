"""How an engine reaches its server: the settings that the connectors of all engines share."""

from __future__ import annotations

import difflib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.core.address import connect_endpoint, socket_path
from lmcache.core.limits import MAX_HEARTBEAT_SECONDS, MIN_HEARTBEAT_SECONDS
from lmcache.errors import ConfigError
from lmcache.transport.curve_keys import CurveFiles

log = logging.getLogger("lmcache.engine")

_PREFIX = "lmcache."
_HOST, _PORT = "lmcache.mp.host", "lmcache.mp.port"
_HEARTBEAT = "lmcache.mp.heartbeat_interval"
_TRANSFER = "lmcache.mp.transfer_mode"
_CURVE_SERVER, _CURVE_CLIENT = "lmcache.mp.curve_server_key_file", "lmcache.mp.curve_client_key_file"
CURVE_KEYS = (_CURVE_SERVER, _CURVE_CLIENT)
_KEYS = (*CURVE_KEYS, _HOST, _PORT, _HEARTBEAT, _TRANSFER)
DEFAULT_HEARTBEAT_SECONDS = 10.0
Default = TypeVar("Default")


@dataclass(frozen=True)
class ConnectionSettings:
    """Times are seconds. `curve` names the files of keys, None where the server asks for none."""

    url: str = "tcp://127.0.0.1:5555"
    heartbeat_interval_seconds: float = DEFAULT_HEARTBEAT_SECONDS
    transfer_mode: WantedTransfer = WantedTransfer.AUTO
    curve: CurveFiles | None = None

    def client(
        self,
        on_new_server: Callable[[Client], None] | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
        *,
        quiet_start: bool = False,
    ) -> Client:
        """A client with these settings, not started."""
        return Client(
            self.url,
            environment=environment,
            heartbeat_interval_seconds=self.heartbeat_interval_seconds,
            transfer=self.transfer_mode,
            on_new_server=on_new_server,
            curve=self.curve,
            quiet_start=quiet_start,
        )


def read_connection(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ConnectionSettings` that these keys say. ConfigError names the key and what it may be."""
    try:
        transfer_mode = WantedTransfer(extra.get(_TRANSFER, WantedTransfer.AUTO))
    except ValueError:
        allowed = ", ".join(mode.value for mode in WantedTransfer)
        raise ConfigError(f"{_TRANSFER} is {extra[_TRANSFER]!r}; it must be one of {allowed}.") from None
    return {
        "url": _url(extra),
        "heartbeat_interval_seconds": _heartbeat_seconds(extra),
        "transfer_mode": transfer_mode,
        "curve": _curve(extra),
    }


def warn_of_unknown_keys(extra: Iterable[str], option: str, own_keys: tuple[str, ...]) -> None:
    """`option`: the engine's, that has them. `own_keys`: that mean something beside those of the connection."""
    known = (*_KEYS, *own_keys)
    for key in extra:
        if key.startswith(_PREFIX) and key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}."
            log.warning("%s has a key that means nothing here: %s%s", option, key, hint)


def _url(extra: Mapping[str, Any]) -> str:
    host, port = extra.get(_HOST, "tcp://localhost"), extra.get(_PORT, 5555)
    if not isinstance(host, str):
        raise ConfigError(f"{_HOST} is {host!r}; it must be text, such as tcp://127.0.0.1.")
    if not str(port).isdecimal():
        raise ConfigError(f"{_PORT} is {port!r}; it must be a port from 1 to 65535.")
    url = connect_endpoint(host, int(port))
    if _PORT in extra and not socket_path(url) and not url.endswith(f":{int(port)}"):
        raise ConfigError(f"{_HOST} is {host} and {_PORT} is {port}: two different ports; give the port once.")
    return url


def _curve(extra: Mapping[str, Any]) -> CurveFiles | None:
    given = [key for key in CURVE_KEYS if extra.get(key)]
    if not given:
        return None
    if len(given) == 1:
        raise ConfigError(
            f"{given[0]} needs the other of {_CURVE_SERVER} (the server's public key) and {_CURVE_CLIENT} (this "
            "engine's secret key)."
        )
    files = CurveFiles(str(extra[_CURVE_SERVER]), str(extra[_CURVE_CLIENT]))
    files.read()  # refused at the start, not with the first connection
    return files


def read_seconds(
    extra: Mapping[str, Any], key: str, default: Default, most_seconds: float = sys.float_info.max
) -> float | Default:
    """Of more than `most_seconds`, which a warning names, these count."""
    if key not in extra:
        return default
    seconds = _number(extra[key])
    if not 0 < seconds <= sys.float_info.max:
        raise ConfigError(f"{key} is {extra[key]!r}; it must be a number of seconds above 0.")
    if seconds > most_seconds:
        log.warning("%s is %g; %g seconds count, more is not waited", key, seconds, most_seconds)
    return min(seconds, most_seconds)


def _heartbeat_seconds(extra: Mapping[str, Any]) -> float:
    seconds = _number(extra.get(_HEARTBEAT, DEFAULT_HEARTBEAT_SECONDS))
    if not MIN_HEARTBEAT_SECONDS <= seconds <= MAX_HEARTBEAT_SECONDS:
        raise ConfigError(
            f"{_HEARTBEAT} is {extra[_HEARTBEAT]!r}; it must be from {MIN_HEARTBEAT_SECONDS:g} to "
            f"{MAX_HEARTBEAT_SECONDS:g} seconds."
        )
    return seconds


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_flag(extra: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = extra.get(key, default)
    known = {True: True, False: False, "true": True, "false": False}
    wanted = known.get(value.lower() if isinstance(value, str) else value) if isinstance(value, (bool, str)) else None
    if wanted is None:
        raise ConfigError(f"{key} is {value!r}; it must be true or false.")
    return wanted
