"""What of SGLang the storage backend meets, where SGLang itself is not installed: its base class, and a host pool."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from lmcache.testing.processes import CacheServer


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class PoolName(str, Enum):
    """Of the pools that the tests have."""

    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]


@dataclass
class StorageConfig:
    """HiCacheStorageConfig."""

    extra_config: dict[str, Any]
    model_name: str | None = "model"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False


_MODULES: dict[str, tuple[Any, ...]] = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.mem_cache": (),
    "sglang.srt.mem_cache.hicache_storage": (HiCacheStorage, PoolHitPolicy, PoolTransferResult),
    "sglang.srt.observability": (),
    "sglang.srt.observability.metrics_collector": (StorageMetrics,),
}


def install(monkeypatch: Any) -> None:
    """Until the end of a test `import sglang` finds this."""
    for name, members in _MODULES.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["sglang"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "lmcache.integration.sglang.hicache", raising=False)


@dataclass
class HostPool:
    """A pool with K and V of some layers; a page of it has `2 * layers * page_size * token_bytes` bytes."""

    layout: str = "page_first"
    pages: int = 16
    page_size: int = 64
    layer_num: int = 2
    token_bytes: int = 256
    dtype: torch.dtype = torch.uint8
    kv_buffer: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (2, self.size, self.layer_num, self.token_bytes)
        if self.layout == "layer_first":
            shape = (2, self.layer_num, self.size, self.token_bytes)
        self.kv_buffer = torch.zeros(shape, dtype=torch.uint8)

    @property
    def size(self) -> int:
        return self.pages * self.page_size

    @property
    def page_bytes(self) -> int:
        return 2 * self.layer_num * self.page_size * self.token_bytes

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        views = [view for first in indices.tolist()[:: self.page_size] for view in self._views(first)]
        return [view.data_ptr() for view in views], [view.numel() for view in views]

    def _views(self, first: int) -> list[torch.Tensor]:
        tokens = slice(first, first + self.page_size)
        if self.layout == "layer_first":
            return [self.kv_buffer[kind, layer, tokens] for layer in range(self.layer_num) for kind in range(2)]
        return [self.kv_buffer[kind, tokens] for kind in range(2)]

    def indices(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def page(self, number: int) -> bytes:
        return b"".join(view.contiguous().numpy().tobytes() for view in self._views(number * self.page_size))

    def fill(self, *pages: int, seed: int = 0) -> None:
        """Each page with bytes of its own."""
        for number in pages:
            generator = torch.Generator().manual_seed(1000 * seed + number)
            for view in self._views(number * self.page_size):
                view.copy_(torch.randint(0, 256, view.shape, generator=generator, dtype=torch.uint8))

    def wipe(self) -> None:
        self.kv_buffer.zero_()


def page_keys(*numbers: int) -> list[str]:
    """As SGLang names pages: 64 hexadecimal digits."""
    return [f"{number:064x}" for number in numbers]


def extra_config(server: CacheServer | int, **more: Any) -> dict[str, Any]:
    port = server if isinstance(server, int) else server.port
    base = {"interface_v1": 1, "lmcache.mp.port": port, "lmcache.mp.weights_id": "w"}
    return {**base, **{f"lmcache.mp.{key}": value for key, value in more.items()}}
