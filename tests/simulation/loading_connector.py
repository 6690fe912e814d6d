"""Another connector that loads prompts into the engine's blocks as NixlConnector does: asynchronously, over some steps,
and not always with success."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

ENGINE = "engine"  # key of `kv_connector_extra_config`: the simulated engine
_HAS, _FAILS = 0.5, 0.15  # of the prompts, and of the loads


@dataclass
class _Load:
    name: str
    tokens: list[int]
    start: int
    end: int
    blocks: list[list[int]]
    steps: int
    fails_at: float | None  # of its part; None: it does not


@dataclass
class _Loads(KVConnectorMetadata):
    started: list[_Load] = field(default_factory=list)


class LoadingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine = vllm_config.kv_transfer_config.kv_connector_extra_config[ENGINE]
        self._rank = vllm_config.parallel_config.rank
        self._has: set[str] = set()  # prompts that nobody has loaded yet
        self._loads: list[_Load] = []  # of the scheduler: to be ordered; of a worker: under way
        self._failed_blocks: set[int] = set()

    # ---- the scheduler's calls ---------------------------------------------------------------------------------------
    def on_new_request(self, request: Any) -> None:
        if self._engine.world.random.random() < _HAS:
            self._has.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._end_of(request) - num_computed_tokens
        return (tokens, True) if request.request_id in self._has and tokens > 0 else (0, False)

    def _end_of(self, request: Any) -> int:
        """With a window not the last token: vLLM computes that again, and has dropped what it alone sees."""
        return int(request.num_prompt_tokens - (self._engine.shape.window is not None))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, random = request.request_id, self._engine.world.random
        if name in self._has and num_external_tokens:
            end = self._end_of(request)
            load = _Load(
                *(name, list(request.prompt_token_ids), end - num_external_tokens, end),
                blocks=[list(ids) for ids in blocks.get_block_ids()],
                steps=random.choice((0, 0, 1, 3, 20)),
                fails_at=random.random() if random.random() < _FAILS else None,
            )
            self._loads.append(load)
        self._has.discard(name)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return _Loads(loads)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        self._has.discard(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    # ---- the worker's calls ------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Loads)
        self._loads += metadata.started

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for load in self._loads:
            load.steps -= 1
            if load.steps < 0:
                self._end(load, results)
        self._loads = [load for load in self._loads if load.steps >= 0]
        return results

    def _end(self, load: _Load, results: KVConnectorTransferResults) -> None:
        results.finished_recving.add(load.name)
        size, end = self._engine.shape.block_tokens, load.end
        if load.fails_at is not None and len(load.blocks) > 1:
            results.failed_recving.add(load.name)
            return
        if load.fails_at is not None:
            good = load.start // size + int(load.fails_at * (len(load.blocks[0]) - load.start // size))
            self._failed_blocks |= set(load.blocks[0][good:])
            end = good * size
        at = np.arange(load.start, end)
        for group, ids in enumerate(load.blocks):
            values = self._engine.values(load.name, load.tokens, load.end, self._rank, group)
            self._engine.memory[self._rank][np.array(ids)[at // size], at % size] = values[at]

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed
