"""What a subscriber reads: the messages of vLLM's KV events (`vllm.distributed.kv_events`), field by field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lmcache.core.chunking import TOKEN_BYTES
from lmcache.core.limits import MAX_CHUNKS_PER_KV_EVENT

END_OF_REPLAY = b"\xff" * 8  # in the place of a sequence number
SEQUENCE_BYTES = 8  # big-endian


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float  # seconds since 1970-01-01 UTC
    events: Sequence[Event]
    data_parallel_rank: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """What a chunk is made of. `parent`: the chunk before it; b"" for none. `tokens`: packed u32."""

    parent: bytes
    tokens: bytes


def stored_events(
    chunks: Sequence[tuple[bytes, Description | None]], medium: str, chunk_tokens: int, group: int
) -> list[BlockStored]:
    """A block is a chunk, under its chunk hash; chunks that follow each other are in one event. One without a
    description has no tokens, and an event of its own."""
    events: list[BlockStored] = []
    previous = b""  # the chunk that the next one must follow to be in the same event
    for chunk_hash, description in chunks:
        parent, tokens = (b"", b"") if description is None else (description.parent, description.tokens)
        if not parent or parent != previous or len(events[-1].block_hashes) >= MAX_CHUNKS_PER_KV_EVENT:
            events.append(BlockStored([], parent or None, [], chunk_tokens, None, medium, None, group))
        events[-1].block_hashes.append(chunk_hash)
        events[-1].token_ids.extend(memoryview(tokens).cast("I"))
        previous = chunk_hash if description is not None else b""
    return events


def split_tokens(packed: bytes, chunk_tokens: int, chunks: int) -> list[bytes]:
    """Those of the first chunks."""
    size_bytes = chunk_tokens * TOKEN_BYTES
    return [packed[at : at + size_bytes] for at in range(0, chunks * size_bytes, size_bytes)]
