"""Which blocks the announced chunks of one tier have: two prompts that part within a chunk share the blocks before."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lmcache.integration.vllm.described_chunk import DescribedChunk


@dataclass
class AnnouncedBlocks:
    """Chunks that share a block have the same first block, whose hash covers all tokens before it. So most chunks are
    alone under theirs, and blocks are counted only where several are."""

    _by_first_block: dict[bytes, DescribedChunk | Counter[bytes]] = field(default_factory=dict)

    def add(self, chunk: DescribedChunk) -> None:
        there = self._by_first_block.get(chunk.first_block)
        if there is None:
            self._by_first_block[chunk.first_block] = chunk
            return
        if isinstance(there, DescribedChunk):
            there = self._by_first_block[chunk.first_block] = Counter(there.block_hashes())
        there.update(chunk.block_hashes())

    def __contains__(self, chunk: DescribedChunk) -> bool:
        there = self._by_first_block.get(chunk.first_block)
        if there is None or isinstance(there, DescribedChunk):
            return there is not None and there.blocks == chunk.blocks
        return all(there[block] for block in chunk.block_hashes())

    def remove(self, chunk: DescribedChunk) -> list[bytes]:
        """The blocks that no other chunk has; none where it was not added, as its event could not be made."""
        if chunk not in self:
            return []
        there = self._by_first_block[chunk.first_block]
        blocks = chunk.block_hashes()
        if isinstance(there, DescribedChunk):
            del self._by_first_block[chunk.first_block]
            return blocks
        there.subtract(blocks)
        gone = [block for block in blocks if not there[block]]
        for block in gone:
            del there[block]
        if not there:
            del self._by_first_block[chunk.first_block]
        return gone
