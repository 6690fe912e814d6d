"""A chunk of the server in the engine's terms: its blocks by the engine's names, as KV events describe them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.core.chunking import TOKEN_BYTES
from lmcache.integration.engine.announced_chunks import ChunkName
from lmcache.integration.vllm.versions import EventInterface
from lmcache.protocol.tokens import pack_tokens

ExtraKeys = tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class DescribedChunk:
    """`blocks`: the hashes of its blocks, one behind the other. `parent`: that of the block before, b"" for none.
    `extra_keys`: by block; () where no block has any."""

    blocks: bytes
    parent: bytes
    tokens: bytes
    hash_bytes: int
    extra_keys: tuple[ExtraKeys, ...] = ()
    lora_id: int | None = None
    lora_name: str | None = None

    @property
    def first_block(self) -> bytes:
        return self.blocks[: self.hash_bytes]

    @property
    def last_block(self) -> bytes:
        return self.blocks[-self.hash_bytes :]

    def block_hashes(self) -> list[bytes]:
        size = self.hash_bytes
        return [self.blocks[start : start + size] for start in range(0, len(self.blocks), size)]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """In tokens: of a block of the engine, and of what its requests are named by, a part of a block."""

    block: int
    hashed: int


def describe(
    request: Any,
    names: Sequence[ChunkName],
    first_chunk: int,
    chunk_tokens: int,
    sizes: BlockSizes,
    events: EventInterface,
) -> Iterator[tuple[ChunkName, DescribedChunk]]:
    """The chunks of a request from `first_chunk` on, as far as its blocks have names."""
    stride = sizes.block // sizes.hashed
    per_chunk = chunk_tokens // sizes.block
    first_block = first_chunk * per_chunk
    begin = first_chunk * chunk_tokens
    # Hashes cover all tokens before: that of a block is that of its last part.
    end_hash = (first_block + len(names) * per_chunk) * stride
    raw = request.block_hashes[first_block * stride + stride - 1 : end_hash : stride]
    tokens = pack_tokens(request.all_token_ids[begin : begin + len(names) * chunk_tokens])
    parent = request.block_hashes[first_block * stride - 1] if first_block else b""
    extra = _extra_keys(request, first_block, len(raw), sizes.block, events)
    lora = request.lora_request
    lora_id, lora_name = (lora.lora_int_id, lora.lora_name) if lora is not None else (None, None)
    chunk_bytes = chunk_tokens * TOKEN_BYTES
    for number in range(min(len(names), len(raw) // per_chunk)):
        of_chunk = slice(number * per_chunk, (number + 1) * per_chunk)
        hashes = raw[of_chunk]
        chunk = DescribedChunk(
            b"".join(hashes),
            parent,
            tokens[number * chunk_bytes : (number + 1) * chunk_bytes],
            len(hashes[0]),
            tuple(extra[of_chunk]) if any(keys is not None for keys in extra[of_chunk]) else (),
            lora_id,
            lora_name,
        )
        parent = hashes[-1]
        yield names[number], chunk


def _extra_keys(
    request: Any, first_block: int, blocks: int, block_tokens: int, events: EventInterface
) -> list[ExtraKeys]:
    """What the names of these blocks cover beside tokens."""
    has_none = not (request.mm_features or request.lora_request or request.cache_salt)
    if has_none or events.block_extra_keys is None:
        return []
    keys: list[ExtraKeys] = []
    media = 0
    for block in range(first_block, first_block + blocks):
        start = block * block_tokens
        of_block, media = events.block_extra_keys(request, start, start + block_tokens, media)
        keys.append(of_block)
    return keys


def follows(chunk: DescribedChunk, previous: DescribedChunk) -> bool:
    """Whether one event can name the blocks of both."""
    return (
        chunk.parent == previous.last_block
        and chunk.lora_name == previous.lora_name
        and chunk.hash_bytes == previous.hash_bytes
    )


def stored_event(
    run: Sequence[DescribedChunk], medium: str, block_tokens: int, group: int, events: EventInterface
) -> Any:
    """Makes one event of chunks that follow each other."""
    first = run[0]
    external = events.external_hash
    hashes = [external(block) for chunk in run for block in chunk.block_hashes()]
    extra: list[ExtraKeys] = []
    if any(chunk.extra_keys for chunk in run):
        for chunk in run:
            nothing: tuple[ExtraKeys, ...] = (None,) * (len(chunk.blocks) // chunk.hash_bytes)
            extra += chunk.extra_keys or nothing
    tokens = array("I", b"".join(chunk.tokens for chunk in run))
    return events.stored_blocks(
        block_hashes=hashes,
        parent_block_hash=external(first.parent) if first.parent else None,
        token_ids=tokens.tolist(),
        block_size=block_tokens,
        lora_id=first.lora_id,
        medium=medium,
        lora_name=first.lora_name,
        extra_keys=events.event_extra_keys(extra) if extra else None,
        group_idx=group,
    )


def removed_event(blocks: Sequence[bytes], medium: str, group: int, events: EventInterface) -> Any:
    fields = {"block_hashes": [events.external_hash(block) for block in blocks], "medium": medium, "group_idx": group}
    return events.removed(**{name: fields[name] for name in events.removed.__struct_fields__ if name in fields})
