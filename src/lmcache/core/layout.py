"""How an engine's paged KV memory becomes the payload of an object, and the fingerprint that must match to share it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class LayerLayout:
    """One KV tensor of one layer. Shape and strides are of one block, in elements, without the block dimension."""

    name: str
    dtype: str
    block_shape: tuple[int, ...]
    block_strides: tuple[int, ...]
    content_bytes: int  # of one block


@dataclass(frozen=True)
class KVLayout:
    """The layout of one object group on one rank.

    The payload of an object is, for each layer in order, for each block of the chunk in order, the block's content with
    dimensions in memory order. `engine` names whatever changes the meaning of the bytes beside shape and dtype, such as
    the instruction set that packs CPU blocks.
    """

    engine: str
    chunk_tokens: int
    block_tokens: int
    layers: tuple[LayerLayout, ...]

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def payload_bytes(self) -> int:
        """Bytes of one object, without header and padding."""
        return self.blocks_per_chunk * sum(layer.content_bytes for layer in self.layers)

    @property
    def tensors(self) -> list[tuple[str, list[int]]]:
        """(dtype, shape) of one object: equal layers are one tensor [layers, blocks, *dimensions of a block]."""
        alike: dict[tuple[str, tuple[int, ...]], int] = {}
        for layer in self.layers:
            alike[layer.dtype, layer.block_shape] = alike.get((layer.dtype, layer.block_shape), 0) + 1
        return [(dtype, [layers, self.blocks_per_chunk, *shape]) for (dtype, shape), layers in alike.items()]

    @property
    def fingerprint(self) -> str:
        """First 32 hex digits of SHA-256 over the msgpack of every field."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]
