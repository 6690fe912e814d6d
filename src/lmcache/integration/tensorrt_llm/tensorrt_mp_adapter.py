"""The classes that TensorRT-LLM's `kv_connector_config: {connector: lmcache-mp}` names.

Rank 0 has both, made from the same arguments; the other ranks have a worker each. Which engine this is shows with its
KV pool: the scheduler begins with the first request after the worker beside it has been given that.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import Any

import tensorrt_llm
from tensorrt_llm._utils import mpi_broadcast, mpi_rank

from lmcache.client.client import Client
from lmcache.device.cuda import Gpu
from lmcache.errors import LayoutRefused, LMCacheError
from lmcache.integration.engine.connector_metadata import ConnectorMetadata
from lmcache.integration.engine.containment import contained
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.instance_id import instance_name
from lmcache.integration.engine.worker_side import WorkerSide
from lmcache.integration.tensorrt_llm.engine_facts import EngineFacts, describe_engine
from lmcache.integration.tensorrt_llm.leader_side import LeaderSide
from lmcache.integration.tensorrt_llm.settings import HEARTBEAT_SECONDS, TensorrtSettings
from lmcache.integration.tensorrt_llm.worker_steps import LoadFailed, WorkerSteps
from lmcache.protocol.messages import RegisterInstance
from lmcache.telemetry.logs import ROOT_LOGGER, configure_logs, level_from

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ImportError:  # where they were before they had a package
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker

log = logging.getLogger("lmcache.tensorrt_llm")

_contained = functools.partial(contained, log)
START_SECONDS = 3.0  # that a start waits for the server; the engine runs uncached until there is one

# The workers of this process that have a pool, by the number of the arguments that they share with their scheduler.
_workers: weakref.WeakValueDictionary[int, LMCacheMPKvConnectorWorker] = weakref.WeakValueDictionary()


def _await_server(client: Client) -> None:
    try:
        client.connect(START_SECONDS)
    except LMCacheError as error:
        log.warning("This engine starts without a cache, and uses it once it is there: %s", error)


class LMCacheMPKvConnectorWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        if not logging.getLogger(ROOT_LOGGER).handlers:
            configure_logs(level_from(os.environ))
        self.settings = TensorrtSettings.read(llm_args, os.environ)
        self.facts: EngineFacts | None = None
        self.instance_id = ""
        self.steps: WorkerSteps | None = None

    def register_kv_caches(self, kv_cache_tensor: Any, secondary_kv_cache_tensor: Any = None) -> None:
        rank = int(mpi_rank())
        # First, because every rank takes part, also one that then runs uncached.
        self.instance_id = mpi_broadcast(instance_name("tensorrt_llm", os.getpid()) if rank == 0 else None, root=0)
        try:
            facts = describe_engine(self._llm_args, str(tensorrt_llm.__version__), kv_cache_tensor)
            gpu = Gpu([facts.group], kv_cache_tensor.get_device()) if kv_cache_tensor.is_cuda else None
        except LayoutRefused as refusal:
            log.log(logging.ERROR if rank == 0 else logging.INFO, "This engine runs uncached: %s", refusal)
            return
        identity = WorkerIdentity(
            self.instance_id,
            rank,
            facts.model_name,
            facts.ranks,
            facts.kv_rank(rank),
            stores=facts.ranks > 1 or rank == 0,
        )
        side = WorkerSide(self.settings.client, identity, [facts.group], gpu)
        self.facts, self.steps = facts, WorkerSteps(side)
        _workers[id(self._llm_args)] = self
        _await_server(side.client)

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        if self.steps is not None and isinstance(metadata, ConnectorMetadata):
            self.steps.bind(metadata)

    def start_load_kv(self, stream: Any) -> None:
        if self.steps is not None:
            self.steps.start_loads()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        return

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        return

    def requires_layerwise_transfer_hooks(self) -> bool:
        return False

    @_contained(None)
    def wait_for_save(self, stream: Any) -> None:
        if self.steps is not None:
            self.steps.start_stores()

    # Not contained: a load that failed must not be taken for one that did not.
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        if self.steps is not None:
            return self.steps.finished(finished_gen_req_ids, started_loading_req_ids)
        if started_loading_req_ids:
            raise LoadFailed(f"This rank runs uncached and cannot load request {started_loading_req_ids[0]}.")
        return list(finished_gen_req_ids), []

    def shutdown(self) -> None:
        steps, self.steps = self.steps, None
        if steps is not None:
            steps.close()


class LMCacheMPKvConnectorScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._side: LeaderSide | None = None

    @property
    def side(self) -> LeaderSide | None:
        """None before the pool is known, and for an engine that runs uncached."""
        if self._side is None:
            worker = _workers.get(id(self._llm_args))
            if worker is not None and worker.facts is not None:
                self._side = self._start(worker, worker.facts)
        return self._side

    def _start(self, worker: LMCacheMPKvConnectorWorker, facts: EngineFacts) -> LeaderSide:
        client = worker.settings.client()
        client.declare(
            RegisterInstance(
                worker.instance_id,
                facts.model_name,
                facts.ranks,
                1,
                HEARTBEAT_SECONDS,
                f"tensorrt_llm {tensorrt_llm.__version__}",
            )
        )
        _await_server(client)
        return LeaderSide(
            client,
            worker.instance_id,
            ranks=facts.ranks,
            block_tokens=facts.block_tokens,
            lookup_seconds=worker.settings.lookup_seconds,
        )

    def wait_for_initialization(self) -> None:
        """Called once every worker has its pool; by earlier versions not at all."""
        _ = self.side

    @_contained((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self.side is None:
            return 0, False
        tokens = self.side.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    # Not contained: once the engine counts on a load, it has to be ordered.
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        if self.side is not None:
            self.side.after_allocation(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        return self.side.step_metadata(scheduler_output) if self.side is not None else ConnectorMetadata()

    @_contained(True)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.side.request_finished(request) if self.side is not None else False

    def shutdown(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()
