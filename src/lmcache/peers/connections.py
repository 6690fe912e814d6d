"""Connections of this server to one other: one for lookups, pipelined, and some for reads, one read at a time each."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from itertools import count

from lmcache.core import limits
from lmcache.core.address import host_port
from lmcache.errors import ProtocolError
from lmcache.l2.background import in_thread, spawn
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.protocol import Found, Kind, Lookup, Message, Refused, decode
from lmcache.peers.sockets import PeerRefused, PeerSocket, within


async def connect(host: str, port: int, introducer: Introducer) -> tuple[PeerSocket, Identity]:
    """Within PEER_HELLO_SECONDS, else asyncio.TimeoutError. OSError, EOFError, ProtocolError; PeerRefused where the two
    servers cannot work together."""
    return await within(limits.PEER_HELLO_SECONDS, _connect(host, port, introducer))


async def _connect(host: str, port: int, introducer: Introducer) -> tuple[PeerSocket, Identity]:
    try:
        found = await in_thread("peer-name", lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except UnicodeError:  # a name that there cannot be
        raise OSError(errno.EINVAL, f"{host} is no name of a host") from None
    family, kind, protocol, _, address = found[0]
    sock = PeerSocket(raw := socket.socket(family, kind, protocol))
    try:
        await asyncio.get_running_loop().sock_connect(raw, address)
        return sock, await introducer.connect(sock, host_port(host, port))
    except PeerRefused as refusal:
        await sock.refuse(0, str(refusal))  # for the log of the other side
        sock.close()
        raise
    except BaseException:
        sock.close()
        raise


class LookupConnection:
    """Answers may come in another order than the lookups: one may wait for chunks that are being stored."""

    def __init__(self, sock: PeerSocket, on_end: Callable[[BaseException | None], None]) -> None:
        """`on_end` is called once, with what ended it; None for `close`."""
        self._sock = sock
        self._on_end = on_end
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Found]] = {}
        self._sending = asyncio.Lock()
        self._fault: BaseException | None = None
        self._reader = spawn(self._read(), "peer-answers")

    @property
    def unanswered(self) -> int:
        return len(self._waiting)

    async def lookup(self, lookup: Lookup) -> Found:
        """OSError, EOFError, ProtocolError when the connection ends first."""
        number = next(self._numbers) & 0xFFFFFFFF
        answer: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with self._sending:
                await self._sock.send(Kind.LOOKUP, number, lookup)
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def tell(self, kind: Kind, message: Message) -> None:
        """What has no answer."""
        async with self._sending:
            await self._sock.send(kind, next(self._numbers) & 0xFFFFFFFF, message)

    async def _read(self) -> None:
        fault: BaseException | None = None
        try:
            while True:
                kind, number, body = await self._sock.receive()
                if kind is Kind.REFUSED:
                    raise PeerRefused(decode(body, Refused).sentence)
                if kind is not Kind.FOUND or (answer := self._waiting.get(number)) is None:
                    raise ProtocolError(f"it sent {kind.name} that nobody asked for")
                found = decode(body, Found)
                del self._waiting[number]
                if not answer.done():
                    answer.set_result(found)
                await asyncio.sleep(0)  # what has arrived already is received without a turn of anybody else
        except (OSError, EOFError, ProtocolError) as error:
            fault = error
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(fault or EOFError("the connection was closed"))
            self._sock.cut()
            self._sock.close()
            self._on_end(fault)

    async def close(self) -> None:
        """Idempotent."""
        self._sock.cut()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class ReadConnections:
    """At most MAX_PEER_LOADS, made when they are needed. Idle ones are kept."""

    def __init__(self, open_one: Callable[[], Awaitable[PeerSocket]]) -> None:
        self._open_one = open_one
        self._free = asyncio.Semaphore(limits.MAX_PEER_LOADS)
        self._idle: list[PeerSocket] = []
        self._used: set[PeerSocket] = set()

    async def take(self) -> PeerSocket:
        """To be given back, or dropped. The faults of `connect`."""
        await self._free.acquire()
        try:
            sock = self._idle.pop() if self._idle else await self._open_one()
        except BaseException:
            self._free.release()
            raise
        self._used.add(sock)
        return sock

    def give_back(self, sock: PeerSocket) -> None:
        self._used.discard(sock)
        self._idle.append(sock)
        self._free.release()

    def drop(self, sock: PeerSocket) -> None:
        """Instead of `give_back`, when nothing uses it any more: what comes next on it is not known."""
        self._used.discard(sock)
        sock.cut()
        sock.close()
        self._free.release()

    def forget_idle(self) -> None:
        """They lead to a server that has ended."""
        while self._idle:
            self._idle.pop().close()

    def cut(self) -> None:
        """Ends what is under way; whoever began it drops its connection."""
        self.forget_idle()
        for sock in self._used:
            sock.cut()
