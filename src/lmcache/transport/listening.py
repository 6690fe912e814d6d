"""Listening sockets of the server."""

from __future__ import annotations

import errno
import socket

from lmcache.errors import ResourceError
from lmcache.transport.address import LOOPBACK

_BACKLOG = 128


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
        listening = socket.socket(family, kind, protocol)
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
