"""What `lmcache server` is started with for engines that own it, checked as the server itself would check it."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.config.load import draft, load
from lmcache.config.spec import ServerConfig
from lmcache.core.address import LOOPBACK, socket_path
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError, ResourceError
from lmcache.integration.engine.run_folder import run_folder_path
from lmcache.memory.hugepages import find_hugepages
from lmcache.memory.server_memory import DIRECTORY
from lmcache.stop_signals import CLOSE_SECONDS
from lmcache.transport.curve_keys import CurveFiles

_STOP_SECONDS = CLOSE_SECONDS + 5.0  # beside what it drains; it ends by itself before
_DEFAULTS = {"l1_size_gb": "5", "eviction_policy": "LRU"}  # of what a server itself insists on
_FREE_PORTS = {"http_port": "0", "prometheus_port": "0"}  # each address of a machine may have a server of its own
# In the environment of a worker, whose OpenMP library is preloaded: it would put the threads of the server on the CPU
# of one compute thread, which leaves them no time.
_PINS_THREADS = {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET", "OMP_PROC_BIND", "OMP_PLACES"}
_OWN_FLAGS = {
    "--host": "lmcache.mp.host says it",
    "--port": "lmcache.mp.port says it",
    "--http-host": "HTTP is for this machine alone",
}
_HTTP_KEYS = "internal_api_server_enabled, _host and _port_start say it"
PRIVATE_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("--host", "--port"), "the server of this engine has a socket of its own"),
    **dict.fromkeys(("--http-host", "--http-port", "--prometheus-port"), _HTTP_KEYS),
    **dict.fromkeys(("--disable-http", "--no-disable-http"), _HTTP_KEYS),
}


@dataclass(frozen=True)
class ServerOrder:
    """A server to start at `url`. `options`: of `lmcache server`, complete. `leftovers`: paths that it leaves when
    killed, which it is `stop_seconds` after it was told to end. `keep`: it stays when the last engine has gone.
    `curve`: the keys of who asks whether it is healthy."""

    url: str
    options: tuple[str, ...]
    environment: Mapping[str, str]
    leftovers: tuple[str, ...] = ()
    stop_seconds: float = _STOP_SECONDS
    keep: bool = False
    curve: CurveFiles | None = None

    @property
    def name(self) -> str:
        """The name of its files: the same for every engine that goes to `url`."""
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.url.rpartition("/")[2])
        return f"{readable[-40:]}-{hashlib.sha256(self.url.encode()).hexdigest()[:8]}"


def split_options(arguments: str | Sequence[str], refused: Mapping[str, str] = _OWN_FLAGS) -> list[str]:
    """Options of `lmcache server`, word by word. `refused`: flags, and why each must be left out. ConfigError names the
    first of them."""
    try:
        words = shlex.split(arguments) if isinstance(arguments, str) else [str(word) for word in arguments]
    except ValueError as error:
        reason = str(error).lower()
        raise ConfigError(f"{arguments!r} cannot be split into words, {reason}: give them as a list.") from None
    for word in words:
        flag = word.partition("=")[0]
        if flag in refused:
            raise ConfigError(f"{flag} must be left out: {refused[flag]}.")
    return words


def private_order(name: str, options: Sequence[str], environ: Mapping[str, str]) -> ServerOrder:
    """A server at a socket that only this user's processes reach, and by `name` alone. `options`: all but where it
    listens for engines, L1's size and its policy if need be. ConfigError lists every problem."""
    url = f"ipc://{run_folder_path() / name}.sock"
    options = _complete([*_address(url), *options], environ, _DEFAULTS)
    loaded = load(options, environ)
    if loaded.config.l1_persist and "shm_name" not in loaded.sources:
        raise ConfigError(
            f"{loaded.sources['l1_persist']} leaves memory that no later engine finds, as the server of this one goes "
            "by another name at each start: give a --shm-name, or keep KV in local_disk."
        )
    if loaded.config.zmq_curve_server_key_file:
        raise ConfigError(
            f"{loaded.sources['zmq_curve_server_key_file']} demands a key of engines, and a server with a socket of "
            "its own is for one that has none: leave both options of CURVE out."
        )
    return _order(options, environ, url=url)


def autostart_order(
    url: str,
    arguments: str | Sequence[str],
    environ: Mapping[str, str],
    *,
    keep: bool = False,
    curve: CurveFiles | None = None,
) -> ServerOrder:
    """`arguments`: options of `lmcache server` but the three that say where it listens, as one text or word by word. L1
    has 5 GB and LRU, and HTTP takes free ports, unless arguments, environment or file say otherwise. ConfigError lists
    every problem."""
    options = [*_address(url), "--http-host", LOOPBACK, *split_options(arguments)]
    options = _complete(options, environ, {**_DEFAULTS, **_FREE_PORTS})
    return _order(options, environ, url=url, keep=keep, curve=curve)


def _complete(options: list[str], environ: Mapping[str, str], defaults: Mapping[str, str]) -> list[str]:
    """With `defaults` of what is said nowhere."""
    given = draft(options, environ, Problems()).sources
    missing = [("--" + name.replace("_", "-"), value) for name, value in defaults.items() if name not in given]
    return [*options, *(word for option in missing for word in option)]


def _order(options: Sequence[str], environ: Mapping[str, str], **rest: Any) -> ServerOrder:
    config = load(options, environ).config
    return ServerOrder(
        options=tuple(options),
        environment={name: value for name, value in environ.items() if name not in _PINS_THREADS},
        leftovers=_leftovers(config),
        stop_seconds=config.drain_timeout_seconds + _STOP_SECONDS,
        **rest,
    )


def _address(url: str) -> list[str]:
    if socket_path(url):
        return ["--host", url]
    host, _, port = url.partition("://")[2].rpartition(":")
    return ["--host", host.strip("[]"), "--port", port]


def _leftovers(config: ServerConfig) -> tuple[str, ...]:
    paths = [socket_path(config.host)] * bool(socket_path(config.host))
    if not config.l1_persist:
        with contextlib.suppress(ResourceError):  # without huge pages the server does not start, and says why
            folder = find_hugepages().directory if config.l1_use_hugepages else DIRECTORY
            paths.append(str(folder / config.shm_name))
    return tuple(paths)
