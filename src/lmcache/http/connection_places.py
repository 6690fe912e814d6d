"""Places for the connections of the HTTP ports: how many there may be, and which one gives way."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from typing import Any


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

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._connections.take(connection, str(address[0]))
        return connection, address
