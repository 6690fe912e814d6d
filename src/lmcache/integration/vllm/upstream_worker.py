"""What vLLM's own connector class calls in a worker, answered by our worker side.

That class lets the engine hand blocks to other requests on preemption without asking us, so `get_finished`, which ends
every step, returns only when no store reads blocks any more: a copy that ran on would be sealed with a right checksum
over another request's bytes. Loads go on between steps; the engine keeps their blocks until they are reported.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache.client.client import Client
from lmcache.clock import SystemClock
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.device.cpu import PagedGroup, describe_group
from lmcache.device.cuda import Gpu, describe_gpu_group
from lmcache.errors import LayoutRefused, LMCacheError
from lmcache.integration.vllm.chunk_blocks import NOT_WRITTEN
from lmcache.integration.vllm.engine_process import instance_name, scheduler_process_id
from lmcache.integration.vllm.frame_names import WorkerIdentity
from lmcache.integration.vllm.groups import refuse_settings
from lmcache.integration.vllm.identity import engine_identity, model_identity
from lmcache.integration.vllm.notices import Notices
from lmcache.integration.vllm.orders import GroupLoad, LoadOrder, StepOrders, StoreOrder
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.integration.vllm.upstream_scheduler import chunk_blocks, connect
from lmcache.integration.vllm.upstream_types import LoadStoreOp, ParallelStrategy
from lmcache.integration.vllm.worker_side import WorkerSide
from lmcache.protocol.messages import EndSession, HelloReply, Lookup, LookupReply, Release
from lmcache.protocol.tokens import pack_tokens
from lmcache.transport.client import Pending

log = logging.getLogger("lmcache.vllm")

LOOKUP_SECONDS = 5.0  # L1 has what the scheduler's lookup leased; nothing is loaded from L2 for this


@dataclass
class _Asked:
    """A load that waits for its slots."""

    op: LoadStoreOp
    cache_salt: str
    hello: HelloReply
    session: str
    pending: Pending[LookupReply]


@dataclass(frozen=True)
class _Loading:
    session: str
    lease: int


class LMCacheMPWorkerAdapter:
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
    ) -> None:
        """`engine_config` gives vLLM's configuration, which this interface does not pass: vLLM sets it meanwhile."""
        self._url = server_url
        self._model_name = model_name
        self._block_tokens = vllm_block_size
        self._strategy = parallel_strategy
        self._timeout_seconds = mq_timeout
        self._heartbeat_seconds = heartbeat_interval
        self._config = (engine_config or _current_config)()
        self._worker: WorkerSide | None = None
        self._hasher: ChunkHasher | None = None
        self._notices: Notices | None = None
        self._asked: dict[str, _Asked] = {}
        self._loading: dict[str, _Loading] = {}
        # Loads with frames that were not what their keys say. The server removes what nobody leases, so it is told when
        # the scheduler's lease has ended with the request.
        self._spoilt: dict[str, tuple[_Loading, frozenset[int]]] = {}
        self._aborted: set[str] = set()  # requests that ended before their load
        self._ended: set[str] = set()  # loads that are to be reported
        self._failed_blocks: set[int] = set()
        self._policy_said = False

    @property
    def use_mla(self) -> bool:
        return self._strategy.use_mla

    @property
    def is_first_rank_of_pp_group(self) -> bool:
        """Of the ranks that hold the same KV when the model is MLA, the one that stores it."""
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
        self._identity = WorkerIdentity(
            instance_name(pid),
            strategy.actual_worker_id,
            self._model_name,
            strategy.kv_world_size,
            strategy.kv_worker_id,
            stores=not strategy.use_mla or self.is_first_rank_of_pp_group,
        )
        transfer = ConnectorSettings.read(self._config.kv_transfer_config.kv_connector_extra_config).transfer_mode

        def make_client(meet: Callable[[Client], None]) -> Client:
            return Client(
                self._url,
                heartbeat_interval_seconds=self._heartbeat_seconds,
                transfer=transfer,
                on_new_incarnation=meet,
            )

        self._serve(WorkerSide(make_client, self._identity, [group], gpu))

    def _serve(self, worker: WorkerSide) -> None:
        hello = connect(worker.client, self._timeout_seconds)
        chunk_blocks(hello, self._block_tokens)
        self._hasher = ChunkHasher(hello.hash_algorithm, hello.chunk_tokens)
        self._notices = Notices(worker.client, SystemClock())
        self._worker = worker

    def _describe(self, kv_caches: dict[str, Any]) -> PagedGroup:
        config = self._config
        if config is None:
            raise LayoutRefused("vLLM's configuration is not to be had here, so what it means for KV is not known.")
        refuse_settings(config)
        model = config.model_config
        if config.lora_config is not None or model.is_multimodal_model or model.enable_prompt_embeds:
            raise LayoutRefused(
                "vLLM's own connector class looks up by token ids alone, which do not tell images, LoRA adapters or "
                "prompt embeddings apart: unset LMCACHE_USE_UPSTREAM_MP to use LMCache's own."
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
                self._asked[request_id] = self._ask(request_id, op, salt)
            except LMCacheError as error:
                log.warning("A load for request %s is not possible: %s", request_id, error)
                self._fail(request_id, op)
            except Exception:  # the root of one load
                log.exception("A load for request %s failed", request_id)
                self._fail(request_id, op)

    def _ask(self, request_id: str, op: LoadStoreOp, salt: str) -> _Asked:
        """A lookup of this worker's own tells it the slots: this interface has no way to pass the scheduler's."""
        worker, _, hello = self._serving(op)
        session = f"{request_id}#{self._identity.worker_id}"
        message = Lookup(
            *(self._identity.instance_id, session, salt, 0, pack_tokens(op.token_ids[: op.end])), deadline_seconds=0.0
        )
        return _Asked(op, salt, hello, session, worker.client.submit("lookup", message, LOOKUP_SECONDS))

    def _start_answered_loads(self) -> None:
        for request_id, asked in list(self._asked.items()):
            if not asked.pending.done():
                continue
            del self._asked[request_id]
            try:
                self._start_load(request_id, asked)
            except LMCacheError as error:
                log.warning("A load for request %s is not possible: %s", request_id, error)
                self._end_session(_Loading(asked.session, 0))
                self._fail(request_id, asked.op)

    def _start_load(self, request_id: str, asked: _Asked) -> None:
        reply, op = asked.pending.result(), asked.op
        worker, hasher, hello = self._serving(op)
        if hello is not asked.hello:
            raise LayoutRefused("its server is gone")
        hit_chunks = op.end // hasher.chunk_tokens
        ranks = self._identity.kv_ranks
        if reply.chunks != hit_chunks or len(reply.slots) != 8 * ranks * hit_chunks:
            raise LayoutRefused(f"L1 has {reply.chunks} of its {hit_chunks} chunks (any more)")
        blocks = array("q", op.block_ids)
        for index in range(op.skip_first_n_tokens // self._block_tokens):
            blocks[index] = NOT_WRITTEN
        load = GroupLoad(op.start // hasher.chunk_tokens, blocks.tobytes())
        order = LoadOrder(
            *(request_id, hello.boot_token, asked.cache_salt, hit_chunks, reply.hashes, reply.slots, (load,)),
            reply.lease,
        )
        self._loading[request_id] = _Loading(asked.session, reply.lease)
        worker.start_loads(StepOrders(loads=[order]), idle_step=False)

    def _fail(self, request_id: str, op: LoadStoreOp) -> None:
        skipped = op.skip_first_n_tokens // self._block_tokens
        self._failed_blocks.update(op.block_ids[skipped:])
        self._ended.add(request_id)
        self._say_policy()

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
                worker, hasher, hello = self._serving(op)
                hashes = hasher.extend(hasher.root(b""), pack_tokens(op.token_ids[: op.end]))
                hashes = hashes[op.start // hasher.chunk_tokens * CHUNK_HASH_BYTES :]
                order = StoreOrder(0, hello.boot_token, salt, hashes, (array("q", op.block_ids).tobytes(),))
                worker.start_stores(StepOrders(stores=[order]))
            except LMCacheError as error:
                log.debug("Request %s is not stored: %s", request_id, error)
            except Exception:  # the root of one store
                log.exception("Request %s is not stored", request_id)

    # ---- a step ------------------------------------------------------------------------------------------------------
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose blocks no store reads any more, requests whose load has ended).

        The engine gives a finished request's blocks back when it is named in either, and knows it no more from then on:
        one that was aborted while it loads is named when the load has ended, and only then."""
        if self._worker is not None:
            self._end_loads(self._worker, finished_req_ids)
        ended, self._ended = self._ended, set()
        loading = self._asked.keys() | self._loading.keys()
        return (finished_req_ids - loading - ended) or None, ended or None

    def _end_loads(self, worker: WorkerSide, finished_req_ids: set[str]) -> None:
        self._start_answered_loads()
        worker.await_stores_read()
        loads = worker.ended_loads()
        report = worker.report()
        unreadable = report.unreadable if report is not None else {}
        self._failed_blocks |= loads.failed_blocks
        if loads.failed_blocks:
            self._say_policy()
        self._aborted |= finished_req_ids & (self._asked.keys() | self._loading.keys())
        for request_id in loads.requests:
            load = self._loading.pop(request_id)
            if request_id in unreadable:
                self._spoilt[request_id] = load, unreadable[request_id]
            else:
                self._end_session(load)
        self._ended |= loads.requests
        over = finished_req_ids | (self._aborted & self._ended)
        self._aborted -= self._ended
        for request_id in over & self._spoilt.keys():
            # The scheduler says this too, on a connection of its own: it has to come before what follows.
            self._end_session(_Loading(request_id, 0))
            self._end_session(*self._spoilt.pop(request_id))

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if self._notices is not None:
            self._notices.close()
        if worker is not None:
            worker.close()

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _serving(self, op: LoadStoreOp) -> tuple[WorkerSide, ChunkHasher, HelloReply]:
        """Who serves it. LayoutRefused when nobody does, or the operation is not whole chunks of this server."""
        worker, hasher = self._worker, self._hasher
        hello = worker.client.hello if worker is not None else None
        if worker is None or hasher is None or hello is None:
            raise LayoutRefused("this engine runs uncached")
        if (hello.chunk_tokens, hello.hash_algorithm) != (hasher.chunk_tokens, hasher.algorithm):
            raise LayoutRefused("the server has other chunks than the one that this engine started with")
        whole = not (op.start % hasher.chunk_tokens or op.end % hasher.chunk_tokens)
        if not whole or op.end > len(op.token_ids) or len(op) * self._block_tokens != op.end - op.start:
            raise LayoutRefused("it does not cover whole chunks")
        return worker, hasher, hello

    def _end_session(self, load: _Loading, unreadable: frozenset[int] = frozenset()) -> None:
        assert self._notices is not None
        instance_id = self._identity.instance_id
        if unreadable:
            self._notices.send("release", Release(instance_id, load.lease, sorted(unreadable)))
        self._notices.send("end_session", EndSession(instance_id, load.session), twice=load.lease == 0)

    def _say_policy(self) -> None:
        policy = getattr(getattr(self._config, "kv_transfer_config", None), "kv_load_failure_policy", "recompute")
        if policy != "recompute" and not self._policy_said:
            self._policy_said = True
            log.warning(
                "A load failed and kv_load_failure_policy is %r: vLLM fails the request. Set it to recompute in "
                "--kv-transfer-config.",
                policy,
            )


def _current_config() -> Any:
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
