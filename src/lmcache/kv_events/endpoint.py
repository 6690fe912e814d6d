"""Where KV events go: `--kv-events-endpoint` and `--kv-events-replay-endpoint`."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from lmcache.core.address import host_and_port, is_loopback, socket_endpoint, socket_path, tcp_endpoint

_ANY = ("0.0.0.0", "::")


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
    host, port = host_and_port(flag, text.replace("://*:", "://0.0.0.0:", 1))
    is_open = host in _ANY or (not is_loopback(host) and _is_own(host))
    return Endpoint(tcp_endpoint(host, port), binds=is_open or is_loopback(host), is_open=is_open)


def _is_own(host: str) -> bool:
    """Whether it is an address of this host: one that a socket can be bound to."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((ipaddress.ip_address(host).compressed, 0))
    except (OSError, ValueError):
        return False
    return True
