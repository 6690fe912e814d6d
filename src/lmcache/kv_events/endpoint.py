"""Where KV events go: `--kv-events-endpoint` and `--kv-events-replay-endpoint`."""

from __future__ import annotations

import socket
from typing import NamedTuple

from lmcache.core.address import (
    EVERY_ADDRESS,
    host_and_port,
    is_loopback,
    socket_endpoint,
    socket_path,
    tcp_endpoint,
)
from lmcache.errors import ConfigError


class Endpoint(NamedTuple):
    """`binds`: subscribers connect to this server; else it connects to a subscriber that listens there. `is_open`:
    other hosts may connect. `is_own`: an address of this host by which other hosts reach it."""

    address: str
    binds: bool
    is_open: bool
    is_own: bool = False


def parse_endpoint(text: str, flag: str) -> Endpoint:
    """ConfigError. Every address, loopback and a path are bound; all else is connected to, own addresses too: a
    subscriber may listen there."""
    if socket_path(text):
        return Endpoint(socket_endpoint(f"{flag} {text}", text), binds=True, is_open=False)
    try:
        host, port = host_and_port(flag, text.replace("://*:", "://0.0.0.0:", 1))
    except ConfigError:
        raise ConfigError(
            f"{flag} must be tcp://*:PORT or tcp://HOST:PORT with a port from 1 to 65535, or ipc:///PATH, got {text!r}."
        ) from None
    is_open = host in EVERY_ADDRESS
    binds = is_open or is_loopback(host)
    return Endpoint(tcp_endpoint(host, port), binds, is_open, is_own=not binds and _is_own(host))


def parse_replay_endpoint(text: str, flag: str) -> Endpoint:
    """Where subscribers connect to this server: own addresses are bound. ConfigError."""
    endpoint = parse_endpoint(text, flag)
    if endpoint.is_own:
        return endpoint._replace(binds=True, is_open=True)
    if not endpoint.binds:
        raise ConfigError(
            f"{flag} {text} is no address of this host: give tcp://*:PORT, an address of this host, or ipc:///PATH."
        )
    return endpoint


def _is_own(host: str) -> bool:
    """Whether packets from here to that address would have it as their source. Names are not resolved. A socket that
    can be bound to it is no proof: the kernel may allow that for every address (ip_nonlocal_bind)."""
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return bool(probe.getsockname()[0] == address[0])
    except (OSError, UnicodeError):
        return False
