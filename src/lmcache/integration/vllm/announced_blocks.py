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
        announced = self._by_first_block.get(chunk.first_block)
        if announced is None:
            self._by_first_block[chunk.first_block] = chunk
            return
        if isinstance(announced, DescribedChunk):
            announced = self._by_first_block[chunk.first_block] = Counter(announced.block_hashes())
        announced.update(chunk.block_hashes())

    def __contains__(self, chunk: DescribedChunk) -> bool:
        announced = self._by_first_block.get(chunk.first_block)
        if announced is None or isinstance(announced, DescribedChunk):
            return announced is not None and announced.blocks == chunk.blocks
        return all(announced[block] for block in chunk.block_hashes())

    def remove(self, chunk: DescribedChunk) -> list[bytes]:
        """The blocks that no other chunk has; none where it was not added, as its event could not be made."""
        if chunk not in self:
            return []
        announced = self._by_first_block[chunk.first_block]
        blocks = chunk.block_hashes()
        if isinstance(announced, DescribedChunk):
            del self._by_first_block[chunk.first_block]
            return blocks
        announced.subtract(blocks)
        gone = [block for block in blocks if not announced[block]]
        for block in gone:
            del announced[block]
        if not announced:
            del self._by_first_block[chunk.first_block]
        return gone
