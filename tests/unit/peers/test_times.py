"""The time that loads, waits and sends have."""

from __future__ import annotations

import time

import pytest

from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key_batch import pack_keys
from lmcache.core.outcome import LoadOutcome
from lmcache.peers import serving
from lmcache.peers.peer import Peer
from lmcache.peers.protocol import Kind, Read
from lmcache.peers.serving import ServedPeer
from lmcache.peers.transports.contract import Fetched, Transfer
from lmcache.peers.transports.tcp import TcpTransport
from lmcache.testing.frames import keys
from unit.l2.support import run
from unit.peers.support import holding, known_to, later, reading, until_true

pytestmark = pytest.mark.usefixtures("patient")

WANTED = keys(8)


def test_a_load_ends_before_the_deadline_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        given: list[float] = []
        load = Peer.load

        async def noted(peer: Peer, transfer: Transfer) -> list[LoadOutcome]:
            given.append(transfer.seconds)
            return await load(peer, transfer)

        monkeypatch.setattr(Peer, "load", noted)
        monkeypatch.setattr(limits, "PEER_FIRST_RATE", 1.0)  # so slow that a load has all the time that there is
        with holding(WANTED) as (holder,):
            async with reading([holder.address], load_seconds=100.0) as reader:
                await reader.finds(WANTED)
                assert await reader.load(WANTED) == 8
                assert 0 < given[0] <= 90.0

    run(test)


def test_what_did_not_come_is_in_no_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        outcome = LoadOutcome.MISSING

        async def fetch(_: TcpTransport, transfer: Transfer) -> Fetched:
            return Fetched([outcome] * len(transfer.keys))

        monkeypatch.setattr(TcpTransport, "fetch", fetch)
        with holding([]) as (holder,):
            async with reading([holder.address]) as reader:
                before = reader.peer(holder.address)["bytes_per_second"]
                size_bytes = 1 << 21
                transfer = Transfer(WANTED[:1], [memoryview(bytearray(size_bytes))], [size_bytes], [], 0, size_bytes, 9)
                peer = next(iter(reader.adapter._peers.values()))  # noqa: SLF001
                await peer.load(transfer)
                assert reader.peer(holder.address)["bytes_per_second"] == before
                outcome = LoadOutcome.LOADED
                await peer.load(transfer)
                assert reader.peer(holder.address)["bytes_per_second"] != before

    run(test)


def test_a_wait_that_runs_out_tells_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        is_staged = ServedPeer._is_staged  # noqa: SLF001

        def slowly(served: ServedPeer, *arguments: object) -> bool:
            time.sleep(0.02)
            return is_staged(served, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ServedPeer, "_is_staged", slowly)
        with holding(WANTED[:3]) as (holder,):
            async with reading([holder.address]) as reader:
                reservation, _ = holder.reserve(WANTED[3:])
                hint = Hint(holder.address, holder.l1.memory.server_epoch, wait_seconds=1.0)

                async def count() -> int:
                    late = reader.sample("p2p_late_lookups_total")
                    found = (await reader.runner.ask(WANTED, hint)).exist.count(True)
                    return found if reader.sample("p2p_late_lookups_total") == late else 0

                await later(count, lambda found: found == 3)
                holder.l1.core.abort(reservation)

    run(test)


def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", 0.5)
        monkeypatch.setattr(serving, "_SEND_SECONDS", 600.0)
        wanted = keys(200, seed=3)
        with holding(wanted, slots=256) as (holder,):
            sock = await known_to(holder)
            await until_true(lambda: bool(holder.listener.status()["connections"]))
            for number in range(1, 9):
                await sock.send(Kind.READ, number, Read(*pack_keys(wanted)))
            # It holds a lease while it sends, and has given that back already where this machine stood still.
            await until_true(lambda: holder.leases > 0 or not holder.listener.status()["connections"])
            await until_true(lambda: not holder.listener.status()["connections"])
            assert not holder.leases
            sock.close()

    run(test)
