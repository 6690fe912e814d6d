"""Connections for reads."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lmcache.core import limits
from lmcache.peers.connections import ReadConnections
from lmcache.peers.sockets import PeerSocket
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
