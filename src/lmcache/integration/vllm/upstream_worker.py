"""What vLLM's own connector class calls in a worker, answered by our worker side.

That class lets the engine hand blocks to other requests on preemption without asking us, so `get_finished`, which ends
every step, returns only when no store reads blocks any more: a copy that ran on would be sealed with a right checksum
over another request's bytes. Loads go on between steps; the engine keeps their blocks until they are reported.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.lookup_client import LookupClient, Progress, RequestSession
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key_batch import ChunkHashes
from lmcache.device.cpu import PagedGroup, describe_group
from lmcache.device.cuda import Gpu, describe_gpu_group
from lmcache.errors import LayoutRefused, LMCacheError, OrderRefused, ServerUnavailable, StaleServer
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, GroupLoad, LoadOrder, StoreOrder
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.instance_id import instance_name
from lmcache.integration.engine.store_telemetry import StoreTelemetry, StoringRank
from lmcache.integration.engine.telemetry_endpoint import TelemetryEndpoint
from lmcache.integration.engine.worker_side import WorkerSide
from lmcache.integration.vllm.chunk_blocks import NOT_WRITTEN
from lmcache.integration.vllm.groups import refuse_settings
from lmcache.integration.vllm.identity import engine_identity, model_identity
from lmcache.integration.vllm.scheduler_process import scheduler_process_id
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.integration.vllm.speculation import has_head
from lmcache.integration.vllm.uncached_adapter import CalledAsDeclared
from lmcache.integration.vllm.upstream_scheduler import chunk_blocks, connect
from lmcache.integration.vllm.upstream_types import LoadStoreOp, ParallelStrategy
from lmcache.protocol.messages import HelloReply
from lmcache.protocol.tokens import pack_tokens
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.vllm")

LOOKUP_SECONDS = 5.0  # L1 has what the scheduler's lookup leased; nothing is loaded from L2 for this


@dataclass(frozen=True)
class _Load:
    """The load of one request. The session is this worker's own: its lookup tells the slots, which this interface has
    no way to pass from the scheduler's."""

    op: LoadStoreOp
    session: RequestSession
    lease: int = 0


class _Serving(NamedTuple):
    """What an operation goes to."""

    worker: WorkerSide
    lookups: LookupClient
    hasher: ChunkHasher
    hello: HelloReply


