"""What honest peers hold is loaded exactly, from whichever of them has it; nothing of it is believed or held later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import pytest

from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import ObjectKey
from lmcache.l2.adapter import FollowsHints
from lmcache.l2.runner import ProbeAnswer
from lmcache.peers.transports.library import ENGINES
from lmcache.testing.frames import keys, namespace
from manual_clock import ManualClock
from services import need_engine
from unit.l2.support import run
from unit.peers.support import Holder, holding, later, reading, until, until_true


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no peer that does."""
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", 30.0)
    monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", 30.0)


async def count(answer: Awaitable[ProbeAnswer]) -> int:
    return (await answer).exist.count(True)


@pytest.mark.parametrize("transport", ["tcp", "shared_memory", *ENGINES])
def test_what_a_peer_has_is_loaded_exactly(transport: str) -> None:
    transfer_engine = transport if transport in ENGINES else ""
    need_engine(transfer_engine)

    async def test() -> None:
        wanted = keys(20)
        maps_memory = transport == "shared_memory"
        with holding(wanted[:12], transfer_engine=transfer_engine) as (holder,):
            async with reading([holder.address], maps_memory=maps_memory, transfer_engine=transfer_engine) as reader:
                await reader.finds(wanted, 12)
                assert await reader.load(wanted) == 12
                assert reader.sample("p2p_received_bytes_total", transport=transport) == 12 * 16384
                sent = 12 * 16384 if transport == "tcp" else 0
                until(lambda: holder.sample("p2p_sent_bytes_total") == sent)
                until(lambda: not holder.leases)

    run(test)


def test_more_than_one_read_takes() -> None:
    async def test() -> None:
        wanted = keys(2 * limits.MAX_PEER_READ_KEYS + 10)
        with holding(wanted, slots=len(wanted)) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.gets(wanted)

    run(test)


def test_salts_are_apart() -> None:
    async def test() -> None:
        mine, theirs = keys(4, of=namespace(salt="a")), keys(4, of=namespace(salt="b"))
        with holding(mine) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.finds(mine)
                assert await reader.has(theirs) == 0 and await reader.load(theirs) == 0
                assert await reader.load(mine) == 4

    run(test)


def test_several_owners_of_one_prefix_are_used() -> None:
    async def test() -> None:
        wanted = keys(16)
        with holding(wanted[:10], wanted[6:]) as holders:
            async with reading([holder.address for holder in holders]) as reader:
                await reader.hears_all(wanted)
                assert await reader.load(wanted) == 16
                for holder in holders:
                    assert reader.peer(holder.address)["received_bytes"]
                    until(lambda holder=holder: not holder.leases)

    run(test)


def test_what_one_owner_lost_comes_from_another() -> None:
    async def test() -> None:
        wanted = keys(8)
        with holding(wanted, wanted) as holders:
            async with reading([holder.address for holder in holders]) as reader:
                for loser in holders:
                    await reader.hears_all(wanted)
                    assert all(holder.leases for holder in holders)
                    loser.l1.core.clear()
                    assert await reader.load(wanted) == 8
                    loser.put(wanted)

    run(test)


def test_what_was_found_is_not_believed_later() -> None:
    async def test() -> None:
        wanted = keys(8)
        with holding(wanted) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.finds(wanted)
                assert len(reader.runner.ledger) == 0
                holder.l1.core.clear()
                await reader.finds(wanted, 0)
                assert await reader.load(wanted) == 0

    run(test)


def test_a_lookup_keeps_objects_from_eviction_until_they_are_loaded() -> None:
    async def test() -> None:
        wanted, others = keys(8), keys(12, seed=1)
        with holding(wanted, slots=40) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.finds(wanted)
                for part in range(0, 12, 4):
                    holder.put(others[part : part + 4])
                holder.put(keys(30, seed=2))  # as many as there is room for beside what is leased
                assert await reader.load(wanted) == 8
                until(lambda: not holder.leases)
                holder.put(keys(40, seed=3))
                await reader.finds(wanted, 0)

    run(test)


def test_leases_end_with_their_time_and_with_the_connection() -> None:
    async def test() -> None:
        wanted, clock = keys(8), ManualClock()
        with holding(wanted, clock=clock) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.finds(wanted)
                assert holder.leases
                clock.advance(limits.PEER_LEASE_SECONDS)
                await until_true(lambda: not holder.leases)
                assert await reader.load(wanted) == 8  # by its key: nothing has evicted it
                await reader.finds(wanted)
                assert holder.leases
            until(lambda: not holder.leases)

    run(test)


def test_all_peers_together_keep_a_part_of_l1_at_most() -> None:
    async def test() -> None:
        wanted = keys(32)
        with holding(wanted, slots=40) as (holder,):
            async with reading([holder.address]) as reader:
                await reader.finds(wanted)
                assert not holder.leases
                assert await reader.load(wanted) == 32
                await reader.finds(wanted[:8])
                assert holder.leases == 1
                await reader.finds(wanted[8:16])
                assert holder.leases == 1

    run(test)


