"""vLLM's own connector class (LMCACHE_USE_UPSTREAM_MP=1) on our adapters: its real code, a real server, real copies.

It records CUDA events and nothing else of CUDA, so those few calls are faked and KV lies in host memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from lmcache.integration.vllm import upstream_worker  # noqa: E402
from lmcache.testing.processes import CacheServer, free_port  # noqa: E402

BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 64, 64, 256
PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS


class Event:
    """Of CUDA: recorded, then awaited before anything is copied."""

    made: list[Event] = []

    def __init__(self, interprocess: bool = False) -> None:
        assert interprocess
        self.calls: list[str] = []
        self.made.append(self)

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # The module is imported as it is in every other test: which class it prefers stays decided for the process.
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector

    Event.made = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield lmcache_mp_connector


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        yield server
        (Path("/dev/shm") / server.shm_name).unlink(missing_ok=True)


def config(port: int, **model: Any) -> Any:
    """What that class and the adapters read of vLLM's configuration."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 20}
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2})
    values = {
        "model": "model",
        "use_mla": False,
        "revision": None,
        "dtype": "bf16",
        "quantization": None,
        "hf_config": hf_config,
        "is_multimodal_model": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=1,
            rank=0,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            distributed_executor_backend="uni",
        ),
        cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
        model_config=SimpleNamespace(**{**values, **model}),
        speculative_config=None,
        lora_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
            get_from_extra_config=lambda key, default: extra.get(key, default),
        ),
    )


class Engine:
    """Both roles of vLLM's class in one process, as its single-process executor has them."""

    def __init__(self, upstream: Any, monkeypatch: pytest.MonkeyPatch, port: int, **model: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        settings = config(port, **model)
        monkeypatch.setattr(upstream_worker, "_current_config", lambda: settings)
        kind = upstream.LMCacheMPConnectorUpstream
        self.worker = kind(settings, KVConnectorRole.WORKER, None)
        self.layers = {f"layer{i}": torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16) for i in range(2)}
        self.worker.register_kv_caches(self.layers)
        self.scheduler = kind(settings, KVConnectorRole.SCHEDULER, None)
        self.requests: dict[str, Any] = {}

    def close(self) -> None:
        self.scheduler.scheduler_adapter.shutdown()
        self.worker.shutdown()

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers.values():
            layer.copy_(torch.randn(layer.shape, generator=generator))

    def matched(self, name: str, tokens: list[int], computed: int = 0) -> int:
        from vllm.v1.request import RequestStatus

        request = self.requests.setdefault(
            name,
            SimpleNamespace(
                request_id=name,
                cache_salt=None,
                all_token_ids=tokens,
                block_hashes=[bytes(32)] * (len(tokens) // BLOCK_TOKENS),
                status=RequestStatus.WAITING,
                kv_transfer_params=None,
            ),
        )

        def answer() -> Any:
            count, _ = self.scheduler.get_num_new_matched_tokens(request, computed)
            return None if count is None else [count]

        return int(until(answer)[0])

    def allocate(self, name: str, blocks: list[int], external: int) -> None:
        given = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(self.requests[name], given, external)

    def step(self, name: str = "", tokens: int = 0, finished: frozenset[str] = frozenset()) -> tuple[set, set]:
        """One step that computes `tokens` of a request; what the worker says has finished (sending, receiving)."""
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name)] if tokens else [],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            num_scheduled_tokens={name: tokens} if tokens else {},
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sending, receiving = self.worker.get_finished(set(finished))
        return sending or set(), receiving or set()

    def compute(self, name: str, tokens: list[int], blocks: list[int]) -> None:
        """A request without a hit, from its arrival to its end."""
        assert self.matched(name, tokens) == 0
        self.allocate(name, blocks, 0)
        self.step(name, len(tokens))
        self.finish(name)

    def load(self, name: str) -> None:
        """Steps until the load has been reported, which must happen once."""

        def ended() -> bool:
            _, receiving = self.step()
            assert receiving <= {name}
            return bool(receiving)

        until(ended)

    def finish(self, name: str) -> None:
        delayed, _ = self.scheduler.request_finished(self.requests.pop(name), [])
        assert delayed
        assert self.step(finished=frozenset({name})) == ({name}, set())


