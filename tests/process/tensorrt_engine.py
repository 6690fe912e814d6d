"""TensorRT-LLM's side of its connector interface, made up: base classes, MPI, and an executor that calls in its order.

Requests get blocks, load asynchronously, are computed in pieces of a step's budget, end, and keep their blocks where
the connector says so. KV is a function of the tokens before it, so a wrong or stale block shows. Blocks that are given
back are overwritten at once.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache.client import lookup_client
from lmcache.integration.engine import storer
from lmcache.integration.tensorrt_llm.settings import MAX_LOOKUP_SECONDS, TIMEOUT_VARIABLE
from polling import until

BLOCKS, BLOCK_TOKENS, HEADS, LAYERS = 48, 32, 4, 2
PACKAGE = "tensorrt_llm"
CONNECTORS = f"{PACKAGE}._torch.pyexecutor.connectors.kv_cache_connector"
OLD_CONNECTORS = f"{PACKAGE}._torch.pyexecutor.kv_cache_connector"
ADAPTER = "lmcache.integration.tensorrt_llm.tensorrt_mp_adapter"
PATIENT_SECONDS = 30.0
NOBODYS = 255.0


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class Scheduler:
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class Worker(Scheduler):
    _metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata


class Mpi:
    """Ranks of one process that take turns."""

    def __init__(self) -> None:
        self.rank = 0
        self._broadcast: Any = None

    def mpi_rank(self) -> int:
        return self.rank

    def mpi_broadcast(self, value: Any, root: int = 0) -> Any:
        if self.rank == root:
            self._broadcast = pickle.dumps(value)
        return pickle.loads(self._broadcast)


def install(monkeypatch: pytest.MonkeyPatch, mpi: Mpi, connectors: str = CONNECTORS) -> Any:
    """The adapter's module, imported beside a package with these names. Nothing is given up for being late: prompts are
    stored and found on a machine that stands still for a moment, too."""
    names = [f"{PACKAGE}._utils", connectors]
    parts = connectors.split(".")
    names += [".".join(parts[:end]) for end in range(1, len(parts))]
    modules = {name: ModuleType(name) for name in names}
    modules[PACKAGE].__version__ = "1.2.0"  # type: ignore[attr-defined]
    utilities, interface = modules[f"{PACKAGE}._utils"], modules[connectors]
    utilities.mpi_rank, utilities.mpi_broadcast = mpi.mpi_rank, mpi.mpi_broadcast  # type: ignore[attr-defined]
    interface.KvCacheConnectorScheduler, interface.KvCacheConnectorWorker = Scheduler, Worker  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(ADAPTER, None)
    adapter = importlib.import_module(ADAPTER)
    del sys.modules[ADAPTER]  # it is bound to these names
    monkeypatch.setattr(adapter, "START_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(storer, "RESERVE_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(lookup_client, "APPEND_SECONDS", PATIENT_SECONDS)
    monkeypatch.setenv(TIMEOUT_VARIABLE, f"{1000 * MAX_LOOKUP_SECONDS:g}")
    return adapter


def llm_args(model: Path, *, ranks: int = 1, **changes: Any) -> Any:
    cache = {"tokens_per_block": BLOCK_TOKENS, "dtype": "auto", "host_cache_size": None, "max_attention_window": None}
    cache |= changes.pop("kv_cache_config", {})
    values = {
        "model": str(model),
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "max_beam_width": 1,
        "max_seq_len": 4096,
        "dtype": "bfloat16",
        "attn_backend": "TRTLLM",
        "load_format": "auto",
        "kv_connector_config": SimpleNamespace(connector="lmcache-mp"),
    }
    return SimpleNamespace(kv_cache_config=SimpleNamespace(**cache), **{**values, **changes})


def pool(factor: int = 2) -> torch.Tensor:
    """As `get_unique_primary_pool` gives it: [blocks, layers, keys and values or a latent, elements]."""
    return torch.full((BLOCKS, LAYERS, factor, BLOCK_TOKENS * HEADS), NOBODYS, dtype=torch.bfloat16)


@dataclass
class Request:
    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    matched: int = 0
    seen: bool = False

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # what this request does not have


class Engine:
    """One leader, a worker a rank. `latent`: MLA, of which every rank has the same KV."""

    def __init__(
        self, adapter: Any, mpi: Mpi, model: Path, *, ranks: int = 1, latent: bool = False, **changes: Any
    ) -> None:
        self.latent = latent
        self.pools = [pool(1 if latent else 2) for _ in range(ranks)]
        arguments = [llm_args(model, ranks=ranks, **changes) for _ in range(ranks)]
        self.workers = []
        for rank, memory in enumerate(self.pools):
            mpi.rank = rank
            worker = adapter.LMCacheMPKvConnectorWorker(arguments[rank])
            if rank == 0:
                self.scheduler = adapter.LMCacheMPKvConnectorScheduler(arguments[0])
            worker.register_kv_caches(memory)
            self.workers.append(worker)
        mpi.rank = 0
        self.scheduler.wait_for_initialization()
        self._free = list(range(BLOCKS))
        self._next_id = 1
        self.active: dict[int, Request] = {}
        self.loading: dict[int, Request] = {}
        self.saving: dict[int, Request] = {}
        self._new_loading: list[int] = []
        self._new_saving: list[int] = []
        self._named: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in self.pools]

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    # ---- requests ----------------------------------------------------------------------------------------------------
    def add(self, tokens: list[int], *, computed: int = 0, salt: str | None = None, **more: Any) -> Request:
        """A request with blocks. `computed`: tokens that the engine's own cache has of it."""
        request = Request(self._next_id, tokens, salt)
        vars(request).update(more)
        self._next_id += 1
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert is_async == (matched > 0)
        request.matched = matched
        request.blocks = [self._free.pop(0) for _ in range(-(-len(tokens) // BLOCK_TOKENS))]
        self._write(request, 0, computed)
        request.computed = computed + matched
        self.scheduler.update_state_after_alloc(request, list(request.blocks))
        if is_async:
            self.loading[request.request_id] = request
            self._new_loading.append(request.request_id)
        self.active[request.request_id] = request
        return request

    def end(self, request: Request) -> None:
        """Finished, or cancelled: also while it loads."""
        del self.active[request.request_id]
        if self.scheduler.request_finished(request, list(request.blocks)):
            self.saving[request.request_id] = request
            self._new_saving.append(request.request_id)
        else:
            self._give_back(request)

    def run(self, tokens: list[int], **more: Any) -> Request:
        """A request from its arrival to its end, with its KV checked on every rank."""
        request = self.add(tokens, **more)
        until(lambda: self.step() or request.computed >= len(tokens))
        self.check(request)
        self.end(request)
        until(lambda: self.step() or not self.saving)
        return request

    def check(self, request: Request) -> None:
        for rank, memory in enumerate(self.pools):
            for index, block in enumerate(request.blocks):
                first = index * BLOCK_TOKENS
                for token in range(first, min(first + BLOCK_TOKENS, request.computed)):
                    found = memory[block].view(LAYERS, -1, BLOCK_TOKENS, HEADS)[:, :, token - first]
                    assert torch.equal(found, self._kv(rank, request.tokens, token)), (rank, index, token)

    # ---- the executor ------------------------------------------------------------------------------------------------
    def step(self, budget: int = 4096) -> None:
        """One iteration: metadata, loads, the forward pass, stores, and what has ended."""
        output, computes = SchedulerOutput(), []
        for request in self.active.values():
            count = min(budget, len(request.tokens) - request.computed)
            if request.request_id in self.loading or count <= 0:
                continue
            data = RequestData(request.request_id, request.tokens, request.blocks, request.computed, count)
            (output.cached_requests if request.seen else output.new_requests).append(data)
            request.seen = True
            computes.append((request, count))
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(metadata))
            worker.start_load_kv(None)
        for request, count in computes:
            self._write(request, request.computed, request.computed + count)
            request.computed += count
        for worker in self.workers:
            worker.wait_for_save(None)
        self._take_ended()

    def _take_ended(self) -> None:
        new_saving, self._new_saving = self._new_saving, []
        new_loading, self._new_loading = self._new_loading, []
        for worker, (saved, loaded) in zip(self.workers, self._named, strict=True):
            more_saved, more_loaded = worker.get_finished(new_saving, new_loading)
            assert not saved & set(more_saved) and not loaded & set(more_loaded), "named twice"
            saved.update(more_saved)
            loaded.update(more_loaded)
        for request_id in set.intersection(*(loaded for _, loaded in self._named)):
            del self.loading[request_id]
            for _, loaded in self._named:
                loaded.remove(request_id)
        for request_id in set.intersection(*(saved for saved, _ in self._named)):
            self._give_back(self.saving.pop(request_id))
            for saved, _ in self._named:
                saved.remove(request_id)

    def _give_back(self, request: Request) -> None:
        for memory in self.pools:
            memory[request.blocks] = NOBODYS
        self._free += request.blocks

    # ---- the model ---------------------------------------------------------------------------------------------------
    def _kv(self, rank: int, tokens: list[int], position: int) -> torch.Tensor:
        """[layer, factor, head] of one token: a function of the tokens up to it."""
        seed = sum((index + 1) * token for index, token in enumerate(tokens[: position + 1])) % 199
        own = 0 if self.latent else rank
        factor = self.pools[0].shape[2]
        layers = torch.arange(LAYERS).view(-1, 1, 1) * 7 + torch.arange(factor).view(1, -1, 1) * 3
        return ((seed + own * 17 + layers + torch.arange(HEADS)) % 251).to(torch.bfloat16)

    def _write(self, request: Request, start: int, end: int) -> None:
        for position in range(start, end):
            block = request.blocks[position // BLOCK_TOKENS]
            for rank, memory in enumerate(self.pools):
                view = memory[block].view(LAYERS, -1, BLOCK_TOKENS, HEADS)
                view[:, :, position % BLOCK_TOKENS] = self._kv(rank, request.tokens, position)
