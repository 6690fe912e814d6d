"""A peer that lies, is cut off or falls silent, in each phase: it costs a deadline at most, never a wrong byte, and the
others go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Awaitable, Callable

import pytest

from lmcache.core import limits
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.errors import ProtocolError
from lmcache.peers.protocol import (
    HEADER,
    MAGIC,
    PROTOCOL_VERSION,
    Challenge,
    Found,
    Frames,
    Hello,
    Kind,
    Lookup,
    Read,
    decode,
)
from lmcache.peers.sockets import PeerSocket
from lmcache.testing.frames import FrameMemory, keys
from polling import STALL_SECONDS
from unit.l2.support import run
from unit.peers.support import FRAME_BYTES, Liar, holding, known_to, reading, until_true

WANTED = keys(8)
LOAD_SECONDS = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", LOAD_SECONDS)
    monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", LOAD_SECONDS)
    monkeypatch.setattr(limits, "PEER_FIRST_RATE", 1e9)
    monkeypatch.setattr(limits, "PEER_HELLO_SECONDS", 1.0)


async def silence() -> None:
    await asyncio.sleep(3600)


async def flood(sock: PeerSocket) -> None:
    while True:
        await sock.send_packed(bytes(65536))


# ---- before it is known ----------------------------------------------------------------------------------------------
async def in_hello(liar: Liar, sock: PeerSocket, what: str) -> None:
    if what == "cut":
        return
    if what == "silence":
        await silence()
    if what == "endless":
        await flood(sock)
    if what == "another protocol":
        await sock.send_packed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await silence()
    if what == "a huge message":
        await sock.send_packed(HEADER.pack(MAGIC, Kind.CHALLENGE, 0, 0, 0xFFFFFFFF))
        await silence()
    await sock.expect(Kind.HELLO, 0, Hello)
    if what == "another version":
        await sock.send(Kind.CHALLENGE, 0, Challenge(PROTOCOL_VERSION + 1, bytes(32)))
        await silence()
    if what == "half of a message":
        await sock.send_packed(HEADER.pack(MAGIC, Kind.CHALLENGE, 0, 0, 100) + b"x" * 50)
        return
    if what == "no identity":
        await sock.send(Kind.CHALLENGE, 0, Challenge(PROTOCOL_VERSION, bytes(32)))
        await sock.receive()
        await sock.send(Kind.WELCOME, 0, Challenge(PROTOCOL_VERSION, bytes(32)))
        await silence()


HELLO_LIES = [
    *("cut", "silence", "endless", "another protocol", "a huge message", "another version", "half of a message"),
    "no identity",
]


@pytest.mark.parametrize("what", HELLO_LIES)
def test_one_that_never_gets_known_costs_nothing(what: str) -> None:
    async def test() -> None:
        async def script(liar: Liar, sock: PeerSocket) -> None:
            await in_hello(liar, sock, what)

        with holding(WANTED) as (honest,):
            async with Liar(script, honest) as liar, reading([honest.address, liar.address], connects=False) as reader:
                await reader.connected(honest.address)
                await reader.gets(WANTED)
                assert not reader.peer(liar.address)["connected"]

    run(test)


# ---- in lookups ------------------------------------------------------------------------------------------------------
def found(count: int, size: int = FRAME_BYTES) -> Found:
    return Found(1, array("Q", [size] * count).tobytes(), b"")


async def in_lookup(sock: PeerSocket, number: int, count: int, what: str) -> None:
    answers = {
        "too few": found(count - 1),
        "too many": found(count + 1),
        "no size of an object": found(count, 17),
        "a huge size": found(count, 1 << 60),
        "odd slots": Found(1, found(count).sizes, bytes(3)),
    }
    if what in answers:
        await sock.send(Kind.FOUND, number, answers[what])
        await silence()
    if what == "another number":
        await sock.send(Kind.FOUND, number + 5, found(count))
        await silence()
    if what == "another kind":
        await sock.send(Kind.FRAMES, number, Frames(b""))
        await silence()
    if what == "endless":
        await flood(sock)
    if what == "half":
        await sock.send_packed(HEADER.pack(MAGIC, Kind.FOUND, 0, number, 100) + b"x")
    if what == "silence":
        await silence()


LOOKUP_LIES = [
    *("too few", "too many", "no size of an object", "a huge size", "odd slots", "another number", "another kind"),
    *("endless", "half", "cut", "silence"),
]


def true_of(status: dict[str, object]) -> set[str]:
    return {name for name, value in status.items() if value}


@pytest.mark.parametrize("what", LOOKUP_LIES)
def test_one_that_lies_about_what_it_has_is_left_alone(what: str) -> None:
    async def test() -> None:
        asked = 0

        async def script(liar: Liar, sock: PeerSocket) -> None:
            nonlocal asked
            await liar.introducer.accept(sock)
            kind, number, body = await sock.receive()
            assert kind is Kind.LOOKUP
            asked += 1
            await in_lookup(sock, number, len(decode(body, Lookup).hashes) // 32, what)

        with holding(WANTED) as (honest,):
            async with (
                Liar(script, honest) as liar,
                reading([honest.address, liar.address], lookup_seconds=LOAD_SECONDS) as reader,
            ):
                while not reader.peer(liar.address)["left_alone"]:
                    # It is not asked again while it owes an answer, so that not every turn is one of its failures.
                    await until_true(lambda: bool({"connected", "left_alone"} & true_of(reader.peer(liar.address))))
                    await reader.gets(WANTED)
                    assert asked <= limits.PEER_BREAKER_FAILURES
                before = asked
                for _ in range(10):
                    await reader.has(WANTED)
                assert asked == before
                assert reader.peer(liar.address)["failures"]

    run(test)


# ---- in reads --------------------------------------------------------------------------------------------------------
async def in_read(sock: PeerSocket, number: int, count: int, what: str) -> None:
    memory = FrameMemory(count)
    others = keys(count, seed=9)
    for index in range(count):
        memory.fill(index, others[index] if what == "frames of other keys" else WANTED[index])
    frames = [bytearray(buffer) for buffer in memory.buffers]
    sizes = [len(frame) for frame in frames]
    if what == "flipped bytes":
        for frame in frames:
            frame[FRAME_HEADER_BYTES + 77] ^= 1
    if what == "flipped headers":
        for frame in frames:
            frame[300] ^= 1
    if what == "zeros":
        frames = [bytearray(len(frame)) for frame in frames]
    if what == "swapped frames":
        frames.reverse()
    if what == "huge frames":
        sizes = [1 << 30] * count
    if what == "small frames":
        sizes = [8192] * count
    if what == "odd sizes":
        sizes = [5000] * count
    if what == "fewer sizes":
        sizes.pop()
    if what == "cut":
        return
    if what == "silence":
        await silence()
    if what == "endless":
        await flood(sock)
    if what == "another answer":
        await sock.send(Kind.FOUND, number, found(count))
        await silence()
    if what == "an element that nests deep":
        body = b"\x92\xc4\x00" + b"\x91" * 100_000 + b"\x00"
        await sock.send_packed(HEADER.pack(MAGIC, Kind.FRAMES, 0, number, len(body)) + body)
        await silence()
    if what == "nothing, slowly":
        await asyncio.sleep(LOAD_SECONDS / 2)
    if what in ("nothing", "nothing, slowly"):
        sizes, frames = [0] * count, []
    await sock.send(Kind.FRAMES, number, Frames(array("Q", sizes).tobytes()))
    if what == "silence behind the sizes":
        await silence()
    content = b"".join(frames)
    if what in ("silence in the middle", "cut in the middle"):
        await sock.send_packed(content[: len(content) // 2 + 100])
        if what == "cut in the middle":
            return
        await silence()
    if what == "drop by drop":
        for at in range(len(content)):
            await sock.send_packed(content[at : at + 1])
            await asyncio.sleep(0.05)
    await sock.send_packed(content)
    if what == "more than was asked for":
        await flood(sock)
    await silence()


READ_LIES = [
    *("flipped bytes", "flipped headers", "zeros", "frames of other keys", "swapped frames", "huge frames"),
    *("small frames", "odd sizes", "fewer sizes", "cut", "silence", "endless", "another answer"),
    *("silence behind the sizes", "silence in the middle", "cut in the middle", "drop by drop"),
    *("an element that nests deep", "more than was asked for", "nothing", "nothing, slowly"),
]


def reads(what: str, count: Callable[[], None]) -> Callable[[Liar, PeerSocket], Awaitable[None]]:
    async def script(liar: Liar, sock: PeerSocket) -> None:
        await liar.introducer.accept(sock)
        while True:
            kind, number, body = await sock.receive()
            if kind is Kind.LOOKUP:
                await sock.send(Kind.FOUND, number, found(len(decode(body, Lookup).hashes) // 32))
            if kind is Kind.READ:
                count()
                await in_read(sock, number, len(decode(body, Read).hashes) // 32, what)
                return

    return script


@pytest.mark.parametrize("what", READ_LIES)
def test_one_that_lies_in_a_read_costs_one_deadline_and_then_nothing(what: str) -> None:
    async def test() -> None:
        asked: list[float] = []
        with holding([]) as (honest,):
            async with (
                Liar(reads(what, lambda: asked.append(time.monotonic())), honest) as liar,
                reading([honest.address, liar.address]) as reader,
            ):
                misses = 0
                while not reader.peer(liar.address)["left_alone"]:
                    await reader.finds(WANTED)  # the liar alone says it has them
                    started = time.monotonic()
                    loaded = await reader.load(WANTED)
                    # What comes behind the frames is seen by the next read.
                    assert loaded < 8 or (what == "more than was asked for" and not misses)
                    assert time.monotonic() - started < LOAD_SECONDS + 20
                    misses += 1
                    assert misses <= limits.PEER_BREAKER_FAILURES
                    if not reader.peer(liar.address)["left_alone"]:
                        await reader.connected(liar.address)
                before = len(asked)
                assert await reader.has(WANTED) == 0 and len(asked) == before
                honest.put(WANTED)
                await reader.gets(WANTED)
                assert len(asked) == before

    run(test)


@pytest.mark.parametrize("what", ["flipped bytes", "silence in the middle", "cut in the middle", "huge frames"])
def test_what_a_liar_did_not_give_comes_from_another_peer(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", STALL_SECONDS)  # the honest one has it, too
    monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", STALL_SECONDS)

    async def test() -> None:
        with holding(WANTED) as (honest,):
            async with (
                Liar(reads(what, lambda: None), honest) as liar,
                reading([liar.address, honest.address]) as reader,
            ):
                while not reader.peer(liar.address)["failures"]:
                    await reader.hears_all(WANTED)
                    assert await reader.load(WANTED) == 8

    run(test)


def test_a_slow_answer_keeps_nobody_waiting_and_holds_no_lease() -> None:
    async def test() -> None:
        released = asyncio.Event()

        async def script(liar: Liar, sock: PeerSocket) -> None:
            await liar.introducer.accept(sock)
            kind, number, body = await sock.receive()
            await asyncio.sleep(0.5)
            await sock.send(Kind.FOUND, number, found(len(decode(body, Lookup).hashes) // 32))
            while True:
                kind, number, body = await sock.receive()
                if kind is Kind.RELEASE:
                    released.set()

        with holding(WANTED[:4]) as (honest,):
            async with Liar(script, honest) as liar, reading([honest.address, liar.address]) as reader:
                await reader.finds(WANTED, 4)
                await asyncio.wait_for(released.wait(), 20)
                assert reader.sample("p2p_late_lookups_total") >= 1

    run(test)


def test_frames_of_a_cut_read_that_came_whole_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", 30.0)  # it is cut at once
    monkeypatch.setattr(limits, "PEER_IDLE_SECONDS", 30.0)

    async def test() -> None:
        with holding([]) as (honest,):
            async with (
                Liar(reads("cut in the middle", lambda: None), honest) as liar,
                reading([honest.address, liar.address]) as reader,
            ):
                await reader.finds(WANTED)
                assert await reader.load(WANTED) == 4

    run(test)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(MAGIC, Kind.HELLO, 0, 0, 0xFFFFFFFF),
        HEADER.pack(MAGIC, 99, 0, 0, 0),
        HEADER.pack(MAGIC, Kind.HELLO, 0, 0, 3) + b"\xc1\xc1\xc1",
        HEADER.pack(MAGIC, Kind.READ, 0, 0, 1) + b"\x90",
    ],
)
def test_what_callers_send_before_they_are_known_costs_nobody_else(content: bytes) -> None:
    async def test() -> None:
        with holding(WANTED) as (holder,):
            reader_of, writer = await asyncio.open_connection(*holder.address.split(":"))
            writer.write(content)
            async with reading([holder.address]) as reader:
                await reader.gets(WANTED)
                if content:
                    with contextlib.suppress(ConnectionError):
                        await asyncio.wait_for(reader_of.read(1 << 16), 20)
            writer.close()

    run(test)


@pytest.mark.parametrize("what", ["odd keys", "no keys", "too many keys", "another kind"])
def test_a_known_peer_that_breaks_the_protocol_is_told_so(what: str) -> None:
    async def test() -> None:
        with holding(WANTED) as (holder,):
            async with reading([holder.address]) as reader:
                sock = await known_to(holder)
                messages = {
                    "odd keys": (Kind.READ, Read(bytes(32), bytes(64))),
                    "no keys": (Kind.READ, Read(b"", b"")),
                    "too many keys": (Kind.READ, Read(bytes(32 * 257), bytes(32 * 257))),
                    "another kind": (Kind.WELCOME, Read(b"", b"")),
                }
                await sock.send(messages[what][0], 1, messages[what][1])
                with pytest.raises(ProtocolError):
                    await sock.expect(Kind.FRAMES, 1, Frames)
                sock.close()
                await reader.gets(WANTED)

    run(test)


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end() -> None:
    async def test() -> None:
        wanted = keys(200, seed=3)
        with holding(wanted, slots=256) as (holder,):
            async with reading([holder.address]):
                sock = await known_to(holder)
                digests = b"".join(key.namespace.digest for key in wanted)
                for number in range(1, 9):
                    await sock.send(Kind.READ, number, Read(digests, b"".join(key.chunk_hash for key in wanted)))
                await until_true(lambda: holder.leases > 0)
                assert holder.listener.stop()
                assert not holder.leases
                sock.close()

    run(test)
