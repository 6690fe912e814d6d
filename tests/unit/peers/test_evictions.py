"""What a peer said it has may be evicted before it is read: that is no fault of it, unless it gave a lease."""

from __future__ import annotations

from array import array

import pytest

from lmcache.core import limits
from lmcache.peers.protocol import Found, Frames, Kind, Lookup, Read, decode
from lmcache.peers.sockets import PeerSocket
from lmcache.testing.frames import keys
from manual_clock import ManualClock
from unit.l2.support import run
from unit.peers.support import FRAME_BYTES, Holder, Liar, Reader, Script, holding, reading, until_true

pytestmark = pytest.mark.usefixtures("patient")


async def evicts(holder: Holder, reader: Reader, seed: int, count: int = 40) -> None:
    """More than a quarter of L1 is found, so without a lease, and has gone when it is loaded."""
    wanted = keys(count, seed=seed)
    holder.put(wanted)
    await reader.finds(wanted)
    assert not holder.leases
    assert holder.l1.core.clear().objects >= count
    assert await reader.load(wanted) == 0


def test_an_honest_peer_that_evicts_is_not_left_alone() -> None:
    async def test() -> None:
        with holding([]) as (holder,):
            async with reading([holder.address]) as reader:
                for seed in range(limits.PEER_BREAKER_FAILURES + 1):
                    await evicts(holder, reader, seed)
                assert not reader.peer(holder.address)["failures"]

    run(test)


def test_a_trial_whose_object_was_evicted_ends_the_pause() -> None:
    async def test() -> None:
        clock = ManualClock()
        with holding([]) as (holder,):
            async with reading([holder.address], clock=clock) as reader:
                (peer,) = reader.adapter._peers.values()  # noqa: SLF001
                peer.load_broke(TimeoutError())
                assert reader.peer(holder.address)["left_alone"]
                clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
                await evicts(holder, reader, seed=1)
                await until_true(lambda: not reader.peer(holder.address)["left_alone"])

    run(test)


def gives_nothing(lookups: list[PeerSocket]) -> Script:
    """One that says it has everything, under a lease. The connections of its lookups are appended."""

    async def script(liar: Liar, sock: PeerSocket) -> None:
        await liar.introducer.accept(sock)
        while True:
            kind, number, body = await sock.receive()
            if kind is Kind.LOOKUP:
                lookups.append(sock)
                sizes = array("Q", [FRAME_BYTES] * (len(decode(body, Lookup).hashes) // 32))
                await sock.send(Kind.FOUND, number, Found(1, sizes.tobytes(), b""))
            if kind is Kind.READ:
                await sock.send(Kind.FRAMES, number, Frames(bytes(8 * (len(decode(body, Read).hashes) // 32))))

    return script


@pytest.mark.parametrize("is_late", [False, True])
def test_a_lease_counts_once_a_load_and_while_it_runs(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that gives nothing of one large load, which takes several reads."""
    monkeypatch.setattr(limits, "MAX_PEER_READ_KEYS", 2)

    async def test() -> None:
        clock, wanted = ManualClock(), keys(8)
        with holding([]) as (honest,):
            async with Liar(gives_nothing([]), honest) as liar, reading([liar.address], clock=clock) as reader:
                await reader.finds(wanted)
                clock.advance(limits.PEER_LEASE_SECONDS if is_late else 0.0)
                assert await reader.load(wanted) == 0
                assert reader.sample("p2p_failures_total", reason="nothing_given") == (not is_late)

    run(test)


def test_a_lease_ends_with_its_connection() -> None:
    async def test() -> None:
        lookups: list[PeerSocket] = []
        wanted = keys(8)
        with holding([]) as (honest,):
            async with Liar(gives_nothing(lookups), honest) as liar, reading([liar.address]) as reader:
                await reader.finds(wanted)
                lookups[-1].cut()
                await until_true(lambda: not reader.peer(liar.address)["connected"])
                await reader.connected(liar.address)
                assert await reader.load(wanted) == 0
                assert not reader.peer(liar.address)["failures"]

    run(test)
