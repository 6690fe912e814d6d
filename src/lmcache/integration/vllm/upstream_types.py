"""The values that vLLM's own connector class passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ParallelStrategy(NamedTuple):
    use_mla: bool
    kv_world_size: int
    kv_worker_id: int
    actual_world_size: int
    actual_worker_id: int
    tp_size: int
    pp_size: int


@dataclass
class LoadStoreOp:
    """Blocks for the tokens [start, end) of a request; a load leaves the first `skip_first_n_tokens` alone."""

    token_ids: list[int]
    block_ids: list[int]
    start: int
    end: int
    skip_first_n_tokens: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)
