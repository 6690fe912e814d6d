"""Turns what people write as host and port into what ZMQ connects."""

from __future__ import annotations

from lmcache.errors import ConfigError

LOOPBACK = "127.0.0.1"


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp://{_bracketed(host)}:{port}"


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
    return tcp_endpoint(LOOPBACK if host == "localhost" else host, port)


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
