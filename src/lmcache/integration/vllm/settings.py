"""What `kv_connector_extra_config` says."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.client.transfer import WantedTransfer
from lmcache.core.address import connect_endpoint, socket_path
from lmcache.errors import ConfigError

log = logging.getLogger("lmcache.vllm")

_PREFIX = "lmcache."
_HOST, _PORT = "lmcache.mp.host", "lmcache.mp.port"
_TIMEOUT, _HEARTBEAT = "lmcache.mp.mq_timeout", "lmcache.mp.heartbeat_interval"
_TRANSFER = "lmcache.mp.transfer_mode"
_SAVE_DECODE = "lmcache.mp.save_decode_cache"
_LOAD_OR_RECOMPUTE = "lmcache.mp.load_or_recompute"
SHORT_START_SECONDS = 3.0


@dataclass(frozen=True)
class ConnectorSettings:
    """`mq_timeout_seconds` is None unless it was written down: then start-up insists on the server, and fails past it.

    Otherwise start-up waits `SHORT_START_SECONDS` for a server and goes on without one until it appears.
    """

    url: str = "tcp://127.0.0.1:5555"
    mq_timeout_seconds: float | None = None
    heartbeat_interval_seconds: float = 10.0
    transfer_mode: WantedTransfer = WantedTransfer.AUTO
    save_decode_cache: bool = False
    load_or_recompute: bool = True

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """ConfigError names the key and what it may be."""
        known = (_HOST, _PORT, _TIMEOUT, _HEARTBEAT, _TRANSFER, _SAVE_DECODE, _LOAD_OR_RECOMPUTE)
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
        return cls(
            url=_url(extra),
            mq_timeout_seconds=_seconds(extra, _TIMEOUT) if _TIMEOUT in extra else None,
            heartbeat_interval_seconds=_seconds(extra, _HEARTBEAT) if _HEARTBEAT in extra else 10.0,
            transfer_mode=transfer_mode,
            save_decode_cache=_flag(extra, _SAVE_DECODE, default=False),
            load_or_recompute=_flag(extra, _LOAD_OR_RECOMPUTE, default=True),
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


def _seconds(extra: Mapping[str, Any], key: str) -> float:
    try:
        seconds = float(extra[key])
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{key} is {extra[key]!r}; it must be a number of seconds above 0.")
    return seconds


def _flag(extra: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = extra.get(key, default)
    known = {True: True, False: False, "true": True, "false": False}
    wanted = known.get(value.lower() if isinstance(value, str) else value) if isinstance(value, (bool, str)) else None
    if wanted is None:
        raise ConfigError(f"{key} is {value!r}; it must be true or false.")
    return wanted
