"""Transfer engines read from a peer without its doing: what it says of its memory is believed for no byte, and whatever
becomes of the libraries, TCP gives what they do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache.core import limits
from lmcache.core.framed_messages import framed
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import ResourceError
from lmcache.memory.ownership import other_writer_lives
from lmcache.peers.transports.library import ENGINES, LibrarySettings, Ready, Region, refuse_missing
from lmcache.peers.transports.library_process import LibraryProcess
from lmcache.peers.transports.mooncake_te import choose_family
from lmcache.testing.frames import PAYLOAD_BYTES, keys
from services import need_engine
from unit.l2.support import run
from unit.peers.support import FRAME_BYTES, Holder, Reader, ToldLibrary, holding, reading, until_true

pytestmark = pytest.mark.usefixtures("patient")

WANTED = keys(8)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    need_engine(request.param)
    monkeypatch.setattr(limits, "L2_BREAKER_OPEN_SECONDS", 0.2)
    monkeypatch.setattr(limits, "L2_BREAKER_MAX_OPEN_SECONDS", 0.2)
    return str(request.param)


@contextlib.asynccontextmanager
async def pair(engine: str, host: str = "127.0.0.1") -> AsyncIterator[tuple[Holder, ToldLibrary, Reader]]:
    with holding(WANTED, transfer_engine=engine, library_host=host) as (holder,):
        assert holder.library is not None
        async with reading([holder.address], transfer_engine=engine, library_host=host) as reader:
            yield holder, holder.library, reader


async def loads_by(transport: str, reader: Reader, wanted: Sequence[ObjectKey] = WANTED) -> None:
    """Until all come by that transport. Each byte that comes by any is right."""

    def came() -> float:
        return reader.sample("p2p_received_bytes_total", transport=transport)

    async def whole_load() -> bool:
        before = came()
        await reader.gets(wanted)
        return came() - before == len(wanted) * FRAME_BYTES

    deadline = time.monotonic() + 60
    while not await whole_load():
        assert time.monotonic() < deadline, f"not by {transport}"
        await asyncio.sleep(0.05)


def changed(**fields: object) -> Callable[[bytes], bytes]:
    def lie(region: bytes) -> bytes:
        honest = msgspec.msgpack.decode(region, type=Region)
        return msgspec.msgpack.encode(msgspec.structs.replace(honest, **fields))

    return lie


def moved(offset: int) -> Callable[[bytes], bytes]:
    return lambda region: changed(address=msgspec.msgpack.decode(region, type=Region).address + offset)(region)


LIES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "no region": lambda _: b"\xc1" * 100,
    "other types": lambda _: msgspec.msgpack.encode([1, 2, 3, 4]),
    "too small": changed(size_bytes=4096),
    "an address that there cannot be": changed(address=-5),
    "an address beyond all": changed(address=(1 << 64) - 1),
    "memory that is not its own": moved(1 << 40),
    "other frames of its memory": moved(FRAME_BYTES),
    "metadata of nobody": changed(metadata=b"x" * 300, name="127.0.0.1:1"),
    "metadata that nests deep": lambda _: b"\x91" * 100_000,
    "a name that there cannot be": changed(name="\0" * 1000, metadata=b""),
}


def test_servers_at_ipv6_addresses_read_from_each_other(engine: str) -> None:
    async def test() -> None:
        async with pair(engine, "::1") as (_, _, reader):
            await loads_by(engine, reader)

    run(test)


@pytest.mark.parametrize(
    ("families", "is_ipv6"),
    [
        ([socket.AF_INET6], True),
        ([socket.AF_INET6, socket.AF_INET], False),
        ([socket.AF_INET], False),
        ([], False),
    ],
)
def test_a_name_with_ipv6_addresses_alone_is_one_for_mooncake(
    families: list[int], is_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not families:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family, socket.SOCK_STREAM, 6, "", ()) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(os, "environ", {})
    choose_family("node.example")
    assert os.environ == ({"MC_USE_IPV6": "1"} if is_ipv6 else {})


@pytest.mark.parametrize("what", LIES)
def test_a_peer_that_lies_about_its_memory_is_read_over_tcp(what: str, engine: str) -> None:
    async def test() -> None:
        async with pair(engine) as (_, library, reader):
            library.tells = LIES[what]
            await reader.gets(WANTED)
            assert reader.sample("p2p_received_bytes_total", transport="tcp") >= len(WANTED) * FRAME_BYTES
            assert not reader.sample("p2p_received_bytes_total", transport=engine)
            assert reader.sample("p2p_failures_total", reason="transfer_engine")
            library.tells = lambda region: region
            await loads_by(engine, reader)

    run(test)


def test_what_was_overwritten_since_the_lookup_is_a_miss(engine: str) -> None:
    async def test() -> None:
        async with pair(engine) as (holder, _, reader):
            await loads_by(engine, reader)
            slots = [holder.slot_of(key) for key in WANTED]
            await reader.finds(WANTED)
            holder.l1.core.clear()
            for slot in slots:
                payload = holder.l1.memory.view(slot + FRAME_HEADER_BYTES, PAYLOAD_BYTES)
                payload[7] ^= 1
            assert await reader.load(WANTED) == 0
            assert not await reader.has(WANTED)

    run(test)


def test_buffers_outside_of_l1_are_filled_over_tcp(engine: str) -> None:
    async def test() -> None:
        async with pair(engine) as (_, _, reader):
            await loads_by(engine, reader)
            before = reader.sample("p2p_received_bytes_total", transport=engine)
            reader.is_inside = False
            await reader.gets(WANTED)
            assert reader.sample("p2p_received_bytes_total", transport=engine) == before
            reader.is_inside = True
            await loads_by(engine, reader)

    run(test)


def test_a_library_that_ends_is_started_again(engine: str) -> None:
    """On either side; a read that it ends gives no byte that is wrong."""

    async def test() -> None:
        async with pair(engine) as (holder, library, reader):
            await loads_by(engine, reader)
            for either in (library, reader.library):
                os.kill(either.pid, signal.SIGKILL)
                await loads_by(engine, reader)
            await until_true(lambda: not holder.leases)

    run(test)


@pytest.mark.parametrize("side", ["the peer's", "this server's"])
def test_a_library_that_stands_still_costs_half_a_deadline(
    side: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", 4.0)

    async def test() -> None:
        async with pair(engine) as (_, library, reader):
            await loads_by(engine, reader)
            stopped = (library if side == "the peer's" else reader.library).pid
            os.kill(stopped, signal.SIGSTOP)
            started = time.monotonic()
            await reader.finds(WANTED)
            assert await reader.load(WANTED) == len(WANTED)
            assert time.monotonic() - started < 20
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
            await loads_by(engine, reader)

    run(test)


def test_a_peer_that_is_slow_is_no_fault_of_another(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its read ends the process for all, and what waited for another peer comes over TCP."""
    monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", 6.0)

    async def test() -> None:
        of_first, of_second = WANTED[:4], WANTED[4:]
        with holding(of_first, of_second, transfer_engine=engine) as holders:
            async with reading([holder.address for holder in holders], transfer_engine=engine) as reader:
                await loads_by(engine, reader)
                before = reader.sample("p2p_failures_total", reason="transfer_engine")
                await reader.finds(WANTED)
                os.kill(reader.library.pid, signal.SIGSTOP)
                memory = reader.memory_for(len(WANTED))
                first = asyncio.ensure_future(reader.runner.load(of_first, memory.buffers[:4], lambda: None))
                await asyncio.sleep(1.0)
                second = asyncio.ensure_future(reader.runner.load(of_second, memory.buffers[4:], lambda: None))
                outcomes = [*await first, *await second]
                assert outcomes == [LoadOutcome.LOADED] * len(WANTED)
                assert all(memory.holds(index, key) for index, key in enumerate(WANTED))
                assert reader.sample("p2p_failures_total", reason="transfer_engine") == before + 1

    run(test)


