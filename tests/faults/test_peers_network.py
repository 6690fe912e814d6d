"""A peer behind a network that loses packets, swallows all of them or resets connections: exact bytes or misses within
the deadline, and as before once the network is well. A machine that vanishes leaves no connection behind."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from lmcache.core import limits
from lmcache.peers.protocol import Kind, Release
from lmcache.peers.sockets import PeerSocket
from lmcache.testing.frames import keys
from services.network import Network, in_own_network
from unit.peers.support import holding, reading, until_true

SECONDS = 1.0
WITHIN_SECONDS = 20.0  # a deadline, and a machine that is busy


def test_lost_packets_black_holes_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", SECONDS)
    monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", SECONDS)
    monkeypatch.setattr(limits, "L2_BREAKER_OPEN_SECONDS", 0.5)
    monkeypatch.setattr(limits, "L2_BREAKER_MAX_OPEN_SECONDS", 1.0)

    async def course(network: Network) -> None:
        wanted = keys(24)
        with holding(wanted, slots=128) as (holder,):
            port = int(holder.address.rpartition(":")[2])
            async with reading([holder.address], lookup_seconds=SECONDS) as reader:
                await reader.gets(wanted)
                for fault in ("half", "all", "reset"):
                    for begins in ("before the lookup", "before the load"):
                        if begins == "before the load":
                            await reader.hears_all(wanted)
                        if fault == "reset":
                            network.reset(port)
                        else:
                            network.lose(port, share=0.5 if fault == "half" else 1.0)
                        for _ in range(3):
                            began = time.monotonic()
                            await reader.has(wanted) if begins == "before the lookup" else None
                            loaded = await reader.load(wanted)  # each byte of what came is right
                            assert time.monotonic() - began < WITHIN_SECONDS
                            assert fault == "half" or loaded == 0
                        network.well()
                        await reader.gets(wanted)
                await until_true(lambda: not holder.leases, seconds=limits.PEER_LEASE_SECONDS + 60)

    in_own_network(lambda network: asyncio.run(asyncio.wait_for(course(network), 300)))


def test_connections_to_a_machine_that_vanishes_end_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_VANISHED_SECONDS", 4)

    async def course(network: Network) -> None:
        with holding(keys(1)) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.connected(holder.address)
                assert holder.listener.status()["connections"]
                network.lose(int(holder.address.rpartition(":")[2]))
                await until_true(lambda: not reader.peer(holder.address)["connected"], seconds=WITHIN_SECONDS)
                await until_true(lambda: not holder.listener.status()["connections"], seconds=WITHIN_SECONDS)
                network.well()
                await reader.gets(keys(1))

    in_own_network(lambda network: asyncio.run(asyncio.wait_for(course(network), 120)))


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_socket_ends_when_nothing_is_heard_of_the_other_machine(
    monkeypatch: pytest.MonkeyPatch, is_sending: bool
) -> None:
    """The system sends no probes while bytes are unconfirmed: those have a timeout of their own."""
    monkeypatch.setattr(limits, "PEER_VANISHED_SECONDS", 4)

    async def course(network: Network) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            ours = PeerSocket(socket.create_connection(listening.getsockname()))
            theirs, _ = listening.accept()
            network.lose(listening.getsockname()[1])
            if is_sending:
                await ours.send(Kind.RELEASE, 1, Release(1))
            began = time.monotonic()
            with pytest.raises(OSError, match="timed out"):
                await asyncio.wait_for(ours.receive(), WITHIN_SECONDS)
            assert time.monotonic() - began > 2.0  # not by a refusal
            ours.close()
            theirs.close()

    in_own_network(lambda network: asyncio.run(asyncio.wait_for(course(network), 60)))
