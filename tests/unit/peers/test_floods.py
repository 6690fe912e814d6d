"""One that sends without end, or calls without end, leaves everybody else their turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmcache.core import limits
from lmcache.peers.connections import LookupConnection
from lmcache.peers.listener import PeerListener
from lmcache.peers.protocol import HEADER, MAGIC, Challenge, Found, Kind, Lookup, Renew, check_keys, decode, encode
from lmcache.peers.serving import ServedPeer, ServingContext
from lmcache.peers.sockets import PeerRefused, PeerSocket, within
from lmcache.testing.frames import keys
from unit.l2.support import run
from unit.peers.support import FRAME_BYTES, Holder, Liar, holding, reading, until_true

WANTED = keys(8)
MESSAGES = 50


class Arrived:
    """A socket on which all that it will ever receive has arrived."""

    def __init__(self, messages: list[tuple[Kind, int, bytes]]) -> None:
        self._messages = iter(messages)
        self._begun = False

    async def receive(self) -> tuple[Kind, int, bytes]:
        if not self._begun:
            self._begun = True
            await asyncio.sleep(0)  # others have asked by now
        try:
            return next(self._messages)
        except StopIteration:
            raise EOFError from None

    async def send(self, *_: object) -> None:
        pass

    def cut(self) -> None:
        pass

    def close(self) -> None:
        pass


async def turns_beside(task: asyncio.Future[Any]) -> int:
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


def body(message: Any) -> bytes:
    return encode(Kind.FOUND, 0, message)[HEADER.size :]


def test_answers_that_have_arrived_leave_others_their_turn() -> None:
    async def test() -> None:
        sock = Arrived([(Kind.FOUND, number, body(Found(0, b""))) for number in range(1, MESSAGES + 1)])
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection = LookupConnection(cast(PeerSocket, sock), lambda _: ended.set_result(None))
        lookups = asyncio.gather(*(connection.lookup(Lookup(b"", b"")) for _ in range(MESSAGES)))
        assert await turns_beside(ended) >= MESSAGES
        assert len(await lookups) == MESSAGES

    run(test)


def test_messages_that_have_arrived_leave_others_their_turn() -> None:
    async def test() -> None:
        with holding([]) as (holder,):
            sock = Arrived([(Kind.RENEW, 1, body(Renew(5)))] * MESSAGES)
            leases = SimpleNamespace(renew=lambda _: None, release_all=lambda _: None)
            context = cast(ServingContext, SimpleNamespace(l1=holder.l1, leases=leases))
            served = ServedPeer(cast(PeerSocket, sock), context, asyncio.Semaphore(1), lambda _: False)
            running = asyncio.ensure_future(served.run())
            assert await turns_beside(running) >= MESSAGES
            with contextlib.suppress(EOFError):
                await running

    run(test)


def test_an_answer_counts_once() -> None:
    async def test() -> None:
        async def script(liar: Liar, sock: PeerSocket) -> None:
            await liar.introducer.accept(sock)
            _, number, content = await sock.receive()
            found = Found(0, array("Q", [FRAME_BYTES] * check_keys(decode(content, Lookup))).tobytes())
            for _ in range(2):
                await sock.send(Kind.FOUND, number, found)
            with pytest.raises(EOFError):
                await sock.receive()
            cut_off.set()

        cut_off = asyncio.Event()
        with holding([]) as (honest,):
            async with Liar(script, honest) as liar, reading([liar.address]) as reader:
                await reader.has(WANTED)
                await asyncio.wait_for(cut_off.wait(), 60)
                await until_true(lambda: not reader.peer(liar.address)["connected"])

    run(test)


def test_callers_that_say_nothing_end_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        start = PeerListener.start
        monkeypatch.setattr(limits, "MAX_PEER_HANDSHAKES", 4)
        monkeypatch.setattr(limits, "PEER_HELLO_SECONDS", 600.0)
        monkeypatch.setattr(PeerListener, "start", lambda _: None)
        with contextlib.ExitStack() as stack:
            holder = Holder()
            host, _, port = holder.address.rpartition(":")
            callers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(16)]
            start(holder.listener)  # with all of them waiting
            stack.callback(holder.close)
            for caller in callers[:12]:
                caller.settimeout(60)
                assert await asyncio.to_thread(caller.recv, 1) == b""
            for caller in callers[12:]:
                caller.setblocking(False)
                with pytest.raises(BlockingIOError):
                    caller.recv(1)

    run(test)


def test_a_caller_that_is_not_known_gets_little_memory() -> None:
    async def test() -> None:
        with holding([]) as (holder,):
            raw = socket.socket()
            raw.setblocking(False)
            host, _, port = holder.address.rpartition(":")
            await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
            sock = PeerSocket(raw)
            await sock.send_packed(HEADER.pack(MAGIC, Kind.HELLO, 0, 0, limits.MAX_PEER_HELLO_BYTES + 1))
            with pytest.raises(PeerRefused, match=f"more than {limits.MAX_PEER_HELLO_BYTES}"):
                await within(60.0, sock.expect(Kind.CHALLENGE, 0, Challenge))
            sock.close()

    run(test)
