"""A peer behind a network that loses packets, swallows all of them or resets connections: exact bytes or misses within
the deadline, and as before once the network is well."""

from __future__ import annotations

import asyncio
import time

import pytest

from lmcache.core import limits
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
