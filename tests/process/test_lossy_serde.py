"""Real servers with a lossy serde: only an engine that accepts it by name finds what went through it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.frame import verify_frames
from lmcache.core.key import Namespace, ObjectKey, accepting_layout
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.protocol import messages as m
from lmcache.testing.processes import CacheServer
from polling import until
from process.places import Place
from process.support import LAYOUT, SmallEngine, split, unpack_slots

CHUNKS = 8
PAYLOAD_BYTES = 16_384
FP8: dict[str, Any] = {"type": "fp8"}
CACHEGEN: dict[str, Any] = {"type": "cachegen"}
FP8_E5M2: dict[str, Any] = {"type": "fp8", "fp8_dtype": "float8_e5m2"}
BOUND = 1 / 16 + 1 / 128  # of a value: half a step of e4m3, and what bfloat16 rounds
STEP_BOUND = 4 / 30 / 0.1 + 1 / 128  # of the smallest value here, where the largest is 4: half a step of 32 bins


class Bfloat16Engine(SmallEngine):
    """Its KV is bfloat16. `accepts`: a lossy serde."""

    def __init__(self, port: int, accepts: str = "") -> None:
        super().__init__(port, payload_bytes=PAYLOAD_BYTES, layout=accepting_layout(LAYOUT, accepts))

    def __enter__(self) -> Bfloat16Engine:
        self.start()
        return self

    def payload(self, chunk_hash: bytes) -> bytes:
        rng = random.Random(chunk_hash)
        count = self.payload_bytes // 2
        packed = struct.pack(f"<{count}f", *(rng.choice((-1, 1)) * rng.uniform(0.1, 4) for _ in range(count)))
        return b"".join(packed[at + 2 : at + 4] for at in range(0, len(packed), 4))

    def errors(self, reply: m.LookupReply) -> list[float]:
        """The largest error of each hit chunk, relative to the value. AssertionError for what is no whole frame."""
        memory = self.client.memory
        assert memory is not None
        of = Namespace("model", 1, 0, 0, self.layout, "")
        found = []
        for chunk_hash, slot in zip(split(reply.hashes), unpack_slots(reply.slots)):  # noqa: B905
            frame = memory.view(slot, FRAME_HEADER_BYTES + self.payload_bytes)
            assert verify_frames([ObjectKey(of, chunk_hash)], [frame]) == [""]
            exact = values(self.payload(chunk_hash))
            found.append(
                max(abs(a - b) / abs(b) for a, b in zip(values(bytes(frame[FRAME_HEADER_BYTES:])), exact, strict=True))
            )
        return found


def values(payload: bytes) -> Sequence[float]:
    widened = b"".join(b"\0\0" + payload[at : at + 2] for at in range(0, len(payload), 2))
    return struct.unpack(f"<{len(payload) // 2}f", widened)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


@contextmanager
def running(place: Place, *serdes: Any) -> Iterator[CacheServer]:
    """A server with a folder for each serde, all of one name where they are equal."""
    options = []
    for index, serde in enumerate(serdes):
        spec = {"type": "fs_native", "base_path": str(place.folder / f"kv-{index}")}
        options += ["--l2-adapter", json.dumps({**spec, "serde": serde} if serde else spec)]
    with place.server(*options) as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log() and "corrupt" not in server.log()


def objects_held(server: CacheServer, adapter: int = 0) -> int:
    return int(server.status()["l2"]["adapters"][adapter]["objects"])


def stored_by_an_engine_that_accepts(place: Place, accepts: str, *serdes: Any) -> bytes:
    """Its tokens; they are on the first adapter, and L1 is gone with the server."""
    with running(place, *serdes) as server, Bfloat16Engine(place.port, accepts) as engine:
        tokens = engine.tokens(*range(CHUNKS))
        assert engine.store(tokens) == CHUNKS
        found = engine.lookup("fresh", tokens)
        assert found.chunks == CHUNKS and engine.read(found), "L1 has what was stored, and nothing that was encoded"
        until(lambda: objects_held(server) == CHUNKS)
        server.kill()
    return tokens


@pytest.mark.parametrize(("name", "serde", "bound"), [("fp8", FP8, BOUND), ("cachegen", CACHEGEN, STEP_BOUND)])
def test_an_engine_that_accepts_the_serde_finds_what_went_through_it_and_no_other_does(
    place: Place, name: str, serde: dict[str, Any], bound: float
) -> None:
    tokens = stored_by_an_engine_that_accepts(place, name, serde)
    folder = sum(file.stat().st_size for file in (place.folder / "kv-0").rglob("*") if file.is_file())
    assert folder < CHUNKS * (FRAME_HEADER_BYTES + 0.8 * PAYLOAD_BYTES)
    with running(place, serde) as server:
        until(lambda: objects_held(server) == CHUNKS)
        with Bfloat16Engine(place.port) as exact, Bfloat16Engine(place.port, f"{name}-16") as other:
            for engine in (exact, other):
                assert engine.lookup("before", tokens).chunks == 0
            with Bfloat16Engine(place.port, name) as accepting:
                found = accepting.lookup("all", tokens)
                assert found.chunks == CHUNKS and found.chunks_l1 == 0
                errors = accepting.errors(found)
                assert all(0 < error <= bound for error in errors)
                assert accepting.lookup("again", tokens).chunks_l1 == CHUNKS
            for engine in (exact, other):  # L1 has them now
                assert engine.lookup("after", tokens).chunks == 0


def test_exact_engines_and_accepting_ones_share_a_server_and_neither_gets_the_others(place: Place) -> None:
    with running(place, FP8, None) as server:
        with Bfloat16Engine(place.port) as exact, Bfloat16Engine(place.port, "fp8") as accepting:
            tokens = exact.tokens(*range(CHUNKS))
            assert exact.store(tokens) == CHUNKS and accepting.lookup("exact ones", tokens).chunks == 0
            until(lambda: objects_held(server, 1) == CHUNKS)
            assert accepting.store(tokens) == CHUNKS
            until(lambda: objects_held(server, 0) == CHUNKS)
            assert objects_held(server, 1) == CHUNKS
            assert server.metric('lmcache_mp_l2_store_dropped_total{reason="not_stored"}') == 0
        until(lambda: "is lossy, so this adapter keeps KV only of engines that accept it" in server.log())
        server.kill()
    with running(place, FP8, None) as server:
        until(lambda: objects_held(server, 0) == objects_held(server, 1) == CHUNKS)
        with Bfloat16Engine(place.port) as exact, Bfloat16Engine(place.port, "fp8") as accepting:
            near = accepting.lookup("near", tokens)
            assert near.chunks == CHUNKS and all(0 < error <= BOUND for error in accepting.errors(near))
            same = exact.lookup("same", tokens)
            assert same.chunks == CHUNKS and exact.read(same)


def test_another_configuration_of_the_serde_never_reads_what_the_first_one_wrote(place: Place) -> None:
    tokens = stored_by_an_engine_that_accepts(place, "fp8", FP8)
    sealed = [FP8, {"type": "exponent", "smallest_saving": 0}]
    for serde in (FP8_E5M2, sealed, {"type": "exponent"}, None):
        for accepts in ("", "fp8", "fp8-e5m2"):
            with running(place, serde), Bfloat16Engine(place.port, accepts) as engine:
                assert engine.lookup("none", tokens).chunks == 0
    # What the other format wrote beside them in the same folder is its own.
    with running(place, FP8_E5M2) as server, Bfloat16Engine(place.port, "fp8-e5m2") as engine:
        until(lambda: objects_held(server) == CHUNKS)
        assert engine.store(tokens) == CHUNKS
        until(lambda: objects_held(server) == 2 * CHUNKS)
        server.kill()
    with running(place, FP8) as server, Bfloat16Engine(place.port, "fp8") as engine:
        until(lambda: objects_held(server) == 2 * CHUNKS)
        found = engine.lookup("all", tokens)
        assert found.chunks == CHUNKS and all(0 < error <= BOUND for error in engine.errors(found))


def test_an_engine_is_told_of_when_no_adapter_has_the_serde_that_it_accepts(place: Place) -> None:
    with running(place, None) as server, Bfloat16Engine(place.port, "fp8") as engine:
        tokens = engine.tokens(1)
        assert engine.store(tokens) == 1 and engine.lookup("l1", tokens).chunks == 1
        until(lambda: 'It accepts the lossy serde "fp8", which no --l2-adapter has' in server.log())
        assert objects_held(server) == 0