class LMCacheMPWorkerAdapter(CalledAsDeclared):
    """Belongs to the worker's thread."""

    def __init__(
        self,
        *,
        server_url: str,
        context: Any,
        model_name: str,
        vllm_block_size: int,
        parallel_strategy: ParallelStrategy,
        mq_timeout: float = 300.0,
        heartbeat_interval: float = 10.0,
        engine_config: Callable[[], Any] | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> None:
        """`engine_config` gives vLLM's configuration, which this interface does not pass: vLLM sets it meanwhile."""
        self._environment = environment
        self._url = server_url
        self._model_name = model_name
        self._block_tokens = vllm_block_size
        self._strategy = parallel_strategy
        self._timeout_seconds = mq_timeout
        self._heartbeat_seconds = heartbeat_interval
        self._config = (engine_config or current_config)()
        self.worker_side: WorkerSide | None = None
        self._hasher: ChunkHasher | None = None
        self._lookups: LookupClient | None = None
        self._looking_up: dict[str, _Load] = {}
        self._loading: dict[str, _Load] = {}
        # Loads with frames that were not what their keys say. The server removes what nobody leases, so it is notified
        # when the scheduler's lease has ended with the request.
        self._unreadable: dict[str, tuple[_Load, frozenset[int]]] = {}
        self._aborted: set[str] = set()  # requests that ended before their load
        self._ended: set[str] = set()  # loads that are to be reported
        self._failed_blocks: set[int] = set()
        self._policy_warnings = LogLimiter()
        self._telemetry = self._tells_proxy()

    def _tells_proxy(self) -> StoreTelemetry | None:
        endpoint, strategy = TelemetryEndpoint.read(os.environ), self._strategy
        if endpoint is None or not self._stores:
            return None
        rank = StoringRank(self._model_name, strategy.kv_world_size, strategy.kv_worker_id)
        return StoreTelemetry(endpoint, rank, self._environment)

    @property
    def _stores(self) -> bool:
        return not self._strategy.use_mla or self.is_first_rank_of_pp_group

    @property
    def use_mla(self) -> bool:
        return self._strategy.use_mla

    @property
    def is_first_rank_of_pp_group(self) -> bool:
        """Whether this rank stores, of those that hold the same KV when the model is MLA."""
        return self._strategy.actual_worker_id % self._strategy.tp_size == 0

    # ---- start -------------------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """ConnectionError past `mq_timeout`. An engine whose KV cannot be cached exactly runs uncached."""
        try:
            group = self._describe(kv_caches)
            first = next(iter(kv_caches.values()))
            gpu = Gpu([group], first.get_device()) if first.is_cuda else None
        except LayoutRefused as refusal:
            log.error("This engine runs uncached: %s", refusal)
            return
        strategy = self._strategy
        parallel = self._config.parallel_config
        pid = scheduler_process_id(
            in_scheduler=False,
            executor=str(parallel.distributed_executor_backend or ""),
            workers=strategy.actual_world_size,
        )
        settings = replace(
            ConnectorSettings.read(self._config.kv_transfer_config.kv_connector_extra_config),
            url=self._url,
            heartbeat_interval_seconds=self._heartbeat_seconds,
        )
        self._identity = WorkerIdentity(
            instance_name("vllm", pid),
            strategy.actual_worker_id,
            self._model_name,
            strategy.kv_world_size,
            strategy.kv_worker_id,
            stores=self._stores,
            lossy_serde=settings.lossy_serde,
        )
        make_client = partial(settings.client, environment=self._environment)
        self._serve(WorkerSide(make_client, self._identity, [group], gpu, self._environment, telemetry=self._telemetry))

    def _serve(self, worker: WorkerSide) -> None:
        hello = connect(worker.client, self._timeout_seconds)
        chunk_blocks(hello, self._block_tokens)
        self._hasher = ChunkHasher(hello.hash_algorithm, hello.chunk_tokens)
        self._lookups = LookupClient(worker.client, self._identity.instance_id, self._environment)
        self.worker_side = worker

    def _describe(self, kv_caches: dict[str, Any]) -> PagedGroup:
        config = self._config
        if config is None:
            raise LayoutRefused("vLLM's configuration is not to be had here, so what it means for KV is not known.")
        refuse_settings(config)
        if has_head(config):
            raise LayoutRefused(
                "vLLM's own connector class names chunks by their own tokens, but the KV of a head (EAGLE, MTP) "
                "depends on the next one too: unset LMCACHE_USE_UPSTREAM_MP to use LMCache's own."
            )
        model = config.model_config
        if config.lora_config is not None or model.is_multimodal_model or model.enable_prompt_embeds:
            raise LayoutRefused(
                "vLLM's own connector class looks up by token ids alone, which do not tell images, LoRA adapters or "
                "prompt embeddings apart: unset LMCACHE_USE_UPSTREAM_MP to use LMCache's own."
            )
        if getattr(config, "weight_transfer_config", None) is not None:
            raise LayoutRefused(
                "vLLM's own connector class does not tell when weights are replaced, which --weight-transfer-config is "
                "for, and KV of the previous ones would be found: unset LMCACHE_USE_UPSTREAM_MP to use LMCache's own."
            )
        if str(config.parallel_config.distributed_executor_backend) not in ("uni", "mp", "None"):
            raise LayoutRefused("vLLM's own connector class is served with the executors uni and mp only.")
        if not kv_caches:
            raise LayoutRefused("This model has no KV cache.")
        for name, tensor in kv_caches.items():
            if not hasattr(tensor, "data_ptr"):
                raise LayoutRefused(f"{name} keeps state beside attention KV, which cannot be restored exactly.")
        names = tuple(sorted(kv_caches))
        first = kv_caches[names[0]]
        layers = config.compilation_config.static_forward_context
        if all(_is_local(layers.get(name)) for name in names):
            raise LayoutRefused(
                "Every layer of this model attends to a window only, so the engine gives earlier blocks to other "
                "requests, and vLLM's own connector class does not tell which: unset LMCACHE_USE_UPSTREAM_MP to use "
                "LMCache's own."
            )
        describe = describe_gpu_group if first.is_cuda else describe_group
        return describe(
            [(name, kv_caches[name]) for name in names],
            engine=engine_identity(model_identity(config), _vllm_version(), layers, names, on_gpu=first.is_cuda),
            block_tokens=self._block_tokens,
            num_blocks=first.shape[0],
        )

    # ---- loads -------------------------------------------------------------------------------------------------------
    def batched_submit_retrieve_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], event: Any, cache_salts: list[str] | None = None
    ) -> None:
        """Never waits for the server."""
        if event is not None:
            event.synchronize()
        salts = cache_salts or [""] * len(ops)
        for request_id, op, salt in zip(request_ids, ops, salts, strict=True):
            try:
                self._looking_up[request_id] = self._look_up(request_id, op, salt)
            except Exception as error:  # the root of one load
                self._fail(request_id, op, error)

    def _look_up(self, request_id: str, op: LoadStoreOp, salt: str) -> _Load:
        serving = self._serving(op)
        session = RequestSession(
            f"{request_id}#{self._identity.worker_id}", salt, b"", pack_tokens(op.token_ids[: op.end])
        )
        if not serving.lookups.lookup(session, deadline_seconds=0.0, grace_seconds=LOOKUP_SECONDS):
            raise ServerUnavailable("the server does not answer")
        return _Load(op, session)

    def _start_answered_loads(self, lookups: LookupClient) -> None:
        for request_id, load in list(self._looking_up.items()):
            try:
                if lookups.take_answer(load.session) is Progress.WAITING:
                    continue
                self._start_load(request_id, load)
            except Exception as error:  # the root of one load
                self._fail(request_id, load.op, error)
                lookups.end(load.session)
            del self._looking_up[request_id]

    def _start_load(self, request_id: str, load: _Load) -> None:
        op, answer = load.op, load.session.answer
        serving = self._serving(op)
        if answer is None or load.session.server is not serving.hello:
            raise StaleServer("its server is gone, or did not answer")
        hit_chunks = op.end // serving.hasher.chunk_tokens
        ranks = self._identity.kv_ranks
        if answer.chunks != hit_chunks or len(answer.slots) != 8 * ranks * hit_chunks:
            raise OrderRefused(f"L1 has {answer.chunks} of its {hit_chunks} chunks (any more)")
        blocks = array("q", op.block_ids)
        for index in range(op.skip_first_n_tokens // self._block_tokens):
            blocks[index] = NOT_WRITTEN
        group = GroupLoad(op.start // serving.hasher.chunk_tokens, blocks.tobytes())
        order = LoadOrder(
            request_id,
            serving.hello.server_epoch,
            load.session.cache_salt,
            hit_chunks,
            answer.hashes,
            answer.slots,
            (group,),
            answer.lease,
        )
        serving.worker.start_loads(ConnectorMetadata(loads=[order]), idle_step=False)
        self._loading[request_id] = replace(load, lease=answer.lease)

    def _fail(self, request_id: str, op: LoadStoreOp, error: Exception) -> None:
        if isinstance(error, LMCacheError):
            log.warning("A load for request %s is not possible: %s", request_id, error)
        else:
            log.error("A load for request %s failed", request_id, exc_info=error)
        skipped = op.skip_first_n_tokens // self._block_tokens
        self._failed_blocks.update(op.block_ids[skipped:])
        self._ended.add(request_id)
        self._check_policy()

    # ---- stores ------------------------------------------------------------------------------------------------------
    def batched_submit_store_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], event: Any, cache_salts: list[str] | None = None
    ) -> None:
        """Takes the blocks as they are once `event` has come."""
        if event is not None:
            event.synchronize()
        salts = cache_salts or [""] * len(ops)
        for request_id, op, salt in zip(request_ids, ops, salts, strict=True):
            try:
                serving = self._serving(op)
                hasher = serving.hasher
                hashes = ChunkHashes(hasher.extend(hasher.root(b""), pack_tokens(op.token_ids[: op.end])))
                stored = hashes[op.start // hasher.chunk_tokens :].packed
                blocks = array("q", op.block_ids).tobytes()
                order = StoreOrder(0, serving.hello.server_epoch, salt, stored, (blocks,), request_id=request_id)
                serving.worker.start_stores(ConnectorMetadata(stores=[order]))
            except LMCacheError as error:
                log.debug("Request %s is not stored: %s", request_id, error)
            except Exception:  # the root of one store
                log.exception("Request %s is not stored", request_id)

    # ---- a step ------------------------------------------------------------------------------------------------------
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose blocks no store reads any more, requests whose load has ended).

        The engine gives a finished request's blocks back when it is named in either, and knows it no more from then on:
        one that was aborted while it loads is named when the load has ended, and only then."""
        if self._telemetry is not None:
            self._telemetry.requests_ended(finished_req_ids)
        if self.worker_side is not None and self._lookups is not None:
            self._end_loads(self.worker_side, self._lookups, finished_req_ids)
        ended, self._ended = self._ended, set()
        loading = self._looking_up.keys() | self._loading.keys()
        return (finished_req_ids - loading - ended) or None, ended or None

    def _end_loads(self, worker: WorkerSide, lookups: LookupClient, finished_req_ids: set[str]) -> None:
        self._start_answered_loads(lookups)
        worker.await_stores_read()
        loads = worker.ended_loads()
        report = worker.report()
        unreadable = report.unreadable if report is not None else {}
        self._failed_blocks |= loads.failed_blocks
        if loads.failed_blocks:
            self._check_policy()
        self._aborted |= finished_req_ids & (self._looking_up.keys() | self._loading.keys())
        for request_id in loads.requests:
            load = self._loading.pop(request_id)
            if request_id in unreadable:
                self._unreadable[request_id] = load, unreadable[request_id]
            else:
                lookups.end(load.session)
        self._ended |= loads.requests
        over = finished_req_ids | (self._aborted & self._ended)
        self._aborted -= self._ended
        for request_id in over & self._unreadable.keys():
            load, chunks = self._unreadable.pop(request_id)
            server = load.session.last_server
            # The scheduler says this too, on a connection of its own: it has to come before what follows.
            lookups.end(RequestSession(request_id, "", b"", b"", last_server=server, unconfirmed=True))
            lookups.release(load.lease, server, chunks)
            lookups.end(load.session)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        worker, self.worker_side = self.worker_side, None
        if worker is not None:
            worker.close()
        if self._lookups is not None:
            self._lookups.close()
        if self._telemetry is not None:
            self._telemetry.close()

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _serving(self, op: LoadStoreOp) -> _Serving:
        """LMCacheError when nobody serves it, or the operation is not whole chunks of this server."""
        worker, lookups, hasher = self.worker_side, self._lookups, self._hasher
        hello = worker.client.hello if worker is not None else None
        if worker is None or lookups is None or hasher is None or hello is None:
            raise ServerUnavailable("this engine runs uncached")
        if (hello.chunk_tokens, hello.hash_algorithm) != (hasher.chunk_tokens, hasher.algorithm):
            raise StaleServer("the server has other chunks than the one that this engine started with")
        whole = not (op.start % hasher.chunk_tokens or op.end % hasher.chunk_tokens)
        if not whole or op.end > len(op.token_ids) or len(op) * self._block_tokens != op.end - op.start:
            raise OrderRefused("it does not cover whole chunks")
        return _Serving(worker, lookups, hasher, hello)

    def _check_policy(self) -> None:
        policy = getattr(getattr(self._config, "kv_transfer_config", None), "kv_load_failure_policy", "recompute")
        if policy != "recompute" and self._policy_warnings.due():
            log.warning(
                "A load failed and kv_load_failure_policy is %r: vLLM fails the request. Set it to recompute in "
                "--kv-transfer-config.",
                policy,
            )


def _is_local(layer: Any) -> bool:
    """Whether it attends to near tokens only. Beside other layers that does not matter: with this interface the engine
    then keeps all blocks."""
    return any(getattr(layer, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))


def current_config() -> Any:
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
