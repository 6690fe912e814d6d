"""Where KV events go: `--kv-events-endpoint` and `--kv-events-replay-endpoint`."""

from __future__ import annotations

import ipaddress
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
    other hosts may connect."""

    address: str
    binds: bool
    is_open: bool


def parse_endpoint(text: str, flag: str) -> Endpoint:
    """ConfigError. An address of this host is bound, another one, or a name that is not localhost, is connected to."""
    if socket_path(text):
        return Endpoint(socket_endpoint(f"{flag} {text}", text), binds=True, is_open=False)
    try:
        host, port = host_and_port(flag, text.replace("://*:", "://0.0.0.0:", 1))
    except ConfigError:
        raise ConfigError(f"{flag} must be tcp://*:PORT, tcp://HOST:PORT or ipc:///PATH, got {text!r}.") from None
    is_open = host in EVERY_ADDRESS or (not is_loopback(host) and _is_own(host))
    return Endpoint(tcp_endpoint(host, port), binds=is_open or is_loopback(host), is_open=is_open)


def parse_replay_endpoint(text: str, flag: str) -> Endpoint:
    """Where subscribers connect to this server. ConfigError."""
    endpoint = parse_endpoint(text, flag)
    if not endpoint.binds:
        raise ConfigError(
            f"{flag} {text} would be of another host, and subscribers connect to this one: give tcp://*:PORT, "
            "tcp://127.0.0.1:PORT or ipc:///PATH."
        )
    return endpoint


def _is_own(host: str) -> bool:
    """Whether it is an address of this host: one that a socket can be bound to."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((ipaddress.ip_address(host).compressed, 0))
    except (OSError, ValueError):
        return False
    return True
