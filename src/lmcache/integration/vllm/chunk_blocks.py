"""Which of the engine's blocks hold a chunk, group by group."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcache.core.rounding import div_ceil
from lmcache.integration.engine.connector_metadata import GroupLoad
from lmcache.integration.vllm.groups import CacheGroup

NOT_WRITTEN = -1

# (group, tokens) -> the block that holds the group's state after so many tokens
States = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class StoredBlocks:
    """`blocks` and `wanted` as in a StoreOrder."""

    blocks: tuple[array[int], ...]
    wanted: bytes


def blocks_to_store(
    groups: Sequence[CacheGroup],
    block_ids: Sequence[Sequence[int]],
    first_chunk: int,
    end_token: int,
    chunk_tokens: int,
    null_block_id: int,
    states: States,
) -> StoredBlocks | None:
    """What the engine has of the chunks from `first_chunk` on. The last one may be partial: a block of each group ends
    with it, which is repeated up to the length of a chunk. None where it lacks blocks that every hit would need, or
    has nothing."""
    blocks, wanted = [], bytearray()
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        per_chunk = group.blocks_in(chunk_tokens)
        if group.is_state:
            ends = range((first_chunk + 1) * chunk_tokens, end_token + 1, chunk_tokens)
            row = array("q", [states.get((index, end), null_block_id) for end in ends])
        else:
            row = array("q", ids[first_chunk * per_chunk : end_token // group.block_tokens])
            row.extend(row[-1:] * _lacking(group, end_token, chunk_tokens))
        blocks.append(row)
        whole = [null_block_id not in row[at : at + per_chunk] for at in range(0, len(row), per_chunk)]
        if not group.tail_tokens and not all(whole):
            return None
        wanted += bytes(whole)
    if not any(wanted):
        return None
    return StoredBlocks(tuple(blocks), b"" if all(wanted) else bytes(wanted))


def group_load(
    group: CacheGroup, ids: Sequence[int], start_token: int, end_token: int, chunk_tokens: int, null_block_id: int
) -> GroupLoad:
    """Blocks of the chunks from the one with `start_token`; leading chunks without a block to write are left out. The
    last chunk may be partial: nothing is written beyond `end_token`, with which a block of each group ends."""
    end_chunk = div_ceil(end_token, chunk_tokens)
    if group.is_state:
        block = ids[end_chunk * chunk_tokens // group.block_tokens - 1]
        return GroupLoad(end_chunk - 1, array("q", [NOT_WRITTEN if block == null_block_id else block]).tobytes())
    per_chunk = group.blocks_in(chunk_tokens)
    first_chunk = start_token // chunk_tokens
    blocks = array("q", ids[first_chunk * per_chunk : end_token // group.block_tokens])
    blocks.extend([NOT_WRITTEN] * _lacking(group, end_token, chunk_tokens))
    for index in range(start_token // group.block_tokens - first_chunk * per_chunk):
        blocks[index] = NOT_WRITTEN
    if group.tail_tokens:
        for index, block in enumerate(blocks):
            if block == null_block_id:
                blocks[index] = NOT_WRITTEN
        skipped = next((i for i, block in enumerate(blocks) if block != NOT_WRITTEN), len(blocks)) // per_chunk
        first_chunk += skipped
        del blocks[: skipped * per_chunk]
    return GroupLoad(first_chunk, blocks.tobytes())


def _lacking(group: CacheGroup, end_token: int, chunk_tokens: int) -> int:
    """Blocks between `end_token` and the end of its chunk. What a table of blocks lacks before is not made up: the copy
    refuses it."""
    return -(end_token // group.block_tokens) % group.blocks_in(chunk_tokens)


def is_all_or_nothing(groups: Sequence[CacheGroup]) -> bool:
    """Whether a load of which a block failed is of no use. Only where one group keeps every block does the engine go on
    from those before: several groups have to agree, and what is before a window or a state was not loaded."""
    return len(groups) > 1 or any(group.tail_tokens for group in groups)


def restores_states(groups: Sequence[CacheGroup], loads: Sequence[GroupLoad]) -> bool:
    """Whether every state has a block to go to. State and attention are restored together or not at all."""
    return all(
        not group.is_state or NOT_WRITTEN not in array("q", load.blocks)
        for group, load in zip(groups, loads, strict=True)
    )
