"""What the parts of the service share, and what they use of the rest of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.clock import Clock
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import Namespace
from lmcache.l1.store import L1Store
from lmcache.memory.server_memory import ServerMemory
from lmcache.service.token_chain import PromptNotes
from lmcache.telemetry.event_bus import EventBus
from lmcache.telemetry.metrics import ServiceMetrics
from lmcache.telemetry.tracing import Tracer
from lmcache.tiering.storage_loop import StorageLoop
from lmcache.transport.rpc_server import RpcServer


@dataclass(frozen=True)
class ServiceSettings:
    server_epoch: bytes
    lease_ttl_seconds: float
    reservation_ttl_seconds: float
    has_l2: bool  # False: L1 alone decides lookups
    counts_ceiling: bool = True  # what an endless cache would hit
    lossy_serdes: frozenset[str] = frozenset()  # of adapters; "" means nothing
    peer_address: str = ""  # where this server serves others


@dataclass(frozen=True)
class ServiceContext:
    settings: ServiceSettings
    l1: L1Store
    locks: ServerMemory  # tell which owners live
    hasher: ChunkHasher
    loop: RpcServer
    storage: StorageLoop
    events: EventBus | None
    metrics: ServiceMetrics
    clock: Clock
    # (action, caller, detail, outcome) of a change that an engine asks for
    audit: Callable[[str, str, Mapping[str, Any], str], object] = lambda action, caller, detail, outcome: None
    tracer: Tracer | None = None
    prompts: PromptNotes | None = None
    # Is told the namespaces of an engine, [rank][group], without a salt; takes no time.
    note_ranks: Callable[[Sequence[Sequence[Namespace]]], object] = lambda ranks: None
