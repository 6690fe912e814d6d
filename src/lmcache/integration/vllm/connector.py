"""`LMCacheMPConnector`: what vLLM calls, handed on to the scheduler side or the worker side.

vLLM runs one instance in its scheduler and one in every worker. Where the KV layout cannot be cached exactly, both do
nothing and the engine runs as it would without a connector. A fault of ours in a call is contained: it costs a miss.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.device.cpu import PagedGroup, describe_group
from lmcache.device.cuda import Gpu, describe_gpu_group
from lmcache.errors import LayoutRefused, LMCacheError
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, WorkerReport
from lmcache.integration.engine.containment import contained
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.owned_server import OwnedServer
from lmcache.integration.engine.store_telemetry import StoreTelemetry, StoringRank
from lmcache.integration.engine.telemetry_endpoint import TelemetryEndpoint
from lmcache.integration.engine.worker_side import EndedLoads, WorkerSide
from lmcache.integration.vllm.block_tables import BlockTables
from lmcache.integration.vllm.chunk_blocks import is_all_or_nothing
from lmcache.integration.vllm.groups import CacheGroup, cacheable_groups
from lmcache.integration.vllm.identity import engine_identity, model_identity, names_media
from lmcache.integration.vllm.kv_event_maker import EventOptions
from lmcache.integration.vllm.kv_events import KVEvents
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from lmcache.integration.vllm.settings import SHORT_START_SECONDS, ConnectorSettings
from lmcache.integration.vllm.speculation import longest_drafted_tokens, lookahead_tokens
from lmcache.integration.vllm.step_builder import BlockTable
from lmcache.integration.vllm.utils import mla_enabled
from lmcache.integration.vllm.versions import (
    current_transfer_config,
    fill_unknown_methods,
    installed_engine,
    installed_events,
    missing_in_pool,
    publishes_events,
)
from lmcache.protocol.messages import RegisterInstance
from lmcache.telemetry.logs import ROOT_LOGGER, configure_logs, level_from

log = logging.getLogger("lmcache.vllm")

ENGINE = installed_engine()

KVConnectorMetadata.register(ConnectorMetadata)
KVConnectorWorkerMetadata.register(WorkerReport)

# The only workers of their engines, by engine, whose scheduler may live in this process too.
_lone_workers: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()

_contained = functools.partial(contained, log)


class LMCacheMPConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Best effort: a store that is lost is a later miss."""

    _telemetry: StoreTelemetry | None = None  # of a worker that stores: None where no proxy waits for what is stored

    def __init__(
        self,
        vllm_config: Any,
        role: KVConnectorRole,
        kv_cache_config: Any,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> None:
        """vLLM passes the first three; a simulation decides by the last what happens when."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._environment = environment
        if not logging.getLogger(ROOT_LOGGER).handlers:  # vLLM sets up its own loggers only
            configure_logs(level_from(os.environ))
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._groups: tuple[CacheGroup, ...] = ()
        self._server: OwnedServer | None = None
        self._block_tables: BlockTables | None = None
        self._kv_caches: dict[str, Any] = {}
        self._failed_blocks: set[int] = set()
        self._settings = self._read_settings(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.WORKER:
            self._telemetry = self._tells_proxy()
            self._warn_of_failing_loads()
        try:
            if not (current_platform.is_cpu() or current_platform.is_cuda()):
                raise LayoutRefused("Only vLLM for CPU and for NVIDIA GPUs is supported so far.")
            self._groups = self._cacheable_groups()
        except LayoutRefused as refusal:
            if role == KVConnectorRole.SCHEDULER:  # every worker comes to the same: logged once
                log.error("This engine runs uncached: %s", refusal)
            return
        self._begin_server(role)
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler_side()

    @property
    def requires_kv_delivery(self) -> bool:
        """An engine that only stores does so for others: vLLM computes again what a preemption took from it."""
        role = self._kv_transfer_config
        return bool(role.is_kv_producer and not role.is_kv_consumer)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    # ---- start -------------------------------------------------------------------------------------------------------
    def _read_settings(self, extra: Mapping[str, Any]) -> ConnectorSettings:
        return ConnectorSettings.read(extra)

    def _tells_proxy(self) -> StoreTelemetry | None:
        endpoint = TelemetryEndpoint.read(os.environ)
        if endpoint is None or not self._kv_transfer_config.is_kv_producer:
            return None
        rank = self._vllm_config.parallel_config.rank
        if not self._stores_for_kv_rank(rank):
            return None
        storing = StoringRank(self._model_name, self._kv_ranks, rank // self._workers_per_kv_rank)
        return StoreTelemetry(endpoint, storing, self._environment)

    def _warn_of_failing_loads(self) -> None:
        """Inside a MultiConnector that one's policy counts, which is out of our reach in the scheduler's process."""
        outer, ours = current_transfer_config(), self._kv_transfer_config
        policy = getattr(outer, "kv_load_failure_policy", "recompute")
        if outer is None or outer.kv_connector == ours.kv_connector or not ours.is_kv_consumer:
            return
        if policy != "recompute" and self._vllm_config.parallel_config.rank == 0:
            log.warning(
                "kv_load_failure_policy of %s is %r: vLLM fails requests whose KV was evicted or damaged after the "
                'lookup. Set "kv_load_failure_policy":"recompute" beside it in --kv-transfer-config.',
                *(outer.kv_connector, policy),
            )

    def _begin_server(self, role: KVConnectorRole) -> None:
        """The first worker, where it is on the scheduler's machine, is ready earlier: the server starts meanwhile."""
        order, parallel = self._settings.autostart, self._vllm_config.parallel_config
        is_beside = parallel.rank == 0 and parallel.distributed_executor_backend in ("uni", "mp")
        if order is None or not (role == KVConnectorRole.SCHEDULER or is_beside):
            return
        self._server = OwnedServer.enter(order, self._environment)
        try:
            self._server.begin()
        except LMCacheError:
            log.debug("The server cannot be started; the scheduler side says why", exc_info=True)

    def _cacheable_groups(self) -> tuple[CacheGroup, ...]:
        """LayoutRefused where this engine has to run uncached."""
        if ENGINE.refusal:
            raise LayoutRefused(ENGINE.refusal)
        groups = cacheable_groups(self._vllm_config, self._kv_cache_config, follows_sleep=ENGINE.follows_sleep)
        if current_platform.is_cuda() and any(group.is_state for group in groups):
            raise LayoutRefused("This model keeps a recurrent state, which is restored on CPU engines only so far.")
        if is_all_or_nothing(groups) and ENGINE.transfer_results is None:
            raise LayoutRefused(
                "This model has sliding windows, a recurrent state or several KV cache groups, and this version of "
                "vLLM cannot take back a load of those that failed; use a later version, or start vLLM with "
                "--disable-hybrid-kv-cache-manager."
            )
        return groups

    def _start_scheduler_side(self) -> None:
        # A block that cannot be loaded is computed, never a failed request. vLLM reads this after building us.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        client = self._settings.client(environment=self._environment)
        client.declare(
            RegisterInstance(
                self._instance_id,
                self._model_name,
                self._kv_ranks,
                len(self._groups),
                self._settings.heartbeat_interval_seconds,
                f"vllm {ENGINE.version}",
                [group.tail_tokens for group in self._groups],
                lookahead_tokens=lookahead_tokens(self._vllm_config),
            )
        )
        self._await_server(client)
        role = self._kv_transfer_config
        if not role.is_kv_consumer or not role.is_kv_producer:
            log.info("kv_role is %s: this engine only %s", role.kv_role, "loads" if role.is_kv_consumer else "stores")
        self.scheduler_side = SchedulerSide(
            client,
            self._instance_id,
            self._scheduler_options(),
            local_worker=lambda: _lone_workers.get(self._instance_id),
            events=self._events(client),
            environment=self._environment,
        )

    def _scheduler_options(self) -> SchedulerOptions:
        role, parallel = self._kv_transfer_config, self._vllm_config.parallel_config
        return SchedulerOptions(
            groups=self._groups,
            ranks=self._kv_ranks,
            workers=parallel.world_size,
            loads=role.is_kv_consumer,
            stores=role.is_kv_producer,
            save_decode=self._saves_decode(),
            load_or_recompute=self._settings.load_or_recompute,
            media_have_names=self._media_have_names(),
            # Without a process of its own an engine runs no step once its requests have ended.
            await_stores=parallel.world_size > 1 and not envs.VLLM_ENABLE_V1_MULTIPROCESSING,
            lookup_timeout_seconds=self._settings.lookup_timeout_seconds,
            handover_timeout_seconds=self._settings.handover_timeout_seconds,
            lookahead_tokens=lookahead_tokens(self._vllm_config),
            longest_drafted_tokens=longest_drafted_tokens(self._vllm_config),
        )

    def _events(self, client: Client) -> KVEvents | None:
        if not publishes_events(self._vllm_config):
            if self._settings.events_shared_l2:
                log.warning("lmcache.mp.kv_events_shared_l2 has no effect, as --kv-events-config turns no events on")
            return None
        events = installed_events()
        if events is None:
            log.warning("KV events of this version of vLLM name no tier: none are published of the LMCache server")
            return None
        group = next((number for number, group in enumerate(self._groups) if not group.tail_tokens), 0)
        options = EventOptions(
            block_tokens=self._groups[group].block_tokens, group=group, shared_l2=self._settings.events_shared_l2
        )
        return KVEvents(client, self._instance_id, options, events, self._environment)

    def _saves_decode(self) -> bool:
        if self._settings.save_decode_cache and any(group.is_state for group in self._groups):
            log.warning(
                "What decoding makes is not stored: the state at the end of a chunk is gone before its name is known"
            )
            return False
        return self._settings.save_decode_cache

    def _media_have_names(self) -> bool:
        if names_media(self._vllm_config):
            return True
        log.warning(
            "Requests with images or other media run uncached: this engine names them by their order only. Start vLLM "
            "with --enable-prefix-caching, or with --mm-processor-cache-gb above 0"
        )
        return False

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._kv_caches = kv_caches
        if not self._groups:
            return
        parallel = self._vllm_config.parallel_config
        try:
            groups = self._describe(kv_caches)
            gpu = Gpu(groups, next(iter(kv_caches.values())).get_device()) if current_platform.is_cuda() else None
        except LayoutRefused as refusal:
            log.log(logging.ERROR if parallel.rank == 0 else logging.INFO, "This engine runs uncached: %s", refusal)
            return
        identity = WorkerIdentity(
            self._instance_id,
            parallel.rank,
            self._model_name,
            self._kv_ranks,
            parallel.rank // self._workers_per_kv_rank,
            stores=self._stores_for_kv_rank(parallel.rank),
            lossy_serde=self._settings.lossy_serde,
        )

        make_client = functools.partial(self._settings.client, environment=self._environment)
        self.worker_side = WorkerSide(make_client, identity, groups, gpu, self._environment, telemetry=self._telemetry)
        if parallel.world_size == 1:
            _lone_workers[self._instance_id] = self.worker_side
        self._await_server(self.worker_side.client)

    def _describe(self, kv_caches: dict[str, Any]) -> list[PagedGroup]:
        layers = self._vllm_config.compilation_config.static_forward_context
        on_gpu = current_platform.is_cuda()
        describe = describe_gpu_group if on_gpu else describe_group
        described = []
        model = model_identity(self._vllm_config)
        for group in self._groups:
            missing = [name for name in group.layer_names if name not in kv_caches]
            if missing:
                raise LayoutRefused(f"The engine did not register a KV tensor for {missing[0]}.")
            paged = describe(
                [(name, kv_caches[name]) for name in group.layer_names],
                engine=engine_identity(
                    model, ENGINE.version, layers, group.layer_names, on_gpu=on_gpu, state=group.state
                ),
                block_tokens=group.block_tokens,
                num_blocks=self._kv_cache_config.num_blocks,
            )
            described.append(replace(paged, is_state=group.is_state))
        return described

    def _await_server(self, client: Client) -> None:
        if self._settings.autostart is not None and not self._is_started(client):
            return
        insist_seconds = self._settings.mq_timeout_seconds
        try:
            client.connect(SHORT_START_SECONDS if insist_seconds is None else insist_seconds)
        except LMCacheError as error:
            if insist_seconds is not None:
                client.close()
                raise ConnectionError(
                    f"{error} Start the server, or leave lmcache.mp.mq_timeout out to start the engine without it."
                ) from error

    def _is_started(self, client: Client) -> bool:
        """In a worker no server is waited for that the scheduler side starts only later."""
        client.start()
        if self._role != KVConnectorRole.SCHEDULER or self._server is None:
            return False
        clock = self._environment.clock
        began = clock.monotonic()
        try:
            self._server.wait(self._settings.wait_timeout_seconds)
            log.info("The engine waited %.1f s for the LMCache server", clock.monotonic() - began)
        except LMCacheError as error:
            log.error("This engine runs uncached, as no server could be started at %s: %s", client.endpoint, error)
            return self._settings.mq_timeout_seconds is not None
        worker = _lone_workers.get(self._instance_id)
        if worker is not None:
            with contextlib.suppress(LMCacheError):  # it says so itself
                worker.client.connect(SHORT_START_SECONDS)
        return True

    @property
    def _instance_id(self) -> str:
        return str(self._kv_transfer_config.engine_id)

    @property
    def _model_name(self) -> str:
        return str(self._vllm_config.model_config.model)

    @property
    def _workers_per_kv_rank(self) -> int:
        """Tensor-parallel ranks of an MLA model all hold the same KV."""
        parallel = self._vllm_config.parallel_config
        return int(parallel.tensor_parallel_size) if mla_enabled(self._vllm_config.model_config) else 1

    def _stores_for_kv_rank(self, rank: int) -> bool:
        return rank % self._workers_per_kv_rank == 0

    @property
    def _kv_ranks(self) -> int:
        return int(self._vllm_config.parallel_config.world_size) // self._workers_per_kv_rank

    # ---- sleep -------------------------------------------------------------------------------------------------------
    def unregister_kv_caches(self) -> None:
        """The memory of the KV caches goes: returns when no copy touches it any more."""
        worker, self.worker_side = self.worker_side, None
        if worker is not None:
            worker.await_stores_read()
            worker.close()

    def restore_kv_caches(self) -> None:
        if self.worker_side is None and self._kv_caches:
            self.register_kv_caches(self._kv_caches)

    # ---- the scheduler's calls ---------------------------------------------------------------------------------------
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._bind(kv_cache_manager.block_pool, kv_cache_manager.get_block_ids)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """All that an engine hands over that does not call `bind_kv_cache_manager`; the others call both."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if not ENGINE.binds_manager:
            self._block_tables = BlockTables()
            self._bind(gpu_block_pool, self._block_tables)

    def _bind(self, pool: Any, block_table: BlockTable) -> None:
        if self.scheduler_side is None:
            return
        if missing := missing_in_pool(pool):
            self.run_uncached(f"The engine's block pool has no {', '.join(missing)}.")
            return
        self.scheduler_side.bind(pool, block_table)
        reset_pool = pool.reset_prefix_cache

        def reset_without_pins() -> bool:  # vLLM asks no connector before it looks whether a block is in use
            self._await_pins()
            is_reset = bool(reset_pool())
            if is_reset and self.scheduler_side is not None and self.scheduler_side.events is not None:
                self.scheduler_side.events.cleared()
            return is_reset

        pool.reset_prefix_cache = reset_without_pins

    def run_uncached(self, reason: str) -> None:
        """From the start on. `reason`: a sentence for the log."""
        side, self.scheduler_side = self.scheduler_side, None
        if side is not None:
            log.error("This engine runs uncached: %s", reason)
            side.close()

    @_contained(None)
    def on_new_request(self, request: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.on_new_request(request)

    @_contained((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is None:
            return 0, False
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    # Not contained: once vLLM counts on a load, it has to be ordered.
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.after_allocation(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if self.scheduler_side is None or num_external_tokens == 0:
            return {}
        from_disk = min(num_external_tokens, self.scheduler_side.tokens_not_in_l1(request.request_id))
        return ENGINE.split_hit(num_external_tokens - from_disk, from_disk)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        if self.scheduler_side is None:
            return ConnectorMetadata()
        if self._block_tables is not None:
            self._block_tables.follow(scheduler_output)
        return self.scheduler_side.step_metadata(scheduler_output)

    @_contained(None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.step_ended(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_contained((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are never kept by request: those that a store still reads are pinned one by one. What the answer tells
        the decode engine is one key, as every connector of an engine adds keys of its own."""
        if self.scheduler_side is None:
            return False, None
        return False, self.scheduler_side.request_finished(request, block_ids)

    @_contained(None)
    def _await_pins(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.await_pins()

    @_contained(False)
    def reset_cache(self) -> bool:
        """Called with `reset_prefix_cache(reset_connector=True)`, which says that vLLM's weights changed."""
        return self.scheduler_side.reset() if self.scheduler_side is not None else True

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side is not None and self.scheduler_side.pins_end_soon

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side is not None and self.scheduler_side.needs_steps

    @_contained(())
    def take_events(self) -> Iterable[Any]:
        if self.scheduler_side is None or self.scheduler_side.events is None:
            return ()
        return self.scheduler_side.events.take()

    # ---- the worker's calls ------------------------------------------------------------------------------------------
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """In a step without a forward pass its stores begin here: some engines then do not call `wait_for_save`."""
        if self.worker_side is not None:
            metadata = self._step_metadata()
            self.worker_side.start_loads(metadata, idle_step=metadata.idle)
            if metadata.idle:
                self.worker_side.start_stores(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self.worker_side is not None:
            metadata = self._step_metadata()
            if not metadata.idle:
                self.worker_side.start_stores(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended = self._ended_loads(finished_req_ids)
        return ENGINE.transfer_results(finished_recving=ended.requests, failed_recving=ended.failed_requests)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What engines call that know no results of whole requests: then no load fails as a whole."""
        return None, self._ended_loads(finished_req_ids).requests or None

    def _ended_loads(self, ended_requests: set[str]) -> EndedLoads:
        if self._telemetry is not None:
            self._telemetry.requests_ended(ended_requests)
        ended = self.worker_side.ended_loads() if self.worker_side is not None else EndedLoads()
        self._failed_blocks |= ended.failed_blocks
        return ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.worker_side.report() if self.worker_side is not None else None

    def _step_metadata(self) -> ConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ConnectorMetadata)
        return metadata

    # ---- both --------------------------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.close()
        if self.worker_side is not None:
            self.worker_side.close()
        if self._telemetry is not None:
            self._telemetry.close()
        if self._server is not None:
            self._server.leave()
            self._server = None


ENGINE = replace(ENGINE, unknown=fill_unknown_methods(LMCacheMPConnector))
