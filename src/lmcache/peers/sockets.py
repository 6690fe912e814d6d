"""Messages over one socket that does not block, on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from lmcache.core import limits
from lmcache.errors import ProtocolError
from lmcache.peers.protocol import HEADER, Kind, M, Message, Refused, decode, decode_header, encode
from lmcache.transport.forks import not_for_children

T = TypeVar("T")
Endpoint = tuple[int, Any]  # a family of addresses, and an address of it as sockets have it


class PeerSocket:
    """Belongs to one loop. Faults are OSError, EOFError (the other side has closed) and ProtocolError. Every call is to
    be made under a deadline of the caller."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _end_when_vanished(sock, limits.PEER_VANISHED_SECONDS)
        self._socket = not_for_children(sock)
        self._most_body_bytes = limits.MAX_PEER_HELLO_BYTES

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def endpoint(self) -> Endpoint | None:
        """The other side's, None for one that has gone."""
        try:
            return self._socket.family, self._socket.getpeername()
        except OSError:
            return None

    @property
    def host(self) -> str:
        """The other side's address, "" for one that has gone."""
        endpoint = self.endpoint
        return str(endpoint[1][0]) if endpoint is not None else ""

    def handshake_ended(self) -> None:
        """Larger messages may come."""
        self._most_body_bytes = limits.MAX_PEER_MESSAGE_BYTES

    async def send(self, kind: Kind, number: int, message: Message) -> None:
        await self.send_packed(encode(kind, number, message))

    async def send_packed(self, content: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def receive(self) -> tuple[Kind, int, bytes]:
        """(kind, number of the request, body)."""
        kind, number, body_bytes = decode_header(await self._exactly(HEADER.size), self._most_body_bytes)
        return kind, number, await self._exactly(body_bytes)

    async def expect(self, kind: Kind, number: int, of: type[M]) -> M:
        """The message of that kind. ProtocolError for another one; it has the sentence of a refusal."""
        found, answered, body = await self.receive()
        if found is Kind.REFUSED:
            raise PeerRefused(decode(body, Refused).sentence)
        if (found, answered) != (kind, number):
            raise ProtocolError(f"it sent {found.name} where {kind.name} was expected")
        return decode(body, of)

    async def refuse(self, number: int, sentence: str) -> None:
        """Says why the connection ends, if the other side takes it."""
        with contextlib.suppress(OSError):
            await self.send(Kind.REFUSED, number, Refused(sentence[:500]))

    async def _exactly(self, size_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        memory = bytearray(size_bytes)
        view, done = memoryview(memory), 0
        while done < size_bytes:
            came = await loop.sock_recv_into(self._socket, view[done:])
            if not came:
                raise EOFError("it closed the connection")
            done += came
        return bytes(memory)

    def cut(self) -> None:
        """Ends whatever waits on the socket, native calls too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nothing uses it any more. Idempotent."""
        self._socket.close()


def _end_when_vanished(sock: socket.socket, seconds: int) -> None:
    """A machine that lost its power closes nothing. Probes find that out while nothing is under way; while sent bytes
    are unconfirmed the system probes nothing, and their own timeout counts."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 10))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


class PeerRefused(ProtocolError):
    """The other side said why it does not serve this one."""


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns. asyncio.TimeoutError when it does not end in time; it has then been cancelled, and has ended."""
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            raise asyncio.TimeoutError
    return task.result()
