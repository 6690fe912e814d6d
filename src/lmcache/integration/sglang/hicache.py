"""`LMCacheHiCacheStorage`: what SGLang's hierarchical cache calls to keep pages of host memory in the cache server.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "lmcache", "module_path": "lmcache.integration.sglang.hicache",
      "class_name": "LMCacheHiCacheStorage", "interface_v1": 1}'

A page is an object under the hash that SGLang gives it. Where pages cannot be kept exactly nothing is kept, and SGLang
runs as it would without a storage backend. A fault of ours in a call is contained: it costs a miss.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from lmcache.device.cpu import PagedGroup
from lmcache.errors import ConfigError, LayoutRefused
from lmcache.integration.engine.containment import contained
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.instance_id import instance_name
from lmcache.integration.sglang.flat_page import FlatPage
from lmcache.integration.sglang.identity import engine_identity, pool_place, weights_identity
from lmcache.integration.sglang.page_memory import describe_pool, pages_of
from lmcache.integration.sglang.page_pool import PagePool
from lmcache.integration.sglang.settings import HiCacheSettings
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.sglang")

_KV = "kv"
_HASH = re.compile("[0-9a-f]{64}")
_WEIGHT_FIELDS = frozenset(("model_path", "weight_version"))

_contained = functools.partial(contained, log)
_contained_keys = functools.partial(
    contained, log, lambda keys, *rest, **keywords: [False] * len(keys), of_arguments=True
)
_contained_transfers = functools.partial(
    contained, log, lambda transfers, *rest, **keywords: _nothing_of(transfers), of_arguments=True
)


class LMCacheHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's backend. Times out by itself: without a server every call is a miss."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """ConfigError names the key of the extra config and what it may be."""
        self._config = storage_config
        extra = storage_config.extra_config or {}
        self._settings = HiCacheSettings.read(extra)
        if not extra.get("interface_v1"):
            raise ConfigError(
                'hicache-storage-backend-extra-config lacks "interface_v1": 1, without which SGLang copies pages in '
                "Python first; add it."
            )
        self._pools: dict[str, PagePool] = {}
        self._groups: dict[str, PagedGroup] = {}
        self._flat: FlatPage | None = None
        self._once = LogLimiter()
        self._weights = ""
        self._weight_updates = 0

    # ---- pools -------------------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != _KV or _KV not in self._pools:
            self._register(host_pool, str(host_pool_name))

    @_contained(None)
    def _register(self, pool: Any, name: str) -> None:
        replaced = self._pools.pop(name, None)
        if replaced is not None:
            replaced.close()
        try:
            group = describe_pool(pool, name, self._engine_identity())
        except LayoutRefused as refusal:
            log.error("Pages of the host pool %r are not cached: %s", name, refusal)
            return
        self._groups[name] = group
        self._pools[name] = self._pool(name, group)

    def _engine_identity(self) -> str:
        if not self._weights:
            self._weight_updates = _weight_updates()
            self._weights = weights_identity(
                _server_args(), self._settings.weights_id, replaced=self._weight_updates > 0
            )
        return engine_identity(getattr(sglang, "__version__", ""), self._weights)

    def _pool(self, name: str, group: PagedGroup) -> PagePool:
        place = pool_place(self._config, name.partition("/")[0])
        instance = f"{instance_name('sglang', os.getpid())}-{id(self):x}-{name}"
        model_name = self._config.model_name or "unnamed"
        return PagePool(
            self._settings,
            WorkerIdentity(instance, 0, model_name, place.kv_ranks, place.kv_rank, stores=True),
            group,
            self._settings.cache_salt,
            engine=f"sglang {getattr(sglang, '__version__', '')}",
            counts_lookups=name == _KV and self._config.tp_rank == 0,
        )

    # ---- pages of the pool for KV ------------------------------------------------------------------------------------
    @_contained(0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return _leading(self._probe(_KV, keys))

    @_contained_keys()
    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._transfer(PagePool.load, _KV, keys, host_indices)

    @_contained_keys()
    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._transfer(PagePool.store, _KV, keys, host_indices)

    # ---- pages of several pools --------------------------------------------------------------------------------------
    @_contained(PoolTransferResult.empty)
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """A prefix can be restored where each pool has what its policy asks of it."""
        kv_pages = _leading(self._probe(_KV, keys))
        hits = {_KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            found = self._probe(str(transfer.name), keys[:kv_pages])
            allowed = _restorable(found, transfer)
            if allowed:
                hits[str(transfer.name)] = max(allowed)
            restorable = [pages for pages in restorable if pages in allowed]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    @_contained_transfers()
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._transfer_all(PagePool.load, transfers)

    @_contained_transfers()
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._transfer_all(PagePool.store, transfers)

    def _transfer_all(
        self, move: Callable[[PagePool, bytes, bytes], list[bool]], transfers: Sequence[Any]
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._transfer(move, str(transfer.name), transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    # ---- single pages ------------------------------------------------------------------------------------------------
    @_contained(False)
    def exists(self, key: str) -> bool:
        return bool(self._probe(_KV, [key])[0])

    @_contained(None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The tensor `target_location`, of a page's size, with the page: its buffers one behind the other."""
        flat = self._flat_page()
        return target_location if flat is not None and flat.get(_hash(key), target_location) else None

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[Any] | None = None, target_sizes: Any = None
    ) -> list[Any]:
        return [self.get(key, target) for key, target in zip(keys, target_locations or (), strict=True)]

    @_contained(False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """`value`: as in `get`."""
        flat = self._flat_page()
        return flat is not None and flat.set(_hash(key), value)

    @_contained(False)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values or (), strict=True))

    # ---- the rest ----------------------------------------------------------------------------------------------------
    @_contained(None)
    def clear(self) -> None:
        """Empties the server: all tiers, what other engines stored too. Pinned objects stay."""
        pool = self._pools.get(_KV)
        if pool is not None:
            pool.clear()

    @_contained(None)
    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of the calls since the last one; None where it keeps none."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        traffic = [pool.take_traffic() for pool in self._pools.values()]
        loads = [call for each in traffic for call in each.loads]
        stores = [call for each in traffic for call in each.stores]
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[rate for _, rate in loads],
            backup_bandwidth=[rate for _, rate in stores],
        )

    def check_idle(self) -> None:
        """AssertionError if a call is under way, or the server still has to hear of the end of one."""
        for pool in self._pools.values():
            pool.check_idle()

    @_contained(None)
    def close(self) -> None:
        """Returns when nothing touches the host pools any more."""
        flat, self._flat = self._flat, None
        if flat is not None:
            flat.close()
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _pool_in_use(self, name: str) -> PagePool | None:
        """None where its pages are not cached, or are those of other weights."""
        if _weight_updates() == self._weight_updates:
            return self._pools.get(name)
        if self._once.due("weights"):
            log.error(
                "This engine runs uncached, because its weights were replaced, and SGLang names pages as before: "
                "detach the storage backend and attach it with another lmcache.mp.weights_id"
            )
        return None

    def _probe(self, name: str, keys: Sequence[str]) -> bytes:
        pool = self._pool_in_use(name)
        return pool.probe(b"".join(map(_hash, keys))) if pool is not None and keys else bytes(len(keys))

    def _transfer(
        self, move: Callable[[PagePool, bytes, bytes], list[bool]], name: str, keys: Sequence[str], host_indices: Any
    ) -> list[bool]:
        pool = self._pool_in_use(name)
        if pool is None or not keys:
            return [False] * len(keys)
        pages = pages_of(host_indices, pool.page_tokens, len(keys))
        if pages is None:
            if self._once.due(name):
                log.error("Indices of the host pool %r are not those of %d whole pages (said once)", name, len(keys))
            return [False] * len(keys)
        return move(pool, b"".join(map(_hash, keys)), pages)

    def _flat_page(self) -> FlatPage | None:
        if self._pool_in_use(_KV) is None:
            return None
        if self._flat is None and _KV in self._groups:
            self._flat = FlatPage(self._groups[_KV], lambda group: self._pool(f"{_KV}/flat", group))
        return self._flat


def _hash(key: str) -> bytes:
    """SGLang's page hashes as they are, other names by their digest."""
    return bytes.fromhex(key) if _HASH.fullmatch(key) else hashlib.sha256(key.encode()).digest()


def _leading(found: bytes) -> int:
    return next((page for page, tier in enumerate(found) if not tier), len(found))


def _restorable(found: bytes, transfer: Any) -> set[int]:
    """The lengths of prefixes, in pages, for which a pool has what its policy asks."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(found) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        needed = max(1, len(transfer.keys or ()))
        lengths = range(1, len(found) + 1)
        return {length for length in lengths if all(found[max(0, length - needed) : length])}
    return set()  # a policy that is not known here


def _nothing_of(transfers: Sequence[Any]) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _server_args() -> Any:
    """What SGLang was started with; None where this version does not say."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None


def _weight_updates() -> int:
    """How often SGLang has noted that this process serves other weights: each update from disk, and each that was
    called with another `weight_version`. 0 where this version keeps no such log."""
    try:
        from sglang.srt.runtime_context import get_context

        noted = get_context().overrides_log()
    except (ImportError, AttributeError):
        return 0
    return sum(not _WEIGHT_FIELDS.isdisjoint(fields) for _, fields in noted)
