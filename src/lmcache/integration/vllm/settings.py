"""What `kv_connector_extra_config` says."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.lookup_client import LOOKUP_SECONDS
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.core.address import connect_endpoint, socket_path
from lmcache.core.key import SERDE_NAME
from lmcache.core.limits import MAX_HEARTBEAT_SECONDS, MIN_HEARTBEAT_SECONDS
from lmcache.errors import ConfigError
from lmcache.integration.engine.server_order import ServerOrder, autostart_order
from lmcache.transport.curve_keys import CurveFiles

log = logging.getLogger("lmcache.vllm")

_PREFIX = "lmcache."
_HOST, _PORT = "lmcache.mp.host", "lmcache.mp.port"
_TIMEOUT, _HEARTBEAT = "lmcache.mp.mq_timeout", "lmcache.mp.heartbeat_interval"
_TRANSFER = "lmcache.mp.transfer_mode"
_SAVE_DECODE = "lmcache.mp.save_decode_cache"
_LOAD_OR_RECOMPUTE = "lmcache.mp.load_or_recompute"
_LOSSY_SERDE = "lmcache.mp.lossy_serde"
_CURVE_SERVER, _CURVE_CLIENT = "lmcache.mp.curve_server_key_file", "lmcache.mp.curve_client_key_file"
_LOOKUP_TIMEOUT = "lmcache.mp.lookup_timeout"
_AUTOSTART = "lmcache.mp.autostart"
_SERVER_ARGS, _KEEP = "lmcache.mp.autostart.server_args", "lmcache.mp.autostart.keep"
_WAIT_TIMEOUT = "lmcache.mp.autostart.wait_timeout"
SHORT_START_SECONDS = 3.0
DEFAULT_WAIT_SECONDS = 90.0
DEFAULT_HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True)
class ConnectorSettings:
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

    url: str = "tcp://127.0.0.1:5555"
    mq_timeout_seconds: float | None = None
    heartbeat_interval_seconds: float = DEFAULT_HEARTBEAT_SECONDS
    transfer_mode: WantedTransfer = WantedTransfer.AUTO
    save_decode_cache: bool = False
    load_or_recompute: bool = True
    lossy_serde: str = ""
    curve: CurveFiles | None = None
    autostart: ServerOrder | None = None
    wait_timeout_seconds: float = DEFAULT_WAIT_SECONDS
    lookup_timeout_seconds: float = LOOKUP_SECONDS

    def client(
        self,
        on_new_server: Callable[[Client], None] | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> Client:
        """A client with these settings, not started."""
        return Client(
            self.url,
            environment=environment,
            heartbeat_interval_seconds=self.heartbeat_interval_seconds,
            transfer=self.transfer_mode,
            on_new_server=on_new_server,
            curve=self.curve,
            quiet_start=self.autostart is not None,
        )

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """ConfigError names the key and what it may be."""
        known: tuple[str, ...] = (
            _CURVE_SERVER,
            _CURVE_CLIENT,
            _HOST,
            _PORT,
            _TIMEOUT,
            _HEARTBEAT,
            _TRANSFER,
            _SAVE_DECODE,
            _LOAD_OR_RECOMPUTE,
            _LOSSY_SERDE,
            _LOOKUP_TIMEOUT,
            _AUTOSTART,
            _SERVER_ARGS,
            _WAIT_TIMEOUT,
            _KEEP,
        )
        for key in extra:
            if key.startswith(_PREFIX) and key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}."
                log.warning("kv_connector_extra_config has a key that means nothing here: %s%s", key, hint)
        try:
            transfer_mode = WantedTransfer(extra.get(_TRANSFER, WantedTransfer.AUTO))
        except ValueError:
            allowed = ", ".join(mode.value for mode in WantedTransfer)
            raise ConfigError(f"{_TRANSFER} is {extra[_TRANSFER]!r}; it must be one of {allowed}.") from None
        url, curve = _url(extra), _curve(extra)
        return cls(
            url=url,
            mq_timeout_seconds=_seconds(extra, _TIMEOUT) if _TIMEOUT in extra else None,
            heartbeat_interval_seconds=_heartbeat_seconds(extra),
            transfer_mode=transfer_mode,
            save_decode_cache=_flag(extra, _SAVE_DECODE, default=False),
            load_or_recompute=_flag(extra, _LOAD_OR_RECOMPUTE, default=True),
            lossy_serde=_lossy_serde(extra),
            curve=curve,
            autostart=_autostart(extra, url, curve) if _flag(extra, _AUTOSTART, default=False) else None,
            wait_timeout_seconds=_seconds(extra, _WAIT_TIMEOUT) if _WAIT_TIMEOUT in extra else DEFAULT_WAIT_SECONDS,
            lookup_timeout_seconds=_seconds(extra, _LOOKUP_TIMEOUT) if _LOOKUP_TIMEOUT in extra else LOOKUP_SECONDS,
        )


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


def _lossy_serde(extra: Mapping[str, Any]) -> str:
    name = extra.get(_LOSSY_SERDE, "")
    if name != "" and not (isinstance(name, str) and SERDE_NAME.fullmatch(name)):
        raise ConfigError(
            f"{_LOSSY_SERDE} is {name!r}; it must be the name of a lossy serde of the server, such as fp8."
        )
    return str(name)


def _curve(extra: Mapping[str, Any]) -> CurveFiles | None:
    given = [key for key in (_CURVE_SERVER, _CURVE_CLIENT) if extra.get(key)]
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


def _autostart(extra: Mapping[str, Any], url: str, curve: CurveFiles | None) -> ServerOrder:
    arguments = extra.get(_SERVER_ARGS, [])
    if not isinstance(arguments, (str, list)):
        raise ConfigError(f"{_SERVER_ARGS} is {arguments!r}; it must be text or a list, such as '--l1-size-gb 20'.")
    try:
        return autostart_order(url, arguments, os.environ, keep=_flag(extra, _KEEP, default=False), curve=curve)
    except ConfigError as error:
        raise ConfigError(*(f"{_SERVER_ARGS}: {problem}" for problem in error.problems)) from None


def _seconds(extra: Mapping[str, Any], key: str) -> float:
    seconds = _number(extra[key])
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{key} is {extra[key]!r}; it must be a number of seconds above 0.")
    return seconds


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


def _flag(extra: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = extra.get(key, default)
    known = {True: True, False: False, "true": True, "false": False}
    wanted = known.get(value.lower() if isinstance(value, str) else value) if isinstance(value, (bool, str)) else None
    if wanted is None:
        raise ConfigError(f"{key} is {value!r}; it must be true or false.")
    return wanted
