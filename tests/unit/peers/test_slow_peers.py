"""A peer that answers nothing keeps no other peer waiting, and no server from ending."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import CHUNK_HASH_BYTES, ObjectKey
from lmcache.peers import adapter
from lmcache.peers.protocol import Found, Kind, Lookup, decode
from lmcache.peers.sockets import PeerSocket
from lmcache.testing.frames import keys
from manual_clock import ManualClock
from unit.l2.support import run
from unit.peers.support import FRAME_BYTES, Liar, Script, holding, reading, until_true

WAIT_SECONDS = 60.0
PATIENT: dict[str, Any] = {"load_seconds": 7200.0, "lookup_seconds": 7200.0}
OF_SILENT = keys(5 * limits.L2_MAX_READS_IN_FLIGHT, seed=1)
OF_OTHER = keys(8, seed=2)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline ends what is waited for here."""
    for name in ("PEER_LOAD_FLOOR_SECONDS", "PEER_IDLE_SECONDS", "PEER_HELLO_SECONDS"):
        monkeypatch.setattr(limits, name, 3600.0)
    # Of the adapter alone: it is a bound of a message as well.
    monkeypatch.setattr(adapter, "limits", SimpleNamespace(**{**vars(limits), "MAX_PEER_WAIT_SECONDS": 3600.0}))


def answers_lookups(held: Collection[ObjectKey], on_read: Callable[[], None]) -> Script:
    """It says that it has those, and never gives them."""
    names = {key.chunk_hash for key in held}

    async def script(liar: Liar, sock: PeerSocket) -> None:
        await liar.introducer.accept(sock)
        while True:
            kind, number, body = await sock.receive()
            if kind is Kind.READ:
                on_read()
                await asyncio.sleep(3600)
            if kind is Kind.LOOKUP:
                lookup = decode(body, Lookup)
                if lookup.wait_ms:
                    on_read()
                    await asyncio.sleep(3600)
                hashes = [lookup.hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(lookup.hashes), 32)]
                sizes = array("Q", [FRAME_BYTES if name in names else 0 for name in hashes])
                await sock.send(Kind.FOUND, number, Found(1, sizes.tobytes(), b""))

    return script


def test_loads_from_others_do_not_wait_for_a_silent_peer() -> None:
    async def test() -> None:
        reads = 0

        def count() -> None:
            nonlocal reads
            reads += 1

        with holding(OF_OTHER) as (honest,):
            async with (
                Liar(answers_lookups(OF_SILENT, count), honest) as silent,
                reading([silent.address, honest.address], **PATIENT) as reader,
            ):
                await reader.finds(OF_SILENT)
                waiting = [asyncio.ensure_future(reader.load([key])) for key in OF_SILENT]
                await until_true(lambda: reads == limits.MAX_PEER_READS)
                await asyncio.wait_for(reader.gets(OF_OTHER), WAIT_SECONDS)
                assert reads == limits.MAX_PEER_READS
                assert not any(load.done() for load in waiting)
                assert await reader.runner.drain(WAIT_SECONDS)
                assert await asyncio.gather(*waiting) == [0] * len(waiting)

    run(test)


def test_lookups_of_others_do_not_wait_for_hinted_ones() -> None:
    async def test() -> None:
        waits = 0

        def count() -> None:
            nonlocal waits
            waits += 1

        with holding(OF_OTHER) as (honest,):
            async with (
                Liar(answers_lookups((), count), honest) as silent,
                reading([silent.address, honest.address], **PATIENT) as reader,
            ):
                hint = Hint(silent.address, b"", wait_seconds=3600.0)
                asking = [
                    asyncio.ensure_future(reader.runner.ask([key], hint))
                    for key in OF_SILENT[: 2 * limits.L2_MAX_PROBES_IN_FLIGHT]
                ]
                await until_true(lambda: waits > 0)
                await asyncio.wait_for(reader.gets(OF_OTHER), WAIT_SECONDS)
                assert not any(answer.done() for answer in asking)
                assert await reader.runner.drain(WAIT_SECONDS)
                assert [(await answer).exist for answer in asking] == [[False]] * len(asking)

    run(test)


def test_the_parts_of_a_question_wait_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they would outlast the deadline of the call, which suspends all peers."""
    monkeypatch.setattr("lmcache.peers.adapter.limits.MAX_PEER_KEYS", 4)
    waits: list[int] = []

    async def script(liar: Liar, sock: PeerSocket) -> None:
        await liar.introducer.accept(sock)
        while True:
            kind, number, body = await sock.receive()
            if kind is Kind.LOOKUP:
                lookup = decode(body, Lookup)
                waits.append(lookup.wait_ms)
                clock.advance(lookup.wait_ms / 1000)
                await sock.send(Kind.FOUND, number, Found(0, bytes(len(lookup.hashes) // 4), b""))

    clock = ManualClock()

    async def test() -> None:
        with holding([]) as (honest,):
            async with Liar(script, honest) as liar, reading([liar.address], clock=clock) as reader:
                hint = Hint(liar.address, wait_seconds=10.0)
                assert not any((await reader.runner.ask(keys(12), hint)).exist)

    run(test)
    assert [wait for wait in waits if wait] == [10_000]


def test_only_members_are_waited_for() -> None:
    """So that whoever sends requests makes no more places to wait than there are peers."""

    async def test() -> None:
        with holding([]) as (honest,):
            async with reading([honest.address]) as reader:
                epoch = honest.l1.memory.server_epoch
                port = honest.address.rpartition(":")[2]
                assert reader.adapter.waits_at(Hint(honest.address, epoch, 1.0)) == honest.address
                assert reader.adapter.waits_at(Hint(f"127.0.0.1:0{port}", b"", 1.0)) == honest.address
                for hint in (
                    Hint(honest.address, epoch),
                    Hint(honest.address, b"o" * 16, 1.0),
                    Hint("127.0.0.1:1", b"", 1.0),
                    Hint("nonsense", b"", 1.0),
                ):
                    assert reader.adapter.waits_at(hint) is None

    run(test)


async def never(*_: object) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("phase", ["a read", "a connection for reads", "a wait for chunks that are being stored"])
def test_the_end_waits_for_no_silent_peer(phase: str) -> None:
    """What it was to give is a miss."""

    async def test() -> None:
        is_asked = asyncio.Event()
        connections = 0
        answering = answers_lookups(OF_SILENT, is_asked.set)

        async def script(liar: Liar, sock: PeerSocket) -> None:
            nonlocal connections
            connections += 1
            if phase == "a connection for reads" and connections > 1:
                is_asked.set()
                await never()
            await answering(liar, sock)

        with holding([]) as (honest,):
            async with Liar(script, honest) as silent, reading([silent.address], **PATIENT) as reader:
                if phase.startswith("a wait"):
                    hint = Hint(silent.address, b"", wait_seconds=3600.0)
                    asked = asyncio.ensure_future(reader.runner.ask(OF_SILENT, hint))
                else:
                    await reader.finds(OF_SILENT)
                    loading = asyncio.ensure_future(reader.load(OF_SILENT))
                await asyncio.wait_for(is_asked.wait(), WAIT_SECONDS)
                failures = reader.peer(silent.address)["failures"]
                started = time.monotonic()
                assert await reader.runner.drain(WAIT_SECONDS)
                assert time.monotonic() - started < WAIT_SECONDS
                if phase.startswith("a wait"):
                    assert not any((await asked).exist)
                else:
                    assert await loading == 0
                assert failures == 0 and reader.sample("p2p_failures_total", reason="connection") == 0

    run(test)
