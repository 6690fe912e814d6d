"""Connections of this server to one other: one for lookups, pipelined, and some for reads, one read at a time each."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, cast

from lmcache.core import limits
from lmcache.core.address import host_port
from lmcache.errors import ProtocolError
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.turns import Turns
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.protocol import Describe, Described, Found, Kind, Lookup, M, Message, Refused, decode
from lmcache.peers.sockets import Endpoint, PeerRefused, PeerSocket, within

_CLOSED = "the connections to it are closed"
_MOST_ADDRESSES = 4  # of one name, that are tried


async def connect(host: str, port: int, introducer: Introducer) -> tuple[PeerSocket, Identity]:
    """At the first address where the peer answers: a name may have one of IPv6 where the peer listens at another.
    Within PEER_HELLO_SECONDS, of which each address has its share, else asyncio.TimeoutError. OSError, EOFError,
    ProtocolError; PeerRefused where the two servers cannot work together."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.PEER_HELLO_SECONDS
    endpoints = await within(limits.PEER_HELLO_SECONDS, _endpoints(host, port))
    fault: Exception = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for left, endpoint in zip(range(len(endpoints), 0, -1), endpoints, strict=True):
        connecting = _connect_at(endpoint, host_port(host, port), introducer)
        try:
            return await within((deadline - loop.time()) / left, connecting)
        except (OSError, EOFError, ProtocolError, asyncio.TimeoutError) as error:
            if not isinstance(fault, PeerRefused):  # which says more than that nobody is at another address
                fault = error
    raise fault


async def connect_at(endpoint: Endpoint, address: str, introducer: Introducer) -> tuple[PeerSocket, Identity]:
    """As `connect`, to the peer at `address`, HOST:PORT, where it was reached before."""
    return await within(limits.PEER_HELLO_SECONDS, _connect_at(endpoint, address, introducer))


async def _connect_at(endpoint: Endpoint, address: str, introducer: Introducer) -> tuple[PeerSocket, Identity]:
    family, at = endpoint
    sock = PeerSocket(raw := socket.socket(family, socket.SOCK_STREAM))
    try:
        await asyncio.get_running_loop().sock_connect(raw, at)
        return sock, await introducer.connect(sock, address)
    except PeerRefused as refusal:
        await sock.refuse(0, str(refusal))  # for the log of the other side
        sock.close()
        raise
    except BaseException:
        sock.close()
        raise


async def _endpoints(host: str, port: int) -> list[Endpoint]:
    try:
        found = await in_thread("peer-name", lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except UnicodeError:  # a name that there cannot be
        raise OSError(errno.EINVAL, f"{host} is no name of a host") from None
    return [(family, address) for family, _, _, _, address in found[:_MOST_ADDRESSES]]


class LookupConnection:
    """Answers may come in another order than the lookups: one may wait for chunks that are being stored."""

    def __init__(self, sock: PeerSocket, on_end: Callable[[BaseException | None], None]) -> None:
        """`on_end` is called once, with what ended it; None for `close`."""
        self._sock = sock
        self._on_end = on_end
        self._numbers = count(1)
        self._waiting: dict[int, tuple[Kind, type[Message], asyncio.Future[Message]]] = {}
        self._sending = asyncio.Lock()
        self._fault: BaseException | None = None
        self._reader = spawn(self._read(), "peer-answers")

    @property
    def unanswered(self) -> int:
        return sum(not answer.done() for _, _, answer in self._waiting.values())

    async def lookup(self, lookup: Lookup) -> Found:
        """OSError, EOFError, ProtocolError when the connection ends first."""
        return await self._ask(Kind.LOOKUP, lookup, Kind.FOUND, Found)

    async def describe(self, engine: str) -> bytes:
        """The region of the other side for that transfer engine. As `lookup`."""
        return (await self._ask(Kind.DESCRIBE, Describe(engine), Kind.REGION, Described)).region

    async def _ask(self, kind: Kind, question: Message, answered: Kind, of: type[M]) -> M:
        number = next(self._numbers) & 0xFFFFFFFF
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered, of, answer
        try:
            async with self._sending:
                await self._sock.send(kind, number, question)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return cast("M", await answer)  # who gives up leaves it in `_waiting`: the answer may come later

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
                answered, of, answer = self._waiting.get(number, (None, None, None))
                if kind is not answered or of is None or answer is None:
                    raise ProtocolError(f"it sent {kind.name} that nobody asked for")
                found = decode(body, of)
                del self._waiting[number]
                if not answer.done():
                    answer.set_result(found)
                await asyncio.sleep(0)  # what has arrived already is received without a turn of anybody else
        except (OSError, EOFError, ProtocolError) as error:
            fault = error
        finally:
            for _, _, answer in self._waiting.values():
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


def _give_up(opening: asyncio.Task[PeerSocket]) -> None:
    def close_opened(task: asyncio.Task[PeerSocket]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().close()

    opening.add_done_callback(close_opened)
    opening.cancel()


class ReadConnections:
    """At most MAX_PEER_READS, made when they are needed. Idle ones are kept."""

    def __init__(self, open_one: Callable[[], Coroutine[Any, Any, PeerSocket]]) -> None:
        self._open_one = open_one
        self._turns = Turns(limits.MAX_PEER_READS)
        self._idle: list[PeerSocket] = []
        self._used: set[PeerSocket] = set()
        self._opening: set[asyncio.Task[PeerSocket]] = set()
        self._is_closed = False

    async def take(self, seconds: float) -> PeerSocket:
        """To be given back, or dropped. The faults of `connect`; asyncio.TimeoutError when none is free in time,
        EOFError after `close`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if not await self._turns.acquire(deadline):
            raise EOFError(_CLOSED) if self._is_closed else asyncio.TimeoutError
        if self._is_closed:  # since it got its turn
            self._turns.release()
            raise EOFError(_CLOSED)
        try:
            sock = self._idle.pop() if self._idle else await self._open(deadline - loop.time())
        except BaseException:
            self._turns.release()
            raise
        self._used.add(sock)
        return sock

    async def _open(self, seconds: float) -> PeerSocket:
        opening = asyncio.ensure_future(self._open_one())
        self._opening.add(opening)
        try:
            await asyncio.wait({opening}, timeout=max(0.0, seconds))
        except asyncio.CancelledError:
            _give_up(opening)
            raise
        finally:
            self._opening.discard(opening)
        if not opening.done():
            _give_up(opening)
            raise asyncio.TimeoutError
        if self._is_closed:
            _give_up(opening)
            raise EOFError(_CLOSED)
        return opening.result()

    def give_back(self, sock: PeerSocket) -> None:
        self._used.discard(sock)
        if self._is_closed:
            sock.close()
        else:
            self._idle.append(sock)
        self._turns.release()

    def drop(self, sock: PeerSocket) -> None:
        """Instead of `give_back`, when nothing uses it any more: what comes next on it is not known."""
        self._used.discard(sock)
        sock.cut()
        sock.close()
        self._turns.release()

    def forget_idle(self) -> None:
        """They lead to a server that has ended."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Ends what is under way and what waits; whoever began it drops its connection. Idempotent."""
        self._is_closed = True
        self._turns.end()
        self.forget_idle()
        for opening in self._opening:
            opening.cancel()
        for sock in self._used:
            sock.cut()
