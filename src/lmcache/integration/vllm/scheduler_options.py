"""What one engine's scheduler side goes by."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache.client.lookup_client import LOOKUP_SECONDS
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.handover import HANDOVER_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """What the engine's model, its role and its settings decide. Does not change while the engine runs."""

    groups: tuple[CacheGroup, ...]
    ranks: int  # that hold distinct KV
    workers: int  # that report, of which several may hold the same KV
    loads: bool = True  # hits are used
    stores: bool = True  # what is computed is stored
    save_decode: bool = False  # chunks that decoding fills are stored, too
    load_or_recompute: bool = True  # a hit that would be slower than computing is not loaded
    media_have_names: bool = True  # requests with images ... are cached
    await_stores: bool = False  # a step ends when its stores have read their blocks: it may be the last one
    lookup_timeout_seconds: float = LOOKUP_SECONDS
    handover_timeout_seconds: float = HANDOVER_SECONDS  # what another engine gets to store what it has handed over
    lookahead_tokens: int = 0  # behind a chunk, which enter its name because its KV depends on them
    longest_drafted_tokens: int | None = None  # what drafts gets no KV in a step with a longer sequence
