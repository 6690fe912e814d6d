"""Real servers whose folder holds encoded objects: killed, started again, with the same serde, another one and none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer
from polling import until
from process.places import Place
from process.support import SmallEngine

CHUNKS = 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


@contextmanager
def running(place: Place, serde: Any) -> Iterator[CacheServer]:
    spec = {"type": "fs_native", "base_path": str(place.folder / "kv")}
    with place.server("--l2-adapter", json.dumps({**spec, "serde": serde} if serde else spec)) as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log()


def objects_held(server: CacheServer) -> int:
    return int(server.status()["l2"]["adapters"][0]["objects"])


def test_what_one_server_encoded_another_one_serves_and_no_other_serde_reads(place: Place) -> None:
    sealed = [{"type": "exponent", "smallest_saving": 0}, {"type": "zstd", "smallest_saving": 0}]
    with running(place, sealed) as server, SmallEngine(place.port) as engine:
        tokens = engine.tokens(*range(CHUNKS))
        assert engine.store(tokens) == CHUNKS
        until(lambda: objects_held(server) == CHUNKS)
        server.kill()
    for serde in (None, {"type": "zstd"}):
        with running(place, serde), SmallEngine(place.port) as engine:
            assert engine.lookup("none", tokens).chunks == 0
    with running(place, sealed) as server, SmallEngine(place.port) as engine:
        until(lambda: objects_held(server) >= CHUNKS)
        found = engine.lookup("all", tokens)
        assert found.chunks == CHUNKS and engine.read(found)
        assert server.status()["l2"]["adapters"][0]["serde"] == "exponent,zstd"
        assert server.metric("lmcache_mp_corrupt_frames_total") == 0
