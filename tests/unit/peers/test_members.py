"""Who the peers of a server are, and what of one outlasts its connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest

from lmcache.config.spec import ServerConfig
from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.peers.config import peers_config
from lmcache.peers.handshake import Introducer
from lmcache.peers.protocol import Found, Kind, Lookup, decode
from lmcache.peers.sockets import PeerSocket
from lmcache.testing.frames import keys
from manual_clock import ManualClock
from unit.l2.support import run
from unit.peers.support import Holder, Liar, Reader, Script, holding, identity, known_to, reading, until_true

pytestmark = pytest.mark.usefixtures("patient")

WANTED, OTHERS = keys(8), keys(8, seed=5)


def test_members_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_UNNAMED_SECONDS", 0.0)

    async def test() -> None:
        with holding(WANTED) as (holder,):
            async with reading([], connects=False) as reader:
                assert reader.adapter.status() == {"peers": []}
                reader.adapter.set_members([holder.address, "nonsense", holder.address])
                await until_true(lambda: len(reader.adapter.status()["peers"]) == 1)
                await reader.connected(holder.address)
                reader.adapter.set_members([])
                await until_true(lambda: not reader.adapter.status()["peers"])

    run(test)


def test_a_list_that_lacks_its_members_ends_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was started again knows nobody until all have joined it again."""

    async def test() -> None:
        with holding(WANTED) as (holder,):
            async with reading([], connects=False) as reader:
                reader.adapter.set_members([holder.address])
                await until_true(lambda: len(reader.adapter.status()["peers"]) == 1)
                await reader.connected(holder.address)
                await reader.finds(WANTED)
                reader.adapter.set_members(["nonsense"])
                await asyncio.sleep(0)  # what it does at once
                await asyncio.sleep(0)
                assert await reader.load(WANTED) == 8
                reader.adapter.set_members([holder.address])
                await reader.gets(WANTED)
                monkeypatch.setattr(limits, "PEER_UNNAMED_SECONDS", 0.2)
                reader.adapter.set_members([])
                await until_true(lambda: not reader.adapter.status()["peers"])

    run(test)


def names(reader: Reader) -> set[object]:
    return {peer["address"] for peer in reader.adapter.status()["peers"]}


async def has_members(reader: Reader, *holders: Holder) -> None:
    """They are connected, and nobody else is a peer."""
    reader.adapter.set_members([holder.address for holder in holders])
    await until_true(lambda: names(reader) == {holder.address for holder in holders})
    await reader.connected(*(holder.address for holder in holders))


