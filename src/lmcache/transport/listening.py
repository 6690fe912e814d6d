"""Listening sockets of the server."""

from __future__ import annotations

import errno
import resource
import socket

from lmcache.clock import Clock
from lmcache.core.address import LOOPBACK, listening_host, socket_path, tcp_endpoint
from lmcache.core.limits import MAX_CONNECTIONS
from lmcache.errors import ResourceError
from lmcache.transport.forks import not_for_children
from lmcache.transport.socket_path import PathListener, refuse_unusable_path

_BACKLOG = MAX_CONNECTIONS  # all engines come at once, and wait here while L1 is prepared; the kernel may allow less
_ENGINE_FLAGS = "--port or --host"
_WANTED_FILE_DESCRIPTORS = 65_536


class EngineListener:
    """Where engines connect: a port, or the path of a Unix socket. ResourceError when it cannot be had."""

    def __init__(self, host: str, port: int, clock: Clock) -> None:
        """`host` is what --host takes."""
        path = socket_path(host)
        if path:
            at_path = PathListener(path, _BACKLOG, clock)
            self.socket, self._close = at_path.socket, at_path.close
            self.endpoint = host
            self.socket.setblocking(False)
            return
        self.socket = listen(listening_host(host), port, _ENGINE_FLAGS)
        self._close = self.socket.close
        self.endpoint = tcp_endpoint(*self.socket.getsockname()[:2])

    def close(self) -> None:
        self._close()


def refuse_unusable_for_engines(host: str, port: int) -> None:
    """ResourceError where nobody could listen at what --host says. Whether `port` is free, or the path a live server's,
    is seen when it is taken."""
    if path := socket_path(host):
        refuse_unusable_path(path)
    else:
        refuse_unusable(listening_host(host), port, _ENGINE_FLAGS)


def listen(host: str, port: int, flags: str) -> socket.socket:
    """A listening socket that does not block; port 0 lets the kernel choose. `localhost` means the loopback interface,
    never more. ResourceError, naming the `flags` to change, when it cannot be had."""
    listening = _bound(host, port, port, flags)
    listening.setblocking(False)
    return listening


def _bound(host: str, port: int, taken_port: int, flags: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            LOOPBACK if host in ("", "localhost") else host,
            taken_port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        listening = not_for_children(socket.socket(family, kind, protocol))
    except OSError as error:
        raise _refused(host, port, error, flags) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # here, so that a port in use is found before anything else starts
    except OSError as error:
        listening.close()
        raise _refused(host, port, error, flags) from None
    return listening


def refuse_unusable(host: str, port: int, flags: str) -> None:
    """ResourceError where no port of the host can be listened on: it is not this one, or not known. Whether `port` is
    free is seen when it is taken."""
    _bound(host, port, 0, flags).close()


def _refused(host: str, port: int, error: OSError, flags: str) -> ResourceError:
    reason = "it is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    return ResourceError(f"Cannot listen on {host}:{port} because {reason}; choose another {flags}.")


def raise_descriptor_limit() -> int:
    """Of this process: every connection takes one. How many it may have now; at least 65,536 stands for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILE_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
