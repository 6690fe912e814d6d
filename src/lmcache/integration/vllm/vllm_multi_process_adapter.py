"""Names that vLLM's own connector module imports. Its class, chosen by LMCACHE_USE_UPSTREAM_MP, is not served yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from lmcache.errors import ConfigError


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
    """Blocks for the tokens [start, end) of a request."""

    token_ids: list[int]
    block_ids: list[int]
    start: int
    end: int
    skip_first_n_tokens: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)


def _refuse() -> NoReturn:
    raise ConfigError(
        "LMCACHE_USE_UPSTREAM_MP asks for the connector that is built into vLLM, which this version of LMCache does "
        "not serve: unset it to use LMCache's own."
    )


class LMCacheMPSchedulerAdapter:
    def __init__(self, **arguments: Any) -> None:
        _refuse()


class LMCacheMPWorkerAdapter:
    def __init__(self, **arguments: Any) -> None:
        _refuse()