def test_a_read_that_could_not_end_in_time_is_not_begun(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with pair(engine) as (_, _, reader):
            await loads_by(engine, reader)
            before, pid = reader.sample("p2p_failures_total", reason="transfer_engine"), reader.library.pid
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(limits, "PEER_LOAD_FLOOR_SECONDS", 0.0)
            monkeypatch.setattr(limits, "PEER_LOAD_MARGIN", 0.3 * limits.PEER_FIRST_RATE / (len(WANTED) * FRAME_BYTES))
            await reader.gets(WANTED)
            os.kill(pid, signal.SIGCONT)
            assert reader.library.pid == pid and reader.library.region
            assert reader.sample("p2p_failures_total", reason="transfer_engine") == before

    run(test)


def test_the_deadline_of_loads_is_not_that_of_a_slow_import(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)

    async def test() -> None:
        with holding(WANTED, transfer_engine=engine) as (holder,):
            monkeypatch.setattr(sys, "executable", str(program))
            async with reading([holder.address], transfer_engine=engine, load_seconds=2.0) as reader:
                assert reader.library.region

    run(test)


def limited(folder: Path, limit: str) -> str:
    """A program in place of Python, in which a transfer engine has that limit."""
    code = f"from lmcache.core import limits; limits.{limit}; from lmcache.peers.transports import library_main"
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}; library_main.main()"\n')
    program.chmod(0o700)
    return str(program)


