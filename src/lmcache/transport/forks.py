"""Sockets that a forked child lets go at once. It would keep the port taken, and every connection open, for as long as
it runs: also when the server has been stopped or killed."""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_for_children(sock: socket.socket) -> socket.socket:
    _sockets.add(sock)
    return sock


def _let_go_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_let_go_in_child)