def until(condition: Any, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return value


def held(server: CacheServer) -> list[int]:
    status = server.status()
    return [n for n in (status["sessions"], status["leases"], status["reservations"]) if n]


def test_a_prompt_is_stored_found_and_loaded(upstream, monkeypatch, server):
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


def test_a_chunk_that_is_gone_or_spoilt_fails_its_blocks_only(upstream, monkeypatch, server):
    engine = Engine(upstream, monkeypatch, server.port)
    tokens = list(range(3 * CHUNK_TOKENS))
    engine.fill(1)
    engine.compute("cold", tokens, list(range(1, 13)))
    until(lambda: server.status()["l1"]["objects"] == 3)
    assert engine.matched("spoilt", tokens) == 3 * CHUNK_TOKENS
    question = engine.scheduler.scheduler_adapter._questions["spoilt"]
    slot = int.from_bytes(question.reply.slots[8:16], "little")
    memory = engine.worker.worker_adapter._worker.client.memory
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
def test_a_request_that_is_aborted_while_it_loads_is_named_once(upstream, monkeypatch, server, spoilt):
    engine = Engine(upstream, monkeypatch, server.port)
    tokens = list(range(2 * CHUNK_TOKENS))
    engine.fill(1)
    engine.compute("cold", tokens, list(range(1, 9)))
    until(lambda: server.status()["l1"]["objects"] == 2)
    assert engine.matched("hit", tokens) == 2 * CHUNK_TOKENS
    if spoilt:
        slots = engine.scheduler.scheduler_adapter._questions["hit"].reply.slots
        memory = engine.worker.worker_adapter._worker.client.memory
        memory.view(int.from_bytes(slots[:8], "little") + 5000, 1)[0] ^= 1
    engine.allocate("hit", list(range(20, 28)), 2 * CHUNK_TOKENS)
    adapter = engine.worker.worker_adapter
    with monkeypatch.context() as answer_withheld:
        answer_withheld.setattr(adapter, "_start_answered_loads", lambda: None)
        assert engine.step() == (set(), set())
        engine.scheduler.request_finished(engine.requests.pop("hit"), [])
        assert engine.step(finished=frozenset({"hit"})) == (set(), set())
    named = []
    until(lambda: named.append(engine.step()) or named[-1] != (set(), set()))
    named += [engine.step() for _ in range(3)]
    assert [one for one in named if one != (set(), set())] == [(set(), {"hit"})]
    assert not (adapter._aborted or adapter._spoilt or adapter._loading or adapter._asked)
    until(lambda: not held(server) and server.status()["l1"]["objects"] == (1 if spoilt else 2))
    engine.close()


def test_every_load_ends_when_the_server_dies(upstream, monkeypatch, server):
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


@pytest.mark.parametrize("refused", ["images", "lora", "ray"])
def test_what_token_ids_alone_do_not_tell_apart_runs_uncached(upstream, monkeypatch, server, caplog, refused):
    engine_config = config(server.port, is_multimodal_model=refused == "images")
    if refused == "lora":
        engine_config.lora_config = object()
    if refused == "ray":
        engine_config.parallel_config.distributed_executor_backend = "ray"
    adapter = upstream_worker.LMCacheMPWorkerAdapter(
        server_url=f"tcp://127.0.0.1:{server.port}",
        context=None,
        model_name="model",
        vllm_block_size=BLOCK_TOKENS,
        parallel_strategy=upstream_worker.ParallelStrategy(False, 1, 0, 1, 0, 1, 1),
        engine_config=lambda: engine_config,
    )
    adapter.register_kv_caches({"layer": torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 16)})
    assert "uncached" in caplog.text
    op = upstream_worker.LoadStoreOp(token_ids=[1] * CHUNK_TOKENS, block_ids=[1, 2, 3, 4], start=0, end=CHUNK_TOKENS)
    assert len(op) == 4
    adapter.batched_submit_store_requests(["a"], [op], None, cache_salts=[""])
    adapter.batched_submit_retrieve_requests(["b"], [op], None, cache_salts=[""])
    assert adapter.get_finished({"a"}) == ({"a"}, {"b"})
    assert adapter.get_block_ids_with_load_errors() == {1, 2, 3, 4}
    assert adapter.get_finished(set()) == (None, None)
    adapter.shutdown()


def test_without_a_server_the_start_fails_with_a_sentence(upstream):
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


def test_processes_of_an_engine_agree_on_its_name():
    from lmcache.integration.vllm.engine_process import instance_name, scheduler_process_id

    mine = instance_name(os.getpid())
    assert mine == instance_name(scheduler_process_id(in_scheduler=False, executor="uni", workers=1))
    assert mine == instance_name(scheduler_process_id(in_scheduler=True, executor="", workers=4))
    child = os.fork()
    if child == 0:
        named = instance_name(scheduler_process_id(in_scheduler=False, executor="mp", workers=2))
        os._exit(0 if named == mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine != instance_name(os.getppid())