def test_a_read_that_waited_until_its_end_in_the_process_is_not_begun(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = limited(tmp_path, "PEER_LEAST_READ_SECONDS = 1000.0")

    async def test() -> None:
        with holding(WANTED, transfer_engine=engine) as (holder,):
            monkeypatch.setattr(sys, "executable", program)
            async with reading([holder.address], transfer_engine=engine) as reader:
                pid = reader.library.pid
                for _ in range(3):
                    await reader.gets(WANTED)
                assert not reader.sample("p2p_received_bytes_total", transport=engine)
                assert not reader.sample("p2p_failures_total", reason="transfer_engine")
                assert reader.library.pid == pid and reader.library.region

    run(test)


def test_a_peer_that_was_forgotten_is_read_again(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = limited(tmp_path, "MAX_PEERS = 1")

    async def test() -> None:
        with holding(WANTED[:4], WANTED[4:], transfer_engine=engine) as holders:
            monkeypatch.setattr(sys, "executable", program)
            async with reading([holder.address for holder in holders], transfer_engine=engine) as reader:
                for _ in range(5):
                    for wanted in (WANTED[:4], WANTED[4:]):
                        await loads_by(engine, reader, wanted)
                assert not reader.sample("p2p_failures_total", reason="transfer_engine")

    run(test)


def test_only_a_process_that_reads_into_l1_keeps_its_slots_taken(engine: str) -> None:
    async def test() -> None:
        async with pair(engine) as (holder, _, reader):
            assert reader.l1 is not None
            next_epoch = b"\xff" * 16
            fds = [os.open(l1.memory.path, os.O_RDWR) for l1 in (reader.l1, holder.l1)]
            assert [other_writer_lives(fd, next_epoch) for fd in fds] == [True, False]
            assert not reader.l1.memory.other_writer_lives()
            pid = reader.library.pid
            os.kill(pid, signal.SIGSTOP)
            assert other_writer_lives(fds[0], next_epoch)
            os.kill(pid, signal.SIGKILL)
            await until_true(lambda: not Path(f"/proc/{pid}").exists())
            await loads_by(engine, reader)
            assert other_writer_lives(fds[0], next_epoch)
            for fd in fds:
                os.close(fd)

    run(test)


def test_a_cancelled_load_ends_when_nothing_is_written_any_more(engine: str) -> None:
    async def test() -> None:
        async with pair(engine) as (_, _, reader):
            await loads_by(engine, reader)
            await reader.finds(WANTED)
            first = reader.library.pid
            os.kill(first, signal.SIGSTOP)
            loading = asyncio.ensure_future(reader.adapter.load(WANTED, reader.memory_for(len(WANTED)).buffers))
            await asyncio.sleep(0.2)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            assert not Path(f"/proc/{first}").exists()
            await loads_by(engine, reader)

    run(test)


def test_a_library_that_cannot_be_used_says_why(engine: str) -> None:
    async def test() -> None:
        settings = LibrarySettings(engine, "/dev/shm/nothing", 1 << 20, bytes(16), "127.0.0.1", serves=True)
        with pytest.raises(ResourceError, match="/dev/shm/nothing"):
            await LibraryProcess(settings, this_host_alone=True).start()

    run(test)


def test_what_keeps_a_process_from_its_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LibrarySettings(ENGINES[0], "/dev/shm/nothing", 1 << 20, bytes(16), "127.0.0.1", serves=True)
    started: list[subprocess.Popen[bytes]] = []

    class Counted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def start() -> None:
        await LibraryProcess(settings, this_host_alone=True).start()

    monkeypatch.setattr(subprocess, "Popen", Counted)
    with pytest.raises(ResourceError, match="can't start new thread"), monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", no_thread)
        run(start)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match=r"ended before it was ready \(exit status 1\)"):
        run(start)


class ReadyAtOnce:
    """In place of the process: it has answered before anybody asks."""

    pid = 0

    def __init__(self, command: Sequence[str], stdin: int, **_: object) -> None:
        self._channel = socket.socket(fileno=os.dup(stdin))
        self._channel.sendall(framed(Ready(b"region", "")))
        self._has_ended = threading.Event()

    def wait(self) -> int:
        self._has_ended.wait()
        return 0

    def kill(self) -> None:
        self._channel.close()
        self._has_ended.set()


def test_a_start_that_is_given_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever moment, also when the process has become ready."""
    monkeypatch.setattr(subprocess, "Popen", ReadyAtOnce)
    settings = LibrarySettings(ENGINES[0], "", 0, bytes(16), "", serves=False)

    async def give_up_after(turns: int) -> bool:
        """Of the loop. False when it had started by then."""
        library = LibraryProcess(settings, this_host_alone=True)
        starting = asyncio.ensure_future(library.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        was_under_way = starting.cancel()
        await asyncio.wait({starting})
        await library.close()
        assert starting.cancelled() == was_under_way
        return was_under_way

    async def test() -> None:
        turns = 0
        while await give_up_after(turns):
            turns += 1
        assert turns > 5

    run(test)


def test_a_missing_package_is_one_sentence(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError) as refusal:
        refuse_missing(engine)
    sentence = str(refusal.value)
    assert sentence.startswith(f"--p2p-transfer-engine {engine} needs the package") and "pip install" in sentence
