"""Turns what people write as host and port into what ZMQ binds and connects."""

from __future__ import annotations

from lmcache.errors import ConfigError

LOOPBACK = "127.0.0.1"


def bind_endpoint(host: str, port: int) -> str:
    """`localhost` means the loopback interface, never more. Port 0 lets the kernel choose."""
    return f"tcp://{_bracketed(LOOPBACK if host in ('', 'localhost') else host)}:{port or '*'}"


def connect_endpoint(url: str, port: int | None = None) -> str:
    """`tcp://host:port`, `host:port`, or a host with `port` given apart, in canonical form."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "tcp", url
    if scheme != "tcp":
        raise ConfigError(f"The server address {url!r} has scheme {scheme!r}; only tcp:// is supported.")
    host, written_port = _split(rest.rstrip("/"))
    if written_port:
        if not written_port.isdecimal():
            raise ConfigError(f"The server address {url!r} ends in {written_port!r}, which is not a port.")
        port = int(written_port)
    if not host or port is None or not 0 < port < 65536:
        raise ConfigError(f"The server address {url!r} needs a host and a port from 1 to 65535.")
    return f"tcp://{_bracketed(LOOPBACK if host == 'localhost' else host)}:{port}"


def _split(rest: str) -> tuple[str, str]:
    if rest.startswith("["):
        host, _, tail = rest[1:].partition("]")
        return host, tail.removeprefix(":")
    if rest.count(":") > 1:  # an IPv6 address without brackets has no port
        return rest, ""
    host, _, port = rest.partition(":")
    return host, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
