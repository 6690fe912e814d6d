"""Our worker side with a real server, in two processes: store, evict, load beside a running stream, abort, kill -9."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lmcache.testing.gpu import why_no_gpu  # noqa: E402
from lmcache.testing.processes import CacheServer  # noqa: E402
from polling import until  # noqa: E402
from process.paged_engine import SHAPES, engine_process  # noqa: E402

CHUNKS = 6  # of a prompt
HALF = SHAPES["small"].chunks // 2


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    missing = why_no_gpu() if request.param == "cuda" else ""
    if missing:
        pytest.skip(missing)
    return str(request.param)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with CacheServer(tmp_path, l1_size_gb=0.03125) as running:  # 248 chunks of 128 KiB
        running.wait_ready()
        yield running
        (Path("/dev/shm") / running.shm_name).unlink(missing_ok=True)


def held(server: CacheServer) -> int:
    status = server.status()
    return int(status["leases"]) + int(status["reservations"])


def test_what_is_stored_is_loaded_until_it_is_evicted(server: CacheServer, device: str) -> None:
    with engine_process(server.port, "first", device) as engine:
        for prompt in range(45):
            engine.ask("store", prompt=prompt, chunks=CHUNKS)
        # The newest first: what is used last goes first where the server makes room meanwhile.
        found = [engine.ask("load", prompt=prompt, chunks=CHUNKS) for prompt in reversed(range(45))]
        assert all(load["exact"] == load["hit"] and not load["failed"] for load in found)
        assert found[0]["hit"] == CHUNKS and found[-1]["hit"] == 0
        engine.ask("store", prompt=44, chunks=CHUNKS)
        assert engine.ask("load", prompt=44, chunks=HALF)["hit"] == CHUNKS
    until(lambda: not held(server))


def test_loads_and_stores_beside_a_running_stream(server: CacheServer, device: str) -> None:
    with engine_process(server.port, "stream", device) as engine:
        beside = engine.ask("steps", prompt=3, chunks=CHUNKS, seconds=0.3)
        assert min(beside["stored"], beside["loaded"]) >= CHUNKS
        # Stores do not run out, however fast they are.
        until(lambda: engine.ask("steps", prompt=4, chunks=1, seconds=0.3, names=2)["stored"] > 2)
        assert engine.ask("load", prompt=3, chunks=CHUNKS) == {"hit": CHUNKS, "exact": CHUNKS, "failed": 0}


def test_an_aborted_load_does_not_write_to_a_new_owner(server: CacheServer, device: str) -> None:
    with engine_process(server.port, "aborts", device) as engine:
        engine.ask("store", prompt=1, chunks=CHUNKS)
        for _ in range(5):
            assert engine.ask("abort", prompt=1, chunks=CHUNKS) == {"hit": CHUNKS, "overwritten": 0}
        assert engine.ask("load", prompt=1, chunks=CHUNKS)["exact"] == CHUNKS
    until(lambda: not held(server))


def test_an_engine_that_is_killed_leaves_nothing_wrong(server: CacheServer, device: str) -> None:
    with engine_process(server.port, "other", device) as other:
        for number in range(2):
            with pytest.raises(RuntimeError, match="has ended"), engine_process(server.port, "lost", device) as lost:
                lost.ask("store", prompt=number, chunks=CHUNKS)
                lost.ask("begin_store", prompt=100 + number, chunks=CHUNKS)
                lost.kill()
                lost.ask("idle")
            assert other.ask("load", prompt=number, chunks=CHUNKS) == {"hit": CHUNKS, "exact": CHUNKS, "failed": 0}
            torn = other.ask("load", prompt=100 + number, chunks=CHUNKS)
            assert torn["exact"] == torn["hit"] and not torn["failed"]
            other.ask("store", prompt=100 + number, chunks=CHUNKS)
        until(lambda: not held(server))
