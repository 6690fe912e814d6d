"""vLLM's own connector class around our adapters, its few CUDA calls faked: KV lies in host memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache.integration.vllm import upstream_worker
from lmcache.testing.processes import CacheServer
from polling import until

BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 64, 64, 256
PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS

Ended = tuple[set[str], set[str]]  # requests whose sending, whose receiving has ended


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


def config(port: int, *, rank: int = 0, ranks: int = 1, lossy_serde: str = "", **model: Any) -> Any:
    """What that class and the adapters read of vLLM's configuration."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 20}
    extra |= {"lmcache.mp.lossy_serde": lossy_serde} if lossy_serde else {}
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2}, _commit_hash="c" * 40)
    values = {
        "model": "model",
        "use_mla": False,
        "revision": None,
        "dtype": "bf16",
        "quantization": None,
        "hf_config": hf_config,
        "is_multimodal_model": False,
        "enable_prompt_embeds": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=ranks,
            rank=rank,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
        ),
        cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
        model_config=SimpleNamespace(**{**values, **model}),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
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
        monkeypatch.setattr(upstream_worker, "current_config", lambda: settings)
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

    def step(self, name: str = "", tokens: int = 0, finished: frozenset[str] = frozenset()) -> Ended:
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


class Ranks(Engine):
    """Several workers, as its executor of several processes has them; here all in this one."""

    def __init__(self, upstream: Any, monkeypatch: pytest.MonkeyPatch, port: int, ranks: int, **model: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        monkeypatch.setattr(upstream_worker, "scheduler_process_id", lambda **_: os.getpid())
        kind = upstream.LMCacheMPConnectorUpstream
        self.workers, self.memory = [], []
        for rank in range(ranks):
            settings = config(port, rank=rank, ranks=ranks, **model)
            monkeypatch.setattr(upstream_worker, "current_config", lambda settings=settings: settings)
            self.workers.append(kind(settings, KVConnectorRole.WORKER, None))
            self.memory.append({"layer": torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16)})
            self.workers[rank].register_kv_caches(self.memory[rank])
        self.scheduler = kind(config(port, ranks=ranks, **model), KVConnectorRole.SCHEDULER, None)
        self.requests = {}
        self._named: dict[tuple[int, str], int] = {}

    def close(self) -> None:
        self.scheduler.scheduler_adapter.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def step(self, name: str = "", tokens: int = 0, finished: frozenset[str] = frozenset()) -> Ended:
        """What all of them have named by now is named, as vLLM's aggregator does."""
        ended: Ended = (set(), set())
        metadata = None
        for worker in self.workers:
            self.worker = worker
            if metadata is None:
                output = SimpleNamespace(
                    scheduled_new_reqs=[SimpleNamespace(req_id=name)] if tokens else [],
                    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
                    num_scheduled_tokens={name: tokens} if tokens else {},
                )
                metadata = self.scheduler.build_connector_meta(output)
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            for kind, requests in enumerate(worker.get_finished(set(finished))):
                for request in requests or ():
                    self._named[kind, request] = self._named.get((kind, request), 0) + 1
        for (kind, request), count in list(self._named.items()):
            assert count <= len(self.workers)
            if count == len(self.workers):
                del self._named[kind, request]
                ended[kind].add(request)
        return ended


def held(server: CacheServer) -> list[int]:
    status = server.status()
    return [n for n in (status["sessions"], status["leases"], status["reservations"]) if n]
