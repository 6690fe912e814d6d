"""KV tensors in host memory: from registered torch tensors to a layout and the segments that the copier walks.

A tensor is taken only when its first dimension is the block id and every other dimension can be proved to cover bytes
of its own; then the content of a block is copied as opaque bytes in memory order, whatever the engine keeps in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from lmcache.core.layout import KVLayout, LayerLayout
from lmcache.core.limits import MAX_OBJECT_BYTES
from lmcache.errors import LayoutRefused

if TYPE_CHECKING:
    import torch

# (address of block 0, bytes from block to block, bytes of one contiguous run, (count, stride in bytes) of outer dims)
Segment = tuple[int, int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class PagedGroup:
    """One KV cache group of this worker: what is copied for a block id, and what the bytes mean."""

    engine: str
    block_tokens: int
    num_blocks: int
    layers: tuple[LayerLayout, ...]
    segments: tuple[Segment, ...]
    is_state: bool = False  # of a chunk, one block counts: the one with the state at the chunk's end
    is_page: bool = (
        False  # an object is one block, whatever the server's chunks are: the engine names its blocks itself
    )

    @property
    def may_be_approximate(self) -> bool:
        """Whether lossy serdes can read this KV. A state is not for them: what it lost, all later tokens would lack."""
        return not (self.is_state or self.is_page) and all(layer.dtype == "bfloat16" for layer in self.layers)

    def layout(self, chunk_tokens: int) -> KVLayout:
        """The layout of one chunk. LayoutRefused when chunks are not whole blocks."""
        if self.is_page:
            chunk_tokens = self.block_tokens
        if chunk_tokens % self.block_tokens:
            raise LayoutRefused(
                f"The server's chunk size of {chunk_tokens} tokens is not a multiple of this engine's block size of "
                f"{self.block_tokens}: start the server with --chunk-size set to a multiple of it."
            )
        block_tokens = chunk_tokens if self.is_state else self.block_tokens
        layout = KVLayout(self.engine, chunk_tokens, block_tokens, self.layers)
        if layout.payload_bytes > MAX_OBJECT_BYTES:
            raise LayoutRefused(
                f"One chunk of this model is {layout.payload_bytes} bytes, more than the {MAX_OBJECT_BYTES} that an "
                "object may have: start the server with a smaller --chunk-size."
            )
        return layout


def describe_group(
    tensors: Sequence[tuple[str, torch.Tensor]],
    *,
    engine: str,
    block_tokens: int,
    num_blocks: int,
    device_type: str = "cpu",
) -> PagedGroup:
    """Describes the (layer name, tensor) pairs of one group. LayoutRefused names what cannot be copied exactly."""
    layers: list[LayerLayout] = []
    segments: list[Segment] = []
    taken: dict[int, tuple[LayerLayout, Segment]] = {}
    for name, tensor in tensors:
        layer, segment = _describe_layer(name, tensor, num_blocks, device_type)
        same = taken.get(segment[0])
        if same is not None:
            # A layer that reads the KV of an earlier one has no bytes of its own.
            if same[1] != segment or same[0].dtype != layer.dtype:
                raise LayoutRefused(f"{name} starts where {same[0].name} starts but is laid out differently.")
            continue
        taken[segment[0]] = layer, segment
        layers.append(layer)
        segments.append(segment)
    if not segments:
        raise LayoutRefused("A KV cache group has no tensors.")
    _refuse_overlap([(layer, segment) for layer, segment in taken.values()], num_blocks)
    return PagedGroup(engine, block_tokens, num_blocks, tuple(layers), tuple(segments))


def _describe_layer(name: str, tensor: torch.Tensor, num_blocks: int, device_type: str) -> tuple[LayerLayout, Segment]:
    if tensor.device.type != device_type:
        raise LayoutRefused(f"{name} lies on {tensor.device}, where a KV cache on {device_type} was expected.")
    if tensor.dim() < 2 or tensor.shape[0] != num_blocks:
        raise LayoutRefused(
            f"{name} has shape {tuple(tensor.shape)}: its first dimension is not the {num_blocks} block ids."
        )
    item_bytes = tensor.element_size()
    block_bytes = tensor.stride(0) * item_bytes
    dims = [
        (count, stride * item_bytes)
        for count, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        if count != 1
    ]
    dims.sort(key=lambda dim: dim[1], reverse=True)
    run_bytes = item_bytes
    while dims and dims[-1][1] == run_bytes:
        run_bytes *= dims.pop()[0]
    extent_bytes = run_bytes
    for count, stride_bytes in reversed(dims):
        if stride_bytes < extent_bytes:
            raise LayoutRefused(f"{name} has overlapping elements (strides {tensor.stride()}).")
        extent_bytes += (count - 1) * stride_bytes
    if block_bytes < extent_bytes:
        raise LayoutRefused(f"The blocks of {name} overlap or interleave (strides {tensor.stride()}).")
    content_bytes = run_bytes
    for count, _ in dims:
        content_bytes *= count
    layer = LayerLayout(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_shape=tuple(tensor.shape[1:]),
        block_strides=tuple(tensor.stride()[1:]),
        content_bytes=content_bytes,
    )
    return layer, (tensor.data_ptr(), block_bytes, run_bytes, tuple(dims))


def _refuse_overlap(described: Sequence[tuple[LayerLayout, Segment]], num_blocks: int) -> None:
    """Layers either lie one after another or interleave inside a common block stride; nothing else is understood."""
    ordered = sorted(described, key=lambda pair: pair[1][0])
    for (first, low), (second, high) in combinations(ordered, 2):
        gap_bytes = high[0] - low[0]
        apart = gap_bytes >= (num_blocks - 1) * low[1] + _extent_bytes(low)
        interleaved = low[1] == high[1] and _extent_bytes(low) <= gap_bytes % low[1] <= low[1] - _extent_bytes(high)
        if not apart and not interleaved:
            raise LayoutRefused(f"The KV tensors of {first.name} and {second.name} overlap.")


def _extent_bytes(segment: Segment) -> int:
    """Bytes from the first to one past the last byte of a block's content."""
    return segment[2] + sum((count - 1) * stride_bytes for count, stride_bytes in segment[3])
