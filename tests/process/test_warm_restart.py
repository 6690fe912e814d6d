"""--l1-persist: what a server held is there again after its end, however it ended. Real processes, really killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.client.client import ClientState
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer, stop_running
from polling import until
from process.places import Place
from process.support import CALL_SECONDS, SmallEngine, unpack_slots
from process.test_server_process import engine_in_a_process

L1_GB = 0.0625


class WarmPlace(Place):
    @contextlib.contextmanager
    def running(self, *extra: str, persist: bool = True) -> Iterator[CacheServer]:
        with self.server(*(["--l1-persist"] if persist else []), *extra) as server:
            server.wait_ready()
            yield server
            assert "Traceback" not in server.log()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[WarmPlace]:
    place = WarmPlace(tmp_path)
    yield place
    place.close()


def recovered(server: CacheServer) -> int:
    return int(server.metric("lmcache_mp_l1_adopted_chunks_total"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_committed_is_there_again(place: WarmPlace, number: int) -> None:
    with place.running() as first, SmallEngine(place.port, heartbeat=0.2) as engine:
        tokens = engine.tokens(*range(100))
        assert engine.store(tokens) == 100
        assert engine.store(engine.tokens(7, 8), salt="tenant") == 2
        held = engine.lookup("held", tokens)
        token = engine.client.server_epoch
        os.kill(first.pid, number)
        first.popen.wait(20)
        assert place.file.exists()
        with place.running() as second:
            until(lambda: engine.client.server_epoch != token and engine.client.state is ClientState.READY)
            assert recovered(second) == 102
            until(lambda: bool(second.status()["instances"]) and bool(second.status()["instances"][0]["workers"]))
            warm = engine.lookup("warm", tokens)
            assert warm.chunks == 100
            assert warm.slots == held.slots  # where they were
            assert engine.read(warm)
            salted = engine.lookup("salted", engine.tokens(7, 8, 9), salt="tenant")
            assert (salted.chunks, engine.read(salted, salt="tenant")) == (2, True)
            assert engine.lookup("other", engine.tokens(7, 8)).chunks == 0
            assert engine.store(engine.tokens(1000)) == 1
            engine.close()  # it does not wait long for an answer

            def left() -> list[int]:
                return [second.status()["l1"][name] for name in ("quarantined_bytes", "leases", "staged")]

            until(lambda: not any(left()), tell=left)
            status = second.status()["l1"]
            assert status["used_bytes"] + status["free_bytes"] == status["committed_bytes"]


def test_without_the_flag_nothing_stays(place: WarmPlace) -> None:
    with place.running(), SmallEngine(place.port) as engine:
        engine.store(engine.tokens(1))
    assert place.file.exists()
    with place.running(persist=False) as server, SmallEngine(place.port) as engine:
        until(lambda: "that a dead server left behind" in server.log())
        assert engine.lookup("r", engine.tokens(1)).chunks == 0
        engine.store(engine.tokens(1))
        server.kill()
    with place.running() as server, SmallEngine(place.port) as engine:
        until(lambda: "not made with --l1-persist" in server.log())
        assert engine.lookup("r", engine.tokens(1)).chunks == 0


def test_another_configuration_starts_empty(place: WarmPlace) -> None:
    with place.running() as server, SmallEngine(place.port) as engine:
        engine.store(engine.tokens(1))
        inode = place.file.stat().st_ino
        server.kill()
    with place.running("--chunk-size", "128") as server, SmallEngine(place.port) as engine:
        lines = until(lambda: [line for line in server.log().splitlines() if "is not used" in line])
        assert len(lines) == 1 and "its chunks have 256 tokens, not 128" in lines[0]
        assert place.file.stat().st_ino != inode
        assert engine.lookup("r", engine.tokens(1)).chunks == 0
        assert recovered(server) == 0


def test_what_was_damaged_meanwhile_is_a_miss(place: WarmPlace) -> None:
    with place.running() as server, SmallEngine(place.port) as engine:
        for number in range(3):
            engine.store(engine.tokens(number))
        slots = [unpack_slots(engine.lookup(f"r{n}", engine.tokens(n)).slots)[0] for n in range(3)]
        server.kill()
    with place.file.open("r+b") as file:
        for number, at in enumerate([50, FRAME_HEADER_BYTES + 100]):
            file.seek(slots[number] + at)
            byte = file.read(1)[0]
            file.seek(slots[number] + at)
            file.write(bytes([byte ^ 0x20]))
    with place.running() as server, SmallEngine(place.port) as engine:
        assert recovered(server) == 2
        assert engine.lookup("r0", engine.tokens(0)).chunks == 0
        payload = engine.lookup("r1", engine.tokens(1))
        assert payload.chunks == 1 and not engine.read(payload)
        engine.client.call("release", m.Release(engine.instance_id, payload.lease, [0]), CALL_SECONDS)
        assert engine.lookup("again", engine.tokens(1)).chunks == 0
        assert engine.read(engine.lookup("r2", engine.tokens(2)))


RESERVE = """
hashes = engine.hashes(engine.tokens(1, 2, 3))
reply = engine.reserve(hashes)
engine.fill(hashes, unpack_slots(reply.slots))  # everything but the commit
engine.store(engine.tokens(9))
"""


def test_what_a_live_engine_may_still_write_is_nobody_elses(place: WarmPlace, tmp_path: Path) -> None:
    """An engine that stands still in the middle of a store, over two restarts, and then goes on."""
    with place.running() as first:
        stopped = engine_in_a_process(first, tmp_path, RESERVE)
        stop_running(stopped.pid)
        first.kill()
    try:
        for _ in range(2):
            with place.running() as server, SmallEngine(place.port) as engine:
                assert recovered(server) == 1
                assert server.status()["l1"]["quarantined_bytes"] == 3 * 8192
                assert engine.lookup("a", engine.tokens(1)).chunks == 0
                assert engine.read(engine.lookup("b", engine.tokens(9)))
                server.kill()
        with place.running() as server, SmallEngine(place.port) as engine:
            for number in range(20):  # L1 is full: nothing of it is where the engine may write
                engine.store(engine.tokens(*range(1000 * number, 1000 * number + 1000)))
            assert server.status()["l1"]["quarantined_bytes"] == 3 * 8192
            stopped.send_signal(signal.SIGCONT)  # it finds the new server and lets go of the previous epoch
            until(lambda: server.status()["l1"]["quarantined_bytes"] == 0)
            assert engine.read(engine.lookup("c", engine.tokens(*range(19000, 20000))))
    finally:
        stopped.kill()
        stopped.wait()


def test_what_a_dead_engine_was_writing_is_free(place: WarmPlace, tmp_path: Path) -> None:
    with place.running() as first:
        engine_process = engine_in_a_process(first, tmp_path, RESERVE)
        first.kill()
        engine_process.kill()
        engine_process.wait()
    with place.running() as server:
        assert (recovered(server), server.status()["l1"]["quarantined_bytes"]) == (1, 0)


def test_owner_numbers_are_never_used_twice(place: WarmPlace) -> None:
    with place.running() as first, SmallEngine(place.port, heartbeat=0.2) as engine:
        previous = {engine.client.owner(engine.instance_id), engine.client.owner(engine.instance_id, 0)}
        token = engine.client.server_epoch
        first.kill()
        with place.running(), SmallEngine(place.port) as other:
            until(lambda: engine.client.server_epoch != token and engine.client.state is ClientState.READY)
            until(lambda: engine.client.owner(engine.instance_id, 0) is not None)
            now = {side.client.owner(side.instance_id, worker) for side in (engine, other) for worker in (-1, 0)}
            assert len(now) == 4 and not now & previous


def test_builtin_hashes_with_a_fixed_seed_find_what_the_previous_process_stored(tmp_path: Path) -> None:
    """Two processes, each with its memory at other addresses."""
    options = {"l1_size_gb": L1_GB, "l2_folder": tmp_path / "l2", "environment": {"PYTHONHASHSEED": "0"}}
    extra = ["--hash-algorithm", "builtin"]
    with CacheServer(tmp_path, extra=extra, **options) as first:  # type: ignore[arg-type]
        first.wait_ready()
        with SmallEngine(first.port) as engine:
            assert engine.store(engine.tokens(*range(8))) == 8
            until(lambda: len(list((tmp_path / "l2").rglob("*.data"))) == 8, tell=first.log)
    with CacheServer(tmp_path, extra=extra, log_name="second.log", **options) as second:  # type: ignore[arg-type]
        second.wait_ready()
        with SmallEngine(second.port) as engine:
            reply = engine.lookup("again", engine.tokens(*range(8)))
            assert (reply.chunks, reply.chunks_l1) == (8, 0)
            assert engine.read(reply)
