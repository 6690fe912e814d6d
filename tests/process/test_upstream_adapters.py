"""vLLM's own connector class (LMCACHE_USE_UPSTREAM_MP=1) on our adapters: its real code, a real server, real copies.

It records CUDA events and nothing else of CUDA, so those few calls are faked and KV lies in host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from lmcache.integration.engine import storer  # noqa: E402
from lmcache.integration.engine.worker_side import WorkerSide  # noqa: E402
from lmcache.integration.vllm import upstream_types, upstream_worker  # noqa: E402
from lmcache.testing.processes import CacheServer, free_port  # noqa: E402
from polling import until  # noqa: E402
from process.upstream_engine import (  # noqa: E402
    BLOCK_TOKENS,
    BLOCKS,
    CHUNK_TOKENS,
    PER_CHUNK,
    Engine,
    Event,
    Ranks,
    config,
    held,
)
from support.held_items import held_items  # noqa: E402
from support.telemetry_proxy import telemetry_proxy  # noqa: E402

PATIENT_SECONDS = 30.0


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # The module is imported as it is in every other test: which class it prefers stays decided for the process.
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector

    Event.made = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(storer, "RESERVE_SECONDS", PATIENT_SECONDS)  # a server that is late loses no store
    monkeypatch.setattr(upstream_worker, "LOOKUP_SECONDS", PATIENT_SECONDS)  # nor a load
    yield lmcache_mp_connector


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        yield server
        (Path("/dev/shm") / server.shm_name).unlink(missing_ok=True)


def test_what_accepts_a_lossy_serde_and_what_does_not_share_nothing(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer
) -> None:
    tokens = list(range(2 * CHUNK_TOKENS))
    for accepted, objects in (("", 2), ("fp8", 4)):
        engine = Engine(upstream, monkeypatch, server.port, lossy_serde=accepted)
        assert engine.matched("other", tokens) == 0
        engine.compute("cold", tokens, list(range(1, 9)))
        until(lambda objects=objects: server.status()["l1"]["objects"] == objects)
        assert engine.matched("hit", tokens) == 2 * CHUNK_TOKENS
        engine.close()
    until(lambda: 'accepts the lossy serde "fp8"' in server.log())


@pytest.mark.parametrize("mla", [False, True])
def test_two_ranks_each_load_what_is_theirs(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer, mla: bool
) -> None:
    engine = Ranks(upstream, monkeypatch, server.port, 2, use_mla=mla)
    if mla:
        assert [worker.worker_adapter.is_first_rank_of_pp_group for worker in engine.workers] == [True, False]
    tokens = list(range(2 * CHUNK_TOKENS))
    for rank, memory in enumerate(engine.memory):
        generator = torch.Generator().manual_seed(0 if mla else rank)
        memory["layer"].copy_(torch.randn(memory["layer"].shape, generator=generator))
    originals = [memory["layer"].clone() for memory in engine.memory]
    engine.compute("cold", tokens, list(range(1, 9)))
    until(lambda: server.status()["l1"]["objects"] == (2 if mla else 4))
    [instance] = server.status()["instances"]
    assert (instance["ranks"], instance["workers"]) == (1 if mla else 2, [0, 1])

    assert engine.matched("hit", tokens) == 2 * CHUNK_TOKENS
    engine.allocate("hit", list(range(20, 28)), 2 * CHUNK_TOKENS)
    engine.load("hit")
    for worker, memory, original in zip(engine.workers, engine.memory, originals, strict=True):
        assert worker.get_block_ids_with_load_errors() == set()
        assert torch.equal(memory["layer"][20:28], original[1:9])
    engine.finish("hit")
    until(lambda: not held(server))

    # One that is aborted while both load is named once both have ended.
    assert engine.matched("aborted", tokens) == 2 * CHUNK_TOKENS
    engine.allocate("aborted", list(range(30, 38)), 2 * CHUNK_TOKENS)
    engine.step()
    engine.scheduler.request_finished(engine.requests.pop("aborted"), [])
    named = [engine.step(finished=frozenset({"aborted"}))]
    until(lambda: named.append(engine.step()) or any(receiving or sending for sending, receiving in named))
    assert sum(len(receiving | sending) for sending, receiving in named) == 1
    until(lambda: not held(server))

    server.kill()
    engine.requests.clear()
    engine.compute("uncached", [7] * CHUNK_TOKENS, [9, 10, 11, 12])
    engine.close()


@pytest.mark.parametrize("mla", [False, True])
def test_a_proxy_is_told_by_each_rank_that_stores(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer, mla: bool
) -> None:
    ranks = {0} if mla else {0, 1}
    with telemetry_proxy() as proxy:
        monkeypatch.setenv("LMCACHE_REQUEST_TELEMETRY_TYPE", "fastapi")
        monkeypatch.setenv("LMCACHE_REQUEST_TELEMETRY_ENDPOINT", proxy.url)
        engine = Ranks(upstream, monkeypatch, server.port, 2, use_mla=mla)
        engine.compute("cold", list(range(CHUNK_TOKENS)), [1, 2, 3, 4])
        until(lambda: {event["kv_rank"] for event in proxy.events} == ranks)
        assert server.status()["l1"]["objects"] == len(ranks)  # before anybody was told
        assert proxy.told == ["cold"] * len(ranks)
        assert {(event["model_name"], event["world_size"]) for event in proxy.events} == {("model", len(ranks))}
        engine.close()


def test_a_prompt_is_stored_found_and_loaded(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer
) -> None:
    engine = Engine(upstream, monkeypatch, server.port)
    assert (engine.worker.worker_adapter.use_mla, engine.worker.worker_adapter.is_first_rank_of_pp_group) == (
        False,
        True,
    )
    assert engine.scheduler.scheduler_adapter.num_blocks_per_chunk() == PER_CHUNK
    tokens = list(range(2 * CHUNK_TOKENS + 10))
    source, target = list(range(1, 10)), list(range(20, 29))
    engine.fill(1)
    originals = {name: layer.clone() for name, layer in engine.layers.items()}
    engine.compute("cold", tokens, source)
    until(lambda: server.status()["l1"]["objects"] == 2)

    engine.fill(2)
    before = {name: layer.clone() for name, layer in engine.layers.items()}
    assert engine.matched("hit", tokens) == 2 * CHUNK_TOKENS
    engine.allocate("hit", target, 2 * CHUNK_TOKENS)
    engine.load("hit")
    assert engine.worker.get_block_ids_with_load_errors() == set()
    for name, layer in engine.layers.items():
        assert torch.equal(layer[20:28], originals[name][1:9])
        assert torch.equal(layer[28:], before[name][28:]) and torch.equal(layer[:20], before[name][:20])
    engine.finish("hit")
    assert all(event.calls == ["record", "synchronize"] for event in Event.made) and len(Event.made) >= 2
    until(lambda: not held(server))

    # The engine found the first five blocks itself: the chunk that they share with a load is not written there.
    assert engine.matched("partly", tokens, 5 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    engine.fill(3)
    before = {name: layer.clone() for name, layer in engine.layers.items()}
    engine.allocate("partly", list(range(40, 49)), 3 * BLOCK_TOKENS)
    engine.load("partly")
    for name, layer in engine.layers.items():
        assert torch.equal(layer[45:48], originals[name][6:9])
        assert torch.equal(layer[40:45], before[name][40:45])
    engine.finish("partly")

    # All of it found by the engine itself: nothing stays leased while the request runs.
    assert engine.matched("own", tokens, 2 * CHUNK_TOKENS) == 0
    engine.allocate("own", source, 0)
    until(lambda: server.status()["leases"] == 0)
    engine.finish("own")
    until(lambda: not held(server))
    engine.close()
    until(lambda: not server.status()["instances"])


def test_a_chunk_that_is_gone_or_spoilt_fails_its_blocks_only(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer
) -> None:
    engine = Engine(upstream, monkeypatch, server.port)
    tokens = list(range(3 * CHUNK_TOKENS))
    engine.fill(1)
    engine.compute("cold", tokens, list(range(1, 13)))
    until(lambda: server.status()["l1"]["objects"] == 3)
    assert engine.matched("spoilt", tokens) == 3 * CHUNK_TOKENS
    session = engine.scheduler.scheduler_adapter.sessions["spoilt"]
    slot = int.from_bytes(session.answer.slots[8:16], "little")
    memory = engine.worker.worker_adapter.worker_side.client.memory
    memory.view(slot + 5000, 1)[0] ^= 1
    engine.allocate("spoilt", list(range(20, 32)), 3 * CHUNK_TOKENS)
    engine.load("spoilt")
    assert engine.worker.get_block_ids_with_load_errors() == {24, 25, 26, 27}
    assert engine.worker.get_block_ids_with_load_errors() == set()
    assert engine.matched("spoilt", tokens) == 0  # a second load would never be ordered by that class
    engine.finish("spoilt")
    until(lambda: not held(server) and server.status()["l1"]["objects"] == 2)
    engine.close()


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_request_that_is_aborted_while_it_loads_is_named_once(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer, spoilt: Any
) -> None:
    engine = Engine(upstream, monkeypatch, server.port)
    tokens = list(range(2 * CHUNK_TOKENS))
    engine.fill(1)
    engine.compute("cold", tokens, list(range(1, 9)))
    until(lambda: server.status()["l1"]["objects"] == 2)
    assert engine.matched("hit", tokens) == 2 * CHUNK_TOKENS
    if spoilt:
        slots = engine.scheduler.scheduler_adapter.sessions["hit"].answer.slots
        memory = engine.worker.worker_adapter.worker_side.client.memory
        memory.view(int.from_bytes(slots[:8], "little") + 5000, 1)[0] ^= 1
    engine.allocate("hit", list(range(20, 28)), 2 * CHUNK_TOKENS)
    adapter = engine.worker.worker_adapter
    with monkeypatch.context() as answer_withheld:
        answer_withheld.setattr(adapter, "_start_answered_loads", lambda lookups: None)
        assert engine.step() == (set(), set())
        engine.scheduler.request_finished(engine.requests.pop("hit"), [])
        assert engine.step(finished=frozenset({"hit"})) == (set(), set())
    named = []
    until(lambda: named.append(engine.step()) or named[-1] != (set(), set()))
    named += [engine.step() for _ in range(3)]
    assert [report for report in named if report != (set(), set())] == [(set(), {"hit"})]
    engine.worker.get_block_ids_with_load_errors()
    assert not held_items(adapter, upstream_worker.__name__)
    until(lambda: not held(server) and server.status()["l1"]["objects"] == (1 if spoilt else 2))
    engine.close()


def test_every_load_ends_when_the_server_dies(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer
) -> None:
    engine = Engine(upstream, monkeypatch, server.port)
    tokens = list(range(CHUNK_TOKENS))
    engine.fill(1)
    engine.compute("cold", tokens, [1, 2, 3, 4])
    until(lambda: server.status()["l1"]["objects"] == 1)
    assert engine.matched("hit", tokens) == CHUNK_TOKENS
    engine.allocate("hit", [5, 6, 7, 8], CHUNK_TOKENS)
    server.kill()
    engine.load("hit")
    assert engine.worker.get_block_ids_with_load_errors() == {5, 6, 7, 8}
    engine.finish("hit")
    engine.compute("uncached", [7] * CHUNK_TOKENS, [9, 10, 11, 12])
    engine.close()


def test_a_load_that_cannot_begin_is_computed_and_named(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    engine = Engine(upstream, monkeypatch, server.port)
    tokens = list(range(CHUNK_TOKENS))
    engine.fill(1)
    engine.compute("cold", tokens, [1, 2, 3, 4])
    until(lambda: server.status()["l1"]["objects"] == 1)
    assert engine.matched("hit", tokens) == CHUNK_TOKENS
    engine.allocate("hit", [5, 6, 7, 8], CHUNK_TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerSide, "start_loads", no_memory)
        engine.load("hit")
    assert engine.worker.get_block_ids_with_load_errors() == {5, 6, 7, 8}
    engine.finish("hit")
    assert not held_items(engine.worker.worker_adapter, upstream_worker.__name__)
    until(lambda: not held(server))
    engine.close()


@pytest.mark.parametrize("refused", ["images", "embeddings", "lora", "ray", "window", "weights"])
def test_what_token_ids_alone_do_not_tell_apart_runs_uncached(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, server: CacheServer, caplog: pytest.LogCaptureFixture, refused: Any
) -> None:
    engine_config = config(
        server.port, is_multimodal_model=refused == "images", enable_prompt_embeds=refused == "embeddings"
    )
    if refused == "lora":
        engine_config.lora_config = object()
    if refused == "weights":
        engine_config.weight_transfer_config = object()
    if refused == "window":
        engine_config.compilation_config.static_forward_context["layer"] = SimpleNamespace(
            sliding_window=4096, kv_cache_dtype="auto"
        )
    if refused == "ray":
        engine_config.parallel_config.distributed_executor_backend = "ray"
    adapter = upstream_worker.LMCacheMPWorkerAdapter(
        server_url=f"tcp://127.0.0.1:{server.port}",
        context=None,
        model_name="model",
        vllm_block_size=BLOCK_TOKENS,
        parallel_strategy=upstream_types.ParallelStrategy(False, 1, 0, 1, 0, 1, 1),
        engine_config=lambda: engine_config,
    )
    adapter.register_kv_caches({"layer": torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 16)})
    assert "uncached" in caplog.text
    op = upstream_types.LoadStoreOp(token_ids=[1] * CHUNK_TOKENS, block_ids=[1, 2, 3, 4], start=0, end=CHUNK_TOKENS)
    assert len(op) == 4
    adapter.batched_submit_store_requests(["a"], [op], None, cache_salts=[""])
    adapter.batched_submit_retrieve_requests(["b"], [op], None, cache_salts=[""])
    assert adapter.get_finished({"a"}) == ({"a"}, {"b"})
    assert adapter.get_block_ids_with_load_errors() == {1, 2, 3, 4}
    assert adapter.get_finished(set()) == (None, None)
    adapter.shutdown()


def test_without_a_server_the_start_fails_with_a_sentence(upstream: Any) -> None:
    with pytest.raises(ConnectionError, match="Start the server"):
        upstream.LMCacheMPSchedulerAdapter(
            server_url=f"tcp://127.0.0.1:{free_port()}",
            context=None,
            model_name="model",
            vllm_block_size=BLOCK_TOKENS,
            parallel_strategy=upstream.ParallelStrategy(False, 1, 0, 1, 0, 1, 1),
            mq_timeout=0.2,
            heartbeat_interval=10.0,
        )
