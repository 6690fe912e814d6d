"""`LMCacheConnectorV1Impl`: what vLLM's own class `LMCacheConnectorV1` calls, handed on to the two sides of ours.

That class loads within a step and reports nothing back to the scheduler. So a forward pass waits for its loads, a step
ends when its stores have read their blocks, and the lease of a hit is held until its request ends. Its calls and their
order are vLLM's. It hands neither `shutdown` on nor that the engine resets its caches, so its object is given ours: an
engine that ends in a process that goes on, as in a notebook, leaves no server behind.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lmcache.integration.engine.connector_metadata import ConnectorMetadata, WorkerReport
from lmcache.integration.vllm.chunk_blocks import NOT_WRITTEN
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
from lmcache.integration.vllm.settings import ConnectorSettings


class _InnerConnector(LMCacheConnectorV1Dynamic):
    def _read_settings(self, extra: Mapping[str, Any]) -> ConnectorSettings:
        # When a load has ended is not known here, so nothing can be learned from how long it took.
        return replace(super()._read_settings(extra), load_or_recompute=False)


class LMCacheConnectorV1Impl:
    """One instance in the scheduler and one in each worker, as vLLM makes them."""

    def __init__(self, vllm_config: Any, role: Any, parent: Any) -> None:
        """`parent`: the object of vLLM's class, which has the KV cache configuration, and later the cache manager."""
        self._inner = _InnerConnector(vllm_config, role, parent._kv_cache_config)
        self._parent = parent
        parent.shutdown = self.shutdown
        # Its class has the base's answer, which counts as success: KV of previous weights would still be found.
        parent.reset_cache = self._inner.reset_cache
        self._workers = vllm_config.parallel_config.world_size
        self._is_bound = False
        self._whole_hits: set[str] = set()  # requests whose last token is part of what is loaded
        self._loading: set[str] = set()  # requests whose lease is held
        self._unsettled: Counter[int] = Counter()  # stores of the last step
        self._failed_blocks: set[int] = set()
        self._metadata = ConnectorMetadata()  # of the step

    # ---- the worker's calls ------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._inner.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: ConnectorMetadata) -> None:
        self._metadata = connector_metadata
        self._inner.bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Returns when the loads of this step have ended."""
        self._inner.start_load_kv(forward_context, **kwargs)
        worker = self._inner.worker_side
        if worker is None:
            return
        ended = worker.await_loads()
        self._failed_blocks |= ended.failed_blocks
        for order in (*self._metadata.loads, *self._metadata.impossible_loads):
            if order.request_id in ended.failed_requests:  # of use as a whole only
                self._failed_blocks.update(block for group in order.groups for block in array("q", group.blocks))
        self._failed_blocks.discard(NOT_WRITTEN)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        self._inner.wait_for_save()
        self._inner.build_connector_worker_meta()  # nobody asks for it

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_events(self) -> list[Any]:
        return []

    # ---- the scheduler's calls ---------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens that are loaded in the step that schedules the request; None: not known yet."""
        self._bind()
        self._load_ended(request.request_id)
        self._inner.on_new_request(request)
        tokens, _ = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        self._whole_hits.discard(request.request_id)
        if tokens and num_computed_tokens + tokens >= request.num_tokens:
            self._whole_hits.add(request.request_id)  # vLLM has to compute one token: its block is loaded all the same
            tokens -= 1
        return tokens

    def update_state_after_alloc(self, request: Any, num_external_tokens: int) -> None:
        side = self._inner.scheduler_side
        if side is None:
            return
        tokens = num_external_tokens
        if tokens:
            self._loading.add(request.request_id)
            tokens += request.request_id in self._whole_hits
        block_ids = self._parent._kv_cache_manager.get_block_ids(request.request_id)
        side.after_allocation(request, block_ids, tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        self._bind()
        metadata = self._inner.build_connector_meta(scheduler_output)
        metadata.await_stores = True
        stores = Counter({order.job: self._workers for order in metadata.stores})
        # Their blocks are read before this step ends, hence before a later one writes to them.
        self._tell(WorkerReport(ended_stores=stores, settled_stores=self._unsettled))
        self._unsettled = stores
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._load_ended(request.request_id)
        self._whole_hits.discard(request.request_id)
        return self._inner.request_finished(request, block_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _bind(self) -> None:
        if self._is_bound:
            return
        self._is_bound = True
        manager = getattr(self._parent, "_kv_cache_manager", None)
        if manager is not None:
            self._inner.bind_kv_cache_manager(manager)
        else:
            self._inner.run_uncached(
                "LMCacheConnectorV1 of this version of vLLM does not know the engine's blocks; use LMCacheMPConnector."
            )

    def _load_ended(self, request_id: str) -> None:
        """Ends the load of a request that is scheduled anew, or over: frames are verified as they are copied, so that a
        lease which ends under a copy costs that copy and nothing else."""
        if request_id in self._loading:
            self._loading.discard(request_id)
            self._tell(WorkerReport(), frozenset({request_id}))

    def _tell(self, report: WorkerReport, loaded: frozenset[str] = frozenset()) -> None:
        """Reports to the scheduler's side as the engine would after a step."""
        self._inner.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=report, invalid_block_ids=set(), finished_recving=loaded, failed_recving=set()
            )
        )