def test_named_members_have_the_places_of_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was named last is kept."""
    monkeypatch.setattr(limits, "MAX_PEERS", 3)

    async def test() -> None:
        with holding([], [], [], []) as (oldest, older, new, newest):
            async with reading([], connects=False) as reader:
                await has_members(reader, oldest, older)
                reader.adapter.set_members([older.address])
                await asyncio.sleep(0.01)
                reader.adapter.set_members([new.address, newest.address])
                await until_true(lambda: names(reader) == {older.address, new.address, newest.address})

    run(test)


def test_a_kept_peer_is_left_when_its_connection_ends() -> None:
    async def test() -> None:
        gone = Holder()
        with holding([]) as (holder,):
            async with reading([], connects=False) as reader:
                await has_members(reader, gone, holder)
                reader.adapter.set_members([])
                await asyncio.sleep(0.01)
                assert names(reader) == {gone.address, holder.address}
                gone.close()
                await until_true(lambda: names(reader) == {holder.address})

    run(test)


def test_kept_peers_have_one_timer_and_two_heartbeats() -> None:
    options = ServerConfig(l1_size_gb=1.0, eviction_policy="LRU", coordinator_heartbeat_interval=1000.0)
    heartbeat_seconds = peers_config(options).heartbeat_seconds

    async def test() -> None:
        loop = asyncio.get_running_loop()
        with holding([], []) as (kept, holder):
            async with reading([], connects=False, heartbeat_seconds=heartbeat_seconds) as reader:

                async def far_timers(*named: Holder) -> int:
                    reader.adapter.set_members([holder.address for holder in named])
                    await asyncio.sleep(0.01)
                    timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]  # noqa: SLF001
                    return sum(not timer.cancelled() and timer.when() > loop.time() + 1900 for timer in timers)

                await has_members(reader, kept, holder)
                assert await far_timers(kept, holder) == 0
                for _ in range(3):
                    assert await far_timers(holder) == 1
                assert await far_timers(kept, holder) == 0

    run(test)


def test_who_is_left_out_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "MAX_PEERS", 2)

    async def test() -> None:
        async with reading([], connects=False) as reader:
            for rounds in range(1, 4):
                reader.adapter.set_members([f"nonsense {rounds}", *(f"127.0.0.1:{port}" for port in range(1, 9))])
                await until_true(lambda count=rounds: sum("nonsense" in text for text in caplog.messages) == count)
            assert len(reader.adapter.status()["peers"]) == 2

    run(test)
    assert sum("peers at most" in text for text in caplog.messages) == 1


def test_addresses_have_no_case() -> None:
    async def test() -> None:
        async def script(liar: Liar, sock: PeerSocket) -> None:
            await liar.introducer.accept(sock)
            await sock.receive()

        with holding([]) as (honest,):
            async with Liar(script, honest) as liar:
                port = liar.address.rpartition(":")[2]
                address = f"[::ffff:7f00:1]:{port}"
                liar.introducer = Introducer(identity(address), "", os.urandom)
                async with reading([address.upper()], connects=False) as reader:
                    await until_true(lambda: reader.adapter.waits_at(Hint(address, b"", 1.0)) is not None)

    run(test)


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has addresses of IPv6 and IPv4, of a server that listens at the latter alone: nobody is at port 1."""
    resolve = socket.getaddrinfo

    def resolve_two(host: str, port: int, **options: int) -> list[object]:
        return [*resolve(host, 1, **options), *resolve(host, port, **options)]

    async def test() -> None:
        with holding(WANTED) as (holder,):
            monkeypatch.setattr(socket, "getaddrinfo", resolve_two)
            async with reading([holder.address]) as reader:
                await reader.gets(WANTED)

    run(test)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_service_at_the_first_address_of_a_name_is_passed_by(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one that says nothing. Reads go where the peer was found."""
    monkeypatch.setattr(limits, "PEER_HELLO_SECONDS", 4.0)
    resolve = socket.getaddrinfo

    async def test() -> None:
        met = 0

        async def script(other: Liar, sock: PeerSocket) -> None:
            nonlocal met
            met += 1
            await sock.send_packed(answer)
            await asyncio.sleep(3600)

        def resolve_two(host: str, port: int, **options: int) -> list[object]:
            return [*resolve(host, other.address.rpartition(":")[2], **options), *resolve(host, port, **options)]

        with holding(WANTED) as (holder,):
            async with Liar(script, holder) as other:
                monkeypatch.setattr(socket, "getaddrinfo", resolve_two)
                async with reading([holder.address]) as reader:
                    met_before = met
                    await reader.gets(WANTED)
                    assert met == met_before > 0

    run(test)


def test_why_a_peer_is_refused_is_told_wherever_its_other_addresses_lead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo

    def resolve_two(host: str, port: int, **options: int) -> list[object]:
        return [*resolve(host, port, **options), *resolve(host, 1, **options)]

    async def test() -> None:
        with holding([], chunk_tokens=16) as (holder,):
            monkeypatch.setattr(socket, "getaddrinfo", resolve_two)
            async with reading([holder.address], connects=False) as reader:
                await until_true(lambda: "chunk" in str(reader.peer(holder.address)["refused"]))

    run(test)


# ---- connections that end --------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def started_anew(reader: Reader, first: Holder) -> AsyncIterator[Holder]:
    """Another server at the address of the first one, which ends."""
    first.close()
    await until_true(lambda: not reader.peer(first.address)["connected"])
    again = Holder(port=int(first.address.rpartition(":")[2]))
    try:
        await reader.connected(again.address)
        yield again
    finally:
        again.close()


def test_nothing_of_the_server_before_is_released_at_the_next_one() -> None:
    """Both count their leases from one on."""

    async def test() -> None:
        first = Holder()
        first.put(WANTED)
        async with reading([first.address]) as reader:
            await reader.finds(WANTED)
            async with started_anew(reader, first) as again:
                again.put(OTHERS)
                await reader.finds(OTHERS)
                assert await reader.load(WANTED) == 0
                sock = await known_to(again)  # whatever was sent before has arrived when it has its answer
                await reader.has(WANTED)
                sock.close()
                assert again.listener.status()["leases"] == 1
                assert await reader.load(OTHERS) == 8

    run(test)


def test_the_rate_of_the_server_before_is_not_that_of_the_next_one() -> None:
    async def test() -> None:
        wanted = keys(128)
        first = Holder(slots=256)
        first.put(wanted)
        async with reading([first.address]) as reader:
            await reader.gets(wanted)
            assert reader.peer(first.address)["bytes_per_second"] != limits.PEER_FIRST_RATE
            async with started_anew(reader, first) as again:
                assert reader.peer(again.address)["bytes_per_second"] == limits.PEER_FIRST_RATE

    run(test)


def test_a_peer_whose_connection_breaks_has_broken_no_rule() -> None:
    """It is not left alone for that: a load that begins then is its first failure."""

    async def test() -> None:
        lookups: list[PeerSocket] = []

        async def script(liar: Liar, sock: PeerSocket) -> None:
            await liar.introducer.accept(sock)
            while True:
                kind, number, body = await sock.receive()
                if kind is Kind.LOOKUP:
                    lookups.append(sock)
                    count = len(decode(body, Lookup).hashes) // 32
                    await sock.send(Kind.FOUND, number, Found(1, (20480).to_bytes(8, "little") * count, b""))

        with holding([]) as (honest,):
            async with Liar(script, honest) as liar, reading([liar.address]) as reader:
                await reader.finds(WANTED)
                lookups[-1].cut()
                await until_true(lambda: not reader.peer(liar.address)["connected"])
                assert await reader.load(WANTED) == 0
                assert reader.peer(liar.address)["failures"] == 1
                assert not reader.peer(liar.address)["left_alone"]

    run(test)


def ends_each(connections: list[PeerSocket]) -> Script:
    """One that says who it is, and no more. The connections are appended."""

    async def script(liar: Liar, sock: PeerSocket) -> None:
        connections.append(sock)
        await liar.introducer.accept(sock)

    return script


def test_a_peer_that_ends_each_connection_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_PEER_RETRY_SECONDS", 0.5)
    caplog.set_level("INFO", "lmcache.peers")

    async def test() -> None:
        connections: list[PeerSocket] = []
        with holding([]) as (honest,):
            async with Liar(ends_each(connections), honest) as liar, reading([liar.address], connects=False):
                await until_true(lambda: len(connections) == 5)

    run(test)
    assert len(caplog.messages) == 2


def test_the_end_of_a_long_connection_is_logged_whatever_was_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lmcache.peers")

    async def test() -> None:
        clock = ManualClock()
        connections: list[PeerSocket] = []

        async def script(liar: Liar, sock: PeerSocket) -> None:
            await liar.introducer.accept(sock)
            connections.append(sock)
            await sock.receive()

        with holding([]) as (honest,):
            async with Liar(script, honest) as liar, reading([liar.address], clock=clock) as reader:
                for count, lasted_seconds in enumerate((1.0, 1.0, 86_400.0, 0.0), 1):
                    await until_true(lambda count=count: len(connections) == count)
                    await reader.connected(liar.address)
                    clock.advance(lasted_seconds)
                    if lasted_seconds:
                        connections[-1].cut()

    run(test)
    ends = [message.partition("ended after ")[2].partition(":")[0] for message in caplog.messages]
    assert ends == ["", "1 s", "86400 s", ""]  # the second one, too short and not the first, is not told of


def test_a_peer_that_has_gone_after_short_connections_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "PEER_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(limits, "MAX_PEER_RETRY_SECONDS", 0.2)
    caplog.set_level("DEBUG", "lmcache.peers")

    def unreached() -> list[str]:
        return [record.levelname for record in caplog.records if "is not reached" in record.message]

    async def test() -> None:
        connections: list[PeerSocket] = []
        clock = ManualClock()  # however slow this machine is, none of them is long
        with holding([]) as (honest,):
            async with Liar(ends_each(connections), honest) as liar:
                async with reading([liar.address], connects=False, clock=clock):
                    await until_true(lambda: len(connections) == 4)
                    await liar.__aexit__()
                    await until_true(lambda: len(unreached()) == 4)

    run(test)
    assert unreached().count("INFO") == 1


def test_a_server_with_all_its_connections_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_PEER_CONNECTIONS", 1)

    async def test() -> None:
        with holding([]) as (holder,):
            sock = await known_to(holder)
            for _ in range(2):
                with pytest.raises((EOFError, OSError)):
                    await known_to(holder)
            sock.close()

    run(test)
    assert caplog.messages.count("A peer is not served: 1 connections are open already") == 1
