"""Places for the connections of the HTTP ports: how many there may be, and which one gives way."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from typing import Any

_ACCEPTED_AT_ONCE = 16  # in a turn of the loop: what lost its place has its descriptor until a later one


class ConnectionPlaces:
    """Used by one thread. Where every place is taken, the address that has most of them loses its oldest connection:
    nobody keeps others out by opening many, nor by never ending the handshake of TLS, which uvicorn does not see."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken: list[tuple[str, socket.socket]] = []  # oldest first; some may have been closed already

    def take(self, connection: socket.socket, host: str) -> None:
        self._taken.append((host, connection))
        if len(self._taken) <= self._places:
            return
        self._taken = [taken for taken in self._taken if taken[1].fileno() >= 0]
        while len(self._taken) > self._places:
            ((busiest, _),) = Counter(host for host, _ in self._taken).most_common(1)
            index = next(index for index, (host, _) in enumerate(self._taken) if host == busiest)
            _, oldest = self._taken.pop(index)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # closed by asyncio, which owns it


class LimitedListener(socket.socket):
    """Takes over a listening socket; what it accepts takes a place."""

    def __init__(self, listening: socket.socket, places: ConnectionPlaces) -> None:
        super().__init__(fileno=listening.detach())
        self._connections = places
        self._accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """BlockingIOError, as if nobody waited, after some: asyncio comes again in its next turn."""
        if self._accepted == _ACCEPTED_AT_ONCE:
            self._accepted = 0
            raise BlockingIOError
        connection, address = super().accept()
        self._accepted += 1
        self._connections.take(connection, str(address[0]))
        return connection, address