def test_a_peer_that_was_started_anew_is_found_again() -> None:
    async def test() -> None:
        wanted, others = keys(8), keys(8, seed=1)
        with holding(wanted) as (holder,):
            port = int(holder.address.rpartition(":")[2])
            async with reading([holder.address], maps_memory=True) as reader:
                await reader.finds(wanted)
                assert holder.listener.stop()
                assert await reader.load(wanted) in (0, 8)  # out of memory that is still mapped
                await until_true(lambda: not reader.peer(holder.address)["connected"])
                assert await reader.has(wanted) == 0
                again = Holder(port=port)
                try:
                    again.put(others)
                    await reader.connected(again.address)
                    await reader.finds(others)
                    assert await reader.has(wanted) == 0 and await reader.load(others) == 8
                finally:
                    again.close()

    run(test)


def test_a_hint_waits_for_chunks_that_are_being_stored() -> None:
    async def test() -> None:
        wanted = keys(8)
        with holding(wanted[:3]) as (holder,):
            async with reading([holder.address]) as reader:
                assert isinstance(reader.adapter, FollowsHints)
                reservation, slots = holder.reserve(wanted[3:])
                hint = Hint(holder.address, holder.l1.memory.server_epoch, wait_seconds=20.0)
                asked = asyncio.ensure_future(reader.runner.ask(wanted, hint))
                await until_true(lambda: holder.listener.status()["waiting_lookups"] == 1)
                assert not asked.done()
                holder.fill(wanted[3:], slots)
                holder.l1.core.commit(reservation)
                assert (await asked).exist == [True] * 8
                assert await reader.load(wanted) == 8

    run(test)


def test_a_hint_waits_for_stores_that_begin_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDOVER_START_SECONDS", 60.0)

    async def test() -> None:
        wanted = keys(8)
        with holding(wanted[:3]) as (holder,):
            async with reading([holder.address]) as reader:
                hint = Hint(holder.address, holder.l1.memory.server_epoch, wait_seconds=10.0)
                asked = asyncio.ensure_future(reader.runner.ask(wanted, hint))
                await until_true(lambda: holder.listener.status()["waiting_lookups"] == 1)
                holder.put(wanted[3:5])
                assert not asked.done()
                holder.put(wanted[5:])
                assert (await asked).exist == [True] * 8

    run(test)


@pytest.mark.parametrize("start_seconds", [0.0, 3600.0])
def test_a_hint_waits_for_what_is_stored_behind_objects_that_are_not(
    start_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a recurrent state nothing is stored but the end: what is before it keeps no answer, and ends no wait."""
    monkeypatch.setattr(limits, "HANDOVER_START_SECONDS", start_seconds)

    async def test() -> None:
        whole = keys(4)
        wanted = [key for each in whole for key in (each, ObjectKey(namespace("states"), each.chunk_hash))]
        with holding(whole[:3]) as (holder,):
            async with reading([holder.address]) as reader:
                reserved = [(part, *holder.reserve(part)) for part in (wanted[6:7], wanted[7:])]
                hint = Hint(holder.address, holder.l1.memory.server_epoch, wait_seconds=14.0)
                asked = asyncio.ensure_future(reader.runner.ask(wanted, hint))
                await until_true(lambda: holder.listener.status()["waiting_lookups"] == 1)
                for _ in range(100):  # it is looked at a few times meanwhile
                    await reader.has(wanted[:1])
                for part, reservation, slots in reserved:
                    holder.fill(part, slots)
                    holder.l1.core.commit(reservation)
                started = time.monotonic()
                assert (await asked).exist == [True, False] * 3 + [True] * 2
                assert time.monotonic() - started < 10.0

    run(test)


def test_a_hint_waits_for_nothing_that_nobody_stores() -> None:
    async def test() -> None:
        wanted = keys(8)
        with holding(wanted[:3]) as (holder,):
            async with reading([holder.address]) as reader:
                reservation, _ = holder.reserve(wanted[3:])
                hint = Hint(holder.address, wait_seconds=20.0)
                asked = asyncio.ensure_future(reader.runner.ask(wanted, hint))
                await until_true(lambda: holder.listener.status()["waiting_lookups"] == 1)
                holder.l1.core.abort(reservation)
                assert (await asked).exist == [True] * 3 + [False] * 5
                for other in (Hint(holder.address, b"1" * 16, 20.0), Hint("nonsense", b"", 20.0)):
                    await later(lambda other=other: count(reader.runner.ask(wanted, other)), lambda found: found == 3)

    run(test)


def test_a_hint_asks_the_others_only_for_what_that_peer_lacks() -> None:
    async def test() -> None:
        wanted = keys(8)
        with holding(wanted[:6], wanted) as (named, other):
            async with reading([named.address, other.address]) as reader:
                hint = Hint(named.address, wait_seconds=5.0)
                assert (await reader.runner.ask(wanted[:6], hint)).exist == [True] * 6
                assert other.sample("p2p_served_lookups_total") == 0
                await later(lambda: count(reader.runner.ask(wanted, hint)), lambda found: found == 8)
                assert other.sample("p2p_served_lookups_total") >= 1
                assert await reader.load(wanted) == 8

    run(test)
