"""Events: values that the event bus carries to its subscribers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LookupEvent:
    """One answered lookup."""

    wall_seconds: float  # since 1970-01-01 UTC
    request_id: str
    model_name: str
    chunk_tokens: int
    total_tokens: int  # of the request so far, a last incomplete chunk included
    chunk_hashes: bytes  # 32 bytes a full chunk
    hit_chunks: int
    cache_salt: str = ""
    tensors: tuple[tuple[str, list[int]], ...] = ()  # dtype and shape of one chunk's KV, of every rank
