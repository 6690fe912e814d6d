"""Faults that nobody expects, at one peer among others: buffers are given back when nothing writes into them, and the
peer is tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmcache.core.outcome import LoadOutcome
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.peer import Peer
from lmcache.peers.placements import Holding, Placements
from lmcache.peers.transports.contract import Transfer
from lmcache.peers.transports.shared_memory import SharedMemoryTransport
from lmcache.testing.frames import FrameMemory, keys
from unit.l2.support import run
from unit.peers.support import holding, reading

pytestmark = pytest.mark.usefixtures("patient")

WANTED = keys(8)


def test_a_load_ends_when_all_its_parts_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        begun, may_go_on = asyncio.Event(), asyncio.Event()
        load = Peer.load

        async def load_or_break(peer: Peer, transfer: Transfer) -> list[LoadOutcome]:
            if peer.address == broken.address:
                raise RuntimeError("a defect")
            begun.set()
            await may_go_on.wait()
            return await load(peer, transfer)

        monkeypatch.setattr(Peer, "load", load_or_break)
        with holding(WANTED[:4], WANTED[4:]) as (broken, other):
            async with reading([broken.address, other.address]) as reader:
                await reader.hears_all(WANTED)
                loading = asyncio.ensure_future(reader.load(WANTED))
                await begun.wait()
                await asyncio.sleep(0.05)
                assert not loading.done()
                may_go_on.set()
                assert await loading == 4
                assert reader.peer(broken.address)["failures"] == 1 and not reader.peer(other.address)["failures"]

    run(test)


def test_a_cancelled_load_ends_when_all_its_parts_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        begun, may_end = [asyncio.Event(), asyncio.Event()], asyncio.Event()

        async def load(peer: Peer, transfer: Transfer) -> list[LoadOutcome]:
            begun[peer.address == slow.address].set()
            try:
                await asyncio.sleep(3600)
            finally:
                if peer.address == slow.address:
                    await may_end.wait()
            raise AssertionError

        monkeypatch.setattr(Peer, "load", load)
        with holding(WANTED[:4], WANTED[4:]) as (quick, slow):
            async with reading([quick.address, slow.address]) as reader:
                await reader.hears_all(WANTED)
                loading = asyncio.ensure_future(reader.adapter.load(WANTED, FrameMemory(8).buffers))
                await asyncio.gather(*(event.wait() for event in begun))
                loading.cancel()
                await asyncio.sleep(0.05)
                assert not loading.done()
                may_end.set()
                with pytest.raises(asyncio.CancelledError):
                    await loading

    run(test)


def test_another_load_of_the_same_objects_may_end_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        renew = Placements.renew

        def renew_late(placements: Placements[Peer], holding: Holding[Peer]) -> bool:
            placements.forget(WANTED)  # as at the end of another load, between the choice of the peer and its part
            return renew(placements, holding)

        monkeypatch.setattr(Placements, "renew", renew_late)
        with holding(WANTED) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.finds(WANTED)
                assert await reader.load(WANTED) == 8

    run(test)


@pytest.mark.parametrize("where", ["the handshake", "the connection"])
def test_a_peer_is_tried_again_after_any_fault(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        faults = [RuntimeError("a defect")]
        connect = Introducer.connect

        async def connect_or_break(introducer: Introducer, *arguments: Any) -> Identity:
            if where == "the handshake" and faults:
                raise faults.pop()
            return await connect(introducer, *arguments)

        def map_or_break(*_: object) -> None:
            if faults:
                raise faults.pop()

        monkeypatch.setattr(Introducer, "connect", connect_or_break)
        monkeypatch.setattr(SharedMemoryTransport, "of", map_or_break)
        with holding(WANTED) as (holder,):
            async with reading([holder.address], connects=False, maps_memory=True) as reader:
                await reader.connected(holder.address)
                assert not faults

    run(test)
