"""What the vLLM that is installed offers to a connector, found by looking for it.

Releases of vLLM differ in small ways that no number tells: builds from its main branch, distributors' builds and forks
carry parts of a later release. So nothing here, and nothing else in this package, compares versions. An engine that
lacks a part gets what takes its place; one that lacks something without which KV cannot be restored exactly runs
uncached, and `EngineInterface.refusal` is the sentence that says so.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What the engine has to call for stores and loads to end: without one of them blocks would stay pinned for ever, or a
# failed load would count as KV.
HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output"),
    *("register_kv_caches", "bind_connector_metadata", "start_load_kv", "wait_for_save", "get_finished"),
    *("get_block_ids_with_load_errors", "build_connector_worker_meta", "on_new_request", "has_pending_push_work"),
)
_BINDS_MANAGER, _BINDS_POOL = "bind_kv_cache_manager", "bind_gpu_block_pool"
_POOL_PARTS = ("blocks", "null_block", "num_gpu_blocks", "get_num_free_blocks", "touch", "free_blocks")


@dataclass(frozen=True)
class EngineInterface:
    """One engine's connector interface.

    `missing`: the parts that it lacks and that nothing can take the place of. `unknown`: methods that it demands of a
    connector and that ours does not have. `transfer_results`: the class in which a
    worker names requests whose load failed; None where the engine hears of failed blocks alone. `hit_sources`: the
    names of the tiers that hits came from, None where it counts them together. `binds_manager`: it hands its block
    tables over, and not only the pool. `follows_sleep`: it says when KV memory goes and comes back.
    """

    version: str
    missing: tuple[str, ...]
    transfer_results: Any = None
    hit_sources: Any = None
    binds_manager: bool = True
    follows_sleep: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def refusal(self) -> str:
        """ "" or the sentence that says why this engine is not cached."""
        if not (self.missing or self.unknown):
            return ""
        lacks = f"lacks {', '.join(self.missing)}, without which KV cannot be restored exactly"
        demands = f"calls {', '.join(self.unknown)}, which this version of LMCache does not know"
        return (
            f"vLLM {self.version} {lacks if self.missing else demands}; use a version of vLLM that `lmcache doctor` "
            "names as tested."
        )

    def split_hit(self, from_memory: int, from_disk: int) -> dict[Any, int]:
        """Tokens of a hit by the tier that gave them, in the engine's names."""
        split = {self.hit_sources.HOST: from_memory, self.hit_sources.DISK: from_disk}
        return {source: tokens for source, tokens in split.items() if tokens}


def probe(base: Any, *, version: str, hit_sources: Any = None) -> EngineInterface:
    """`base`: the module of vLLM's connector base class; `hit_sources`: its `CacheHitSource`, where it has one."""
    connector = base.KVConnectorBase_V1
    missing = [name for name in HOOKS if not hasattr(connector, name)]
    if not (hasattr(connector, _BINDS_MANAGER) or hasattr(connector, _BINDS_POOL)):
        missing.append(_BINDS_MANAGER)
    return EngineInterface(
        version,
        tuple(missing),
        transfer_results=getattr(base, "KVConnectorTransferResults", None),
        hit_sources=hit_sources,
        binds_manager=hasattr(connector, _BINDS_MANAGER),
        follows_sleep=all(hasattr(connector, name) for name in ("unregister_kv_caches", "restore_kv_caches")),
    )


@functools.cache
def installed_engine() -> EngineInterface:
    """Imports vLLM, which takes seconds: for what runs inside an engine."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        CacheHitSource = None
    return probe(base, version=str(vllm.__version__), hit_sources=CacheHitSource)


def fill_unknown_methods(connector: type) -> tuple[str, ...]:
    """Gives every method that the engine demands of a connector, and that this one does not know, a body that does
    nothing, so that the engine can start. Their names: an engine that needs them runs uncached."""
    unknown = tuple(sorted(getattr(connector, "__abstractmethods__", ())))
    for name in unknown:
        setattr(connector, name, lambda self, *arguments, **keywords: None)
    abc.update_abstractmethods(connector)
    return unknown


def current_transfer_config() -> Any:
    """The `kv_transfer_config` of the engine whose worker is being built here; None elsewhere."""
    from vllm import config

    current = getattr(config, "get_current_vllm_config_or_none", lambda: None)()
    return getattr(current, "kv_transfer_config", None)


# ---- KV events ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EventInterface:
    """How an engine describes blocks to routers. `fields`: what its event of stored blocks has; what ours says beyond
    them is left out."""

    stored: Any
    removed: Any
    fields: frozenset[str]
    external_hash: Callable[[Any], bytes | int]
    block_extra_keys: Callable[..., tuple[tuple[Any, ...] | None, int]] | None
    event_extra_keys: Callable[[list[Any]], list[Any] | None]

    def stored_blocks(self, **fields: Any) -> Any:
        return self.stored(**{name: value for name, value in fields.items() if name in self.fields})


_NEEDED_OF_EVENTS = frozenset(("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"))


def event_interface(events: Any, cache: Any) -> EventInterface | None:
    """`events`, `cache`: vLLM's modules of KV events and of block hashes. None where events of this engine do not say
    in which tier a block is."""
    stored, removed = getattr(events, "BlockStored", None), getattr(events, "BlockRemoved", None)
    external_hash = getattr(cache, "maybe_convert_block_hash", None)
    fields = frozenset(getattr(stored, "__struct_fields__", ()))
    if removed is None or external_hash is None or not fields >= _NEEDED_OF_EVENTS:
        return None
    return EventInterface(
        stored,
        removed,
        fields,
        external_hash,
        getattr(cache, "generate_block_hash_extra_keys", None),
        getattr(cache, "to_event_extra_keys", list),
    )


def installed_events() -> EventInterface | None:
    from vllm.distributed import kv_events
    from vllm.v1.core import kv_cache_utils

    return event_interface(kv_events, kv_cache_utils)


def publishes_events(vllm_config: Any) -> bool:
    """Whether the engine tells routers what it has."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def hash_block_tokens(block_pool: Any, block_tokens: int) -> int:
    """Tokens of a block as requests name them, which may be a part of one as it is allocated."""
    return int(getattr(block_pool, "hash_block_size", block_tokens))


# ---- values that engines hand over ----------------------------------------------------------------------------------
def missing_in_pool(block_pool: Any) -> tuple[str, ...]:
    """What a block pool lacks for blocks to be pinned while a store reads them."""
    return tuple(name for name in _POOL_PARTS if not hasattr(block_pool, name))


def boundary_states(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """By request: (group, block, tokens) of recurrent states that a step completes. Engines that do not say keep them
    where they are overwritten."""
    offered = getattr(scheduler_output, "kv_connector_block_state", None)
    return offered.boundary_state_offloads if offered is not None else {}


def failed_requests(connector_output: Any) -> frozenset[str]:
    """Requests whose load failed as a whole."""
    return frozenset(getattr(connector_output, "failed_recving", None) or ())


def is_transferable(group: Any) -> bool:
    """Whether a KV cache group lies in the engine's device blocks and may leave them."""
    return bool(getattr(group, "enable_kv_transfer", True)) and not getattr(group, "host_resident", False)
