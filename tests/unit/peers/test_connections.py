"""Connections for lookups and for reads."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lmcache.core import limits
from lmcache.peers.connections import LookupConnection, ReadConnections
from lmcache.peers.protocol import Described, Kind
from lmcache.peers.sockets import PeerSocket, within
from unit.l2.support import run

WAIT_SECONDS = 60.0


def test_who_gets_its_turn_right_before_the_end_opens_nothing() -> None:
    """The end waits for no connection that is begun after it."""
    others: list[socket.socket] = []

    async def open_one() -> PeerSocket:
        if len(others) == limits.MAX_PEER_READS:
            await asyncio.sleep(3600.0)
        ours, other = socket.socketpair()
        others.append(other)
        return PeerSocket(ours)

    async def test() -> None:
        connections = ReadConnections(open_one)
        used = [await connections.take(WAIT_SECONDS) for _ in range(limits.MAX_PEER_READS)]
        waiting = asyncio.ensure_future(connections.take(3600.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        connections.drop(used.pop())
        connections.close()
        with pytest.raises(EOFError, match="closed"):
            await asyncio.wait_for(waiting, 5.0)
        for sock in used:
            connections.drop(sock)
        for other in others:
            other.close()

    run(test)


def test_an_answer_that_nobody_waits_for_any_more_ends_nothing() -> None:
    async def test() -> None:
        ended: list[BaseException | None] = []
        ours, others = socket.socketpair()
        connection, other = LookupConnection(PeerSocket(ours), ended.append), PeerSocket(others)
        with pytest.raises(asyncio.TimeoutError):
            await within(0.05, connection.describe("nixl"))
        _, number, _ = await other.receive()
        assert connection.unanswered == 0
        await other.send(Kind.REGION, number, Described(b"late"))
        asking = asyncio.ensure_future(connection.describe("nixl"))
        _, number, _ = await other.receive()
        await other.send(Kind.REGION, number, Described(b"in time"))
        assert await asyncio.wait_for(asking, 5.0) == b"in time" and not ended
        await connection.close()
        other.close()

    run(test)
