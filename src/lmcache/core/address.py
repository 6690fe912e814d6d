"""Parses hosts and URLs into endpoints to listen at or to connect to: `tcp://host:port` or `ipc:///path`."""

from __future__ import annotations

import ipaddress
import os
import re
from functools import lru_cache

from lmcache.errors import ConfigError

LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ("0.0.0.0", "::")  # to listen at
MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), without its end
INSTANCE_ID_PATTERN = r"^[^/\s\x00-\x1f]{0,512}\Z"  # of a server in a fleet: it is a part of paths
# Where others reach a server of a fleet.
REACHED_HOST_PATTERN = r"^([A-Za-z0-9._-]{1,253}|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[A-Za-z0-9._:%-]{0,253})\Z"
_IPC = "ipc"
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")  # a name or IPv4 address, an IPv6 address


def listening_host(host: str) -> str:
    """`host` is what --host takes, in canonical form: a host name or an address, or ipc:// and a path. ConfigError
    names the rule that it breaks."""
    scheme, rest = _scheme(host)
    if scheme == _IPC:
        return f"ipc://{_socket_path(f'--host {host}', rest)}"
    if scheme != "tcp" or not _is_name(rest):
        raise ConfigError(f"--host must be a host name, an address, or ipc:// and a path, got {host!r}.")
    return _without_port("--host", "--port", rest)


def http_listening_host(host: str) -> str:
    """The same for --http-host, which takes no path."""
    if not _is_name(host):
        raise ConfigError(f"--http-host must be a host name or an address, got {host!r}.")
    return _without_port("--http-host", "--http-port", host)


def refuse_unreachable(host: str) -> None:
    """`host`: where others reach this machine, a host name or an address without port and brackets. ValueError has the
    end of a sentence."""
    try:
        address = ipaddress.ip_address(host)
        is_reached = not (getattr(address, "ipv4_mapped", None) or address).is_unspecified
    except ValueError:
        is_reached = re.search("[^0-9.]", host) is not None and ":" not in host
    if not is_reached or not re.match(REACHED_HOST_PATTERN, host):
        port = "; leave the port out: it is that of --http-port"
        has_port = re.fullmatch(r"(\[.*\]|[^:]+):[0-9]*", host) is not None
        raise ValueError(
            "must be a host name or an address that others reach, of at most 253 characters, got "
            f"{host!r}{port * has_port}"
        )


def connect_endpoint(url: str, port: int | None = None) -> str:
    """`tcp://host:port`, `host:port`, or a host with `port` given apart, in canonical form; or `ipc://` and an absolute
    path, which has no port."""
    scheme, rest = _scheme(url)
    if scheme == _IPC:
        return f"ipc://{_socket_path(f'The server address {url}', rest)}"
    if scheme != "tcp":
        raise ConfigError(f"The server address {url!r} has scheme {scheme!r}; use tcp:// or ipc://.")
    host, written_port = _split(rest.rstrip("/"))
    if written_port:
        if not written_port.isdecimal():
            raise ConfigError(f"The server address {url!r} ends in {written_port!r}, which is not a port.")
        port = int(written_port)
    if not host or port is None or not 0 < port < 65536:
        raise ConfigError(f"The server address {url!r} needs a host and a port from 1 to 65535.")
    if not _HOST.fullmatch(host):
        raise ConfigError(f"The server address {url!r} has the host {host!r}, which is neither a name nor an address.")
    return tcp_endpoint(LOOPBACK if host == "localhost" else host, port)


def host_and_port(subject: str, text: str) -> tuple[str, int]:
    """Reads HOST:PORT or tcp://HOST:PORT. ConfigError begins with `subject`."""
    scheme, rest = _scheme(text.strip())
    host, port = _split(rest)
    if scheme != "tcp" or not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{subject} must be HOST:PORT with a port from 1 to 65535, got {text!r}.")
    return (LOOPBACK if host == "localhost" else host), int(port)


def host_port(host: str, port: int) -> str:
    """Returns HOST:PORT as `host_and_port` takes it."""
    return f"{_bracketed(host)}:{port}"


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp://{_bracketed(host)}:{port}"


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    return f"http{'s' * tls}://{_bracketed(host)}:{port}"


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def socket_endpoint(subject: str, endpoint: str) -> str:
    """An ipc endpoint as it was given. ConfigError begins with `subject`."""
    return f"ipc://{_socket_path(subject, _scheme(endpoint)[1])}"


def socket_path(endpoint: str) -> str:
    """The path of an ipc endpoint; "" for others."""
    scheme, rest = _scheme(endpoint)
    return rest if scheme == _IPC else ""


def _scheme(address: str) -> tuple[str, str]:
    scheme, separator, rest = address.partition("://")
    return (scheme, rest) if separator else ("tcp", address)


def _socket_path(subject: str, path: str) -> str:
    """The path of a Unix socket. Engine and server may run in other folders, so it begins at the root."""
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(f"{subject} must name the path of a socket from the root on, like ipc:///run/lmcache.sock.")
    size_bytes = len(os.fsencode(path))
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{subject} has a path of {size_bytes} bytes; the path of a socket has at most {MAX_SOCKET_PATH_BYTES}: "
            "choose a shorter one."
        )
    return path


def _is_name(host: str) -> bool:
    return bool(host) and "/" not in host and not any(letter.isspace() for letter in host)


def _without_port(host_flag: str, port_flag: str, given: str) -> str:
    host, port = _split(given)
    if port:
        raise ConfigError(f"{host_flag} {given} names a port: write {host_flag} {host} {port_flag} {port}.")
    return host


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
