"""Real servers whose folder holds encoded objects: killed, started again, with the same serde, another one and none."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer, http_json
from polling import until
from process.places import Place
from process.support import SmallEngine, split

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


def test_what_is_encrypted_opens_with_its_key_alone_and_no_key_is_shown(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = "5ec2e7" + "01" * 29, "5ec2e7" + "02" * 29
    path = tmp_path / "master.key"
    seen = ""

    def put(*keys: str) -> list[dict[str, str]]:
        path.write_text("".join(f"{key}\n" for key in keys))
        path.chmod(0o600)
        return [{"type": "exponent"}, {"type": "aesgcm", "master_key_path": str(path)}]

    with running(place, put(old)) as server, SmallEngine(place.port) as engine:
        tokens = engine.tokens(*range(CHUNKS))
        payloads = [engine.payload(chunk_hash) for chunk_hash in split(engine.hashes(tokens))]
        assert engine.store(tokens) == CHUNKS
        until(lambda: objects_held(server) == CHUNKS)
        for page in ("/config", "/status", "/metrics"):
            seen += json.dumps(http_json(server.http_port, "GET", page)[1])
        server.signal_group(signal.SIGABRT)  # with whatever a crash prints
        server.popen.wait(30)
        seen += server.log()
    monkeypatch.setenv("MASTER_KEY", old)
    with running(place, [{"type": "exponent"}, {"type": "aesgcm", "master_key_env": "MASTER_KEY"}]) as server:
        until(lambda: objects_held(server) == CHUNKS)
        with SmallEngine(place.port) as engine:
            found = engine.lookup("all", tokens)
            assert found.chunks == CHUNKS and engine.read(found)
        seen += json.dumps(http_json(server.http_port, "GET", "/config")[1])
        server.kill()
        seen += server.log()
    with running(place, put(new)) as server, SmallEngine(place.port) as engine:
        until(lambda: objects_held(server) == CHUNKS)
        assert engine.lookup("none", tokens).chunks == 0
        assert server.metric("lmcache_mp_l2_serde_unreadable_total") == CHUNKS
        assert server.metric("lmcache_mp_corrupt_frames_total") == 0
        assert engine.store(tokens) == CHUNKS
        until(lambda: objects_held(server) == CHUNKS)
        server.kill()
        seen += server.log()
    with running(place, put(new)) as server, SmallEngine(place.port) as engine:
        until(lambda: objects_held(server) == CHUNKS)
        found = engine.lookup("all", tokens)
        assert found.chunks == CHUNKS and engine.read(found)
    stored = b"".join(file.read_bytes() for file in (place.folder / "kv").rglob("*") if file.is_file())
    assert "aesgcm" in seen and len(stored) >= CHUNKS * 8192
    assert "5ec2e7" not in seen.lower() and bytes.fromhex(old) not in stored and bytes.fromhex(new) not in stored
    assert not any(payload[at : at + 64] in stored for payload in payloads for at in range(0, len(payload), 1024))
