"""Administration of a real server over HTTP: real objects in L1 and in a folder, of a small engine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from lmcache.admin import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import CacheServer
from polling import until
from process.support import SmallEngine

CHUNKS = 6


class Operator:
    """Asks a server over HTTP."""

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{server.http_port}", timeout=60)

    def ask(self, method: str, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        answer = self.http.request(method, path, json=body, params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def listed(self, **query: Any) -> list[m.ObjectEntry]:
        entries: list[m.ObjectEntry] = []
        token = ""
        while True:
            answer = self.http.get("/cache/objects", params={**query, "page_token": token})
            assert answer.status_code == 200, answer.text
            page = msgspec.json.decode(answer.content, type=m.ObjectPage)
            entries += page.entries
            if not (token := page.next_page_token):
                return entries

    def finished(self, request_id: str) -> dict[str, Any]:
        until(lambda: self.ask("GET", f"/jobs/{request_id}")["done"], 60)
        return self.ask("GET", f"/jobs/{request_id}")

    def adapter(self) -> dict[str, Any]:
        return self.ask("GET", "/status")["l2"]["adapters"][0]

    def stored_in_l2(self, objects: int) -> None:
        """And no longer read by what copied them there."""

        def done() -> bool:
            l2 = self.ask("GET", "/status")["l2"]
            return l2["adapters"][0]["objects"] >= objects and not l2["store"]["batches_in_flight"]

        until(done, 60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("administration")
    with CacheServer(folder, l1_size_gb=0.0625, l2_folder=folder / "l2") as server:
        server.wait_ready()
        yield server
    assert not (Path("/dev/shm") / server.shm_name).exists()


@pytest.fixture
def engine(server: CacheServer) -> Iterator[SmallEngine]:
    with SmallEngine(server.port) as engine:
        yield engine


@pytest.fixture
def operator(server: CacheServer) -> Iterator[Operator]:
    operator = Operator(server)
    with operator.http:
        operator.ask("POST", "/cache/clear", {"tier": "all", "force": True})
        yield operator


def token_list(first: int, chunks: int = CHUNKS) -> list[int]:
    return [chunk for chunk in range(first, first + chunks) for _ in range(256)]


def stored(operator: Operator, engine: SmallEngine, first: int, salt: str = "") -> bytes:
    """A prompt that both tiers have."""
    tokens = engine.tokens(*range(first, first + CHUNKS))
    before = operator.adapter()["objects"]
    assert engine.store(tokens, salt=salt) == CHUNKS
    operator.stored_in_l2(before + CHUNKS)
    return tokens


def test_objects_are_listed_page_by_page(operator: Operator, engine: SmallEngine) -> None:
    tokens = stored(operator, engine, 100, salt="alice")
    stored(operator, engine, 200)
    names = {engine.hashes(tokens)[at : at + 32].hex() for at in range(0, 32 * CHUNKS, 32)}
    in_l1 = operator.listed(tier="l1", page_size=5)
    assert len(in_l1) == 2 * CHUNKS
    assert {entry.key[65:] for entry in in_l1 if entry.cache_salt == "alice"} == names
    assert {(entry.tier, entry.model_name, entry.rank, entry.world_size) for entry in in_l1} == {("l1", "model", 0, 1)}
    assert {entry.size_bytes for entry in in_l1} == {8192}
    name = operator.adapter()["name"]
    in_l2 = operator.listed(tier="l2", page_size=5)
    assert {entry.key for entry in in_l2} == {entry.key for entry in in_l1}
    assert {entry.tier for entry in in_l2} == {name}
    assert len(operator.listed(page_size=7)) == 4 * CHUNKS
    assert len(operator.listed(adapter=name)) == 4 * CHUNKS - len(in_l1)
    assert operator.listed(model_name="another") == []
    assert len(operator.listed(model_name="model", page_size=1)) == 4 * CHUNKS
    key = in_l1[0].key
    assert {entry.key for entry in operator.listed(key=key, page_size=5)} == {key}
    assert sorted(entry.tier for entry in operator.listed(key=key[70:110])) == sorted(["l1", name])
    assert len(operator.listed(key=key[:64], tier="l1")) == CHUNKS  # of one namespace
    for part, found in (
        (key[50:70], {key}),
        (key[64:], {key}),
        (f"0{key[1:]}" if key[0] != "0" else f"1{key[1:]}", set()),
    ):
        assert {entry.key for entry in operator.listed(key=part, model_name="model")} == found
    assert len(operator.listed(key="/", tier="l1")) == 2 * CHUNKS and operator.listed(key="/0/") == []
    assert "hex digits" in operator.ask("GET", "/cache/objects", status=400, key="x")["detail"]
    assert "There is no adapter" in operator.ask("GET", "/cache/objects", status=400, adapter="none")["detail"]
    assert "begin again" in operator.ask("GET", "/cache/objects", status=400, page_token="00000000.0.0")["detail"]


def test_pages_go_on_while_objects_come_and_go(operator: Operator, engine: SmallEngine) -> None:
    for prompt in range(8):
        assert engine.store(engine.tokens(*range(1000 * prompt, 1000 * prompt + CHUNKS))) == CHUNKS
    staying = {entry.key for entry in operator.listed(tier="l1")}
    seen: list[str] = []
    token, pages = "", 0
    while True:
        page = operator.ask("GET", "/cache/objects", tier="l1", page_size=5, page_token=token)
        seen += [entry["key"] for entry in page["entries"]]
        pages += 1
        new = engine.tokens(*range(50_000 + 10 * pages, 50_000 + 10 * pages + 3))
        engine.store(new)
        doomed = [entry.key for entry in operator.listed(tier="l1") if entry.key not in staying]
        # What is being copied to L2 stays.
        operator.ask("DELETE", "/cache/objects", {"keys": doomed[:2], "tier": "l1"})
        if not (token := page["next_page_token"]):
            break
        assert pages < 200
    assert staying <= set(seen)
    assert len([key for key in seen if key in staying]) == len(staying)


def test_objects_are_deleted_from_the_tiers_that_are_named(operator: Operator, engine: SmallEngine) -> None:
    tokens = stored(operator, engine, 300)
    keys = [entry.key for entry in operator.listed(tier="l1")]
    answer = operator.ask("DELETE", "/cache/objects", {"keys": keys[:2], "tier": "l1"})
    assert answer == {"deleted": 2, "skipped": 0, "ok": True}
    assert len(operator.listed(tier="l1")) == CHUNKS - 2
    assert len(operator.listed(tier="l2")) == CHUNKS
    assert operator.ask("DELETE", "/cache/objects", {"keys": keys, "tier": "all"})["deleted"] == CHUNKS
    assert operator.listed() == []
    assert engine.lookup("gone", tokens).chunks == 0
    engine.end("gone")
    nothing = operator.ask("DELETE", "/cache/objects", {"keys": [*keys, "00" * 32 + "/" + "11" * 32]})
    assert nothing == {"deleted": 0, "skipped": CHUNKS + 1, "ok": True}


def test_what_is_leased_stays_readable(operator: Operator, engine: SmallEngine) -> None:
    tokens = stored(operator, engine, 400)
    keys = [entry.key for entry in operator.listed(tier="l1")]
    found = engine.lookup("reading", tokens)
    assert found.chunks == CHUNKS
    answer = operator.ask("DELETE", "/cache/objects", {"keys": keys, "tier": "l1", "force": True})
    assert answer == {"deleted": 0, "skipped": CHUNKS, "ok": False}
    assert engine.read(found)
    engine.end("reading")
    assert operator.ask("DELETE", "/cache/objects", {"keys": keys, "tier": "l1"})["deleted"] == CHUNKS


def test_a_lookup_tells_tiers_and_counts_as_none(operator: Operator, engine: SmallEngine) -> None:
    stored(operator, engine, 500, salt="alice")
    body = {"model_name": "model", "tokens": token_list(500) + [7] * 300, "cache_salt": "alice"}
    lookups = operator.server.metric("lmcache_mp_lookups_total")
    answer = operator.ask("POST", "/cache/lookup", body)
    name = operator.adapter()["name"]
    assert answer["prefix_chunks"] == CHUNKS and answer["chunk_tokens"] == 256
    assert [chunk["tiers"] for chunk in answer["chunks"]] == [["l1", name]] * CHUNKS + [[]]
    every = list(range(len(answer["namespaces"])))
    assert every and [chunk["in_l1"] for chunk in answer["chunks"]] == [every] * CHUNKS + [[]]
    operator.ask("POST", "/cache/clear", {"tier": "l1"})
    answer = operator.ask("POST", "/cache/lookup", body)
    assert [chunk["tiers"] for chunk in answer["chunks"]] == [[name]] * CHUNKS + [[]]
    answer = operator.ask("POST", "/cache/lookup", {**body, "cache_salt": "bob"})
    assert answer["prefix_chunks"] == 0
    assert operator.server.metric("lmcache_mp_lookups_total") == lookups
    assert operator.server.status()["leases"] == operator.server.status()["l1"]["leases"] == 0
    assert "No engine with" in operator.ask("POST", "/cache/lookup", {**body, "model_name": "no"}, 409)["detail"]


def test_a_prompt_is_named_as_an_engine_with_a_head_names_it(operator: Operator) -> None:
    """By its tokens and the next one."""
    with SmallEngine(operator.server.port, model_name="with a head", lookahead_tokens=1) as engine:
        assert engine.store(engine.tokens(900, 901) + pack_tokens([7])) == 2
        body = {"model_name": "with a head"}
        for behind, found in ([7], 2), ([8], 1), ([], 1):
            tokens = [900] * 256 + [901] * 256 + behind
            assert operator.ask("POST", "/cache/lookup", {**body, "tokens": tokens})["prefix_chunks"] == found


def test_a_prefetch_warms_l1_to_stay(operator: Operator, engine: SmallEngine) -> None:
    tokens = stored(operator, engine, 600)
    operator.ask("POST", "/cache/clear", {"tier": "l1"})
    job = operator.ask("POST", "/cache/prefetches", {"model_name": "model", "tokens": token_list(600) + [1] * 256}, 202)
    done = operator.finished(job["request_id"])
    assert (done["status"], done["objects_total"], done["objects_done"]) == ("done", CHUNKS + 1, CHUNKS)
    assert done["detail"].endswith("not_stored.")
    assert operator.ask("GET", f"/cache/prefetches/{job['request_id']}")["done"] is True
    assert len(operator.listed(tier="l1")) == CHUNKS
    found = engine.lookup("warm", tokens)
    assert found.chunks_l1 == found.chunks == CHUNKS
    assert engine.read(found)
    engine.end("warm")
    assert len(operator.listed(tier="l1")) == CHUNKS  # it was no loan
    operator.ask("GET", "/cache/prefetches/nothing", status=404)


def test_objects_move_between_tiers(operator: Operator, engine: SmallEngine) -> None:
    tokens = stored(operator, engine, 700)
    name = operator.adapter()["name"]
    keys = [entry.key for entry in operator.listed(tier="l1")]
    assert operator.ask("DELETE", "/cache/objects", {"keys": keys, "tier": "l2"})["deleted"] == CHUNKS
    job = operator.ask("POST", "/cache/moves", {"from": "l1", "to": name, "keys": keys}, 202)
    done = operator.finished(job["request_id"])
    assert (done["status"], done["objects_done"], done["objects_failed"]) == ("done", CHUNKS, 0), done
    assert operator.listed(tier="l1") == [] and len(operator.listed(tier="l2")) == CHUNKS
    prompt = {"model_name": "model", "tokens": token_list(700)}
    job = operator.ask("POST", "/cache/moves", {"from": name, "to": "l1", **prompt, "copy": True}, 202)
    assert operator.finished(job["request_id"])["objects_done"] == CHUNKS
    assert len(operator.listed(tier="l1")) == len(operator.listed(tier="l2")) == CHUNKS
    found = engine.lookup("moved", tokens)
    assert found.chunks_l1 == CHUNKS and engine.read(found)
    engine.end("moved")
    assert (
        "There is no tier"
        in operator.ask("POST", "/cache/moves", {"from": "l1", "to": "l9", "keys": keys}, 400)["detail"]
    )


def test_objects_move_from_an_adapter_to_another(tmp_path: Path) -> None:
    adapters = [{"type": "fs_native", "base_path": str(tmp_path / name)} for name in ("near", "far")]
    extra = [word for adapter in adapters for word in ("--l2-adapter", json.dumps(adapter))]
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as server:
        server.wait_ready()
        operator = Operator(server)
        with operator.http, SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(CHUNKS))
            assert engine.store(tokens) == CHUNKS
            near, far = (adapter["name"] for adapter in operator.ask("GET", "/status")["l2"]["adapters"])
            until(lambda: len(operator.listed(adapter=near)) == len(operator.listed(adapter=far)) == CHUNKS)
            operator.stored_in_l2(CHUNKS)
            keys = [entry.key for entry in operator.listed(tier="l1")]
            assert operator.ask("DELETE", "/cache/objects", {"keys": keys, "tier": "l2"})["deleted"] == CHUNKS
            for from_, to in (("l1", near), (near, far)):
                job = operator.ask("POST", "/cache/moves", {"from": from_, "to": to, "keys": keys}, 202)
                done = operator.finished(job["request_id"])
                assert (done["status"], done["objects_done"], done["objects_failed"]) == ("done", CHUNKS, 0), done
            assert operator.listed(adapter=near) == operator.listed(tier="l1") == []
            assert {entry.key for entry in operator.listed(adapter=far)} == set(keys)
            found = engine.lookup("moved", tokens)
            assert (found.chunks, found.chunks_l1) == (CHUNKS, 0) and engine.read(found)
            engine.end("moved")
        assert server.stop() == 0, server.log()


def test_a_pin_outlasts_eviction_and_ends_by_its_time(operator: Operator, engine: SmallEngine) -> None:
    stored(operator, engine, 800)
    keys = [entry.key for entry in operator.listed(tier="l1")]
    pin = operator.ask("POST", "/cache/pins", {"keys": keys, "owner": "me", "ttl_seconds": 60})
    assert (pin["objects"], pin["missing"]) == (CHUNKS, 0)
    again = operator.ask("POST", "/cache/pins", {"keys": keys[:1], "owner": "you", "ttl_seconds": 60})
    fill = 0
    while fill < 60_000_000 / 8192:  # more than L1 has
        engine.store(engine.tokens(*range(10**6 + fill, 10**6 + fill + 500)))
        fill += 500
    assert set(keys) <= {entry.key for entry in operator.listed(tier="l1")}
    assert operator.ask("DELETE", "/cache/objects", {"keys": keys, "tier": "l1"})["skipped"] == CHUNKS
    operator.ask("POST", "/cache/clear", {"tier": "all"})
    assert {entry.key for entry in operator.listed(tier="l1")} == set(keys)
    assert {entry.key for entry in operator.listed(tier="l2")} == set(keys)
    assert operator.ask("DELETE", "/cache/pins", {"pin_id": pin["pin_id"]}) == {"pins": 1, "objects": CHUNKS}
    assert [shown["pin_id"] for shown in operator.ask("GET", "/cache/pins")["pins"]] == [again["pin_id"]]
    operator.ask("POST", "/cache/clear", {"tier": "l1"})
    assert {entry.key for entry in operator.listed(tier="l1")} == set(keys[:1])
    assert operator.ask("DELETE", "/cache/objects", {"keys": keys[:1], "tier": "all", "force": True})["deleted"] == 1
    assert operator.ask("GET", "/cache/pins")["pins"] == []
    stored(operator, engine, 900)
    keys = [entry.key for entry in operator.listed(tier="l1")]
    began = time.monotonic()
    assert operator.ask("POST", "/cache/pins", {"keys": keys, "owner": "me", "ttl_seconds": 1.5})["objects"] == CHUNKS
    until(lambda: operator.server.status()["l1"]["leased_objects"] == 0, 30)
    assert time.monotonic() - began >= 1.5
    operator.ask("POST", "/cache/clear", {"tier": "l1"})
    assert operator.listed(tier="l1") == []


_HANGING_ADAPTER = '''
import asyncio
from pathlib import Path

from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter

FOLDER = Path(__file__).parent


class Hanging(Adapter):
    """Answers no question until there is a file `go_on`."""

    async def store(self, keys, buffers):
        return [StoreOutcome.STORED] * len(keys)

    async def load(self, keys, buffers):
        return [LoadOutcome.MISSING] * len(keys)

    async def probe(self, keys):
        with open(FOLDER / "asked", "a") as asked:
            asked.write("x")
        while not (FOLDER / "go_on").exists():
            await asyncio.sleep(0.02)
        return [None] * len(keys)

    async def delete(self, keys, *, corrupt=False):
        return [False] * len(keys)

    async def clear(self):
        return 0, 0

    async def close(self):
        pass
'''


def test_figures_are_answered_beside_lookups_that_wait_for_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "hanging_adapter.py").write_text(_HANGING_ADAPTER)
    adapter = {"type": "plugin", "module_path": "hanging_adapter", "class_name": "Hanging"}
    python_path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with (
        CacheServer(
            tmp_path,
            l1_size_gb=0.0625,
            extra=["--l2-adapter", json.dumps(adapter)],
            environment={"PYTHONPATH": python_path},
        ) as server,
        ThreadPoolExecutor(2) as beside,
    ):
        server.wait_ready()
        operator, asked = Operator(server), tmp_path / "asked"
        with SmallEngine(server.port), operator.http:
            bodies = [{"model_name": "model", "tokens": [number] * 256} for number in (1, 2)]
            lookups = [beside.submit(operator.ask, "POST", "/cache/lookup", body) for body in bodies]
            until(lambda: asked.exists() and len(asked.read_text()) == len(lookups))
            for path in ("/metrics", "/metrics/history?since=0", "/status", "/quota", "/quota/alice"):
                assert operator.http.get(path).status_code == 200
            assert not any(lookup.done() for lookup in lookups), "figures waited for the adapter"
            (tmp_path / "go_on").touch()
            assert [lookup.result()["prefix_chunks"] for lookup in lookups] == [0, 0]
