"""KV tensors as GPU engines lay them out, and a copier between them and an arena."""

from __future__ import annotations

import mmap
from array import array

import torch

from lmcache import _native
from lmcache.core.key import Namespace
from lmcache.device.cpu import PagedGroup
from lmcache.device.cuda import Gpu, describe_gpu_group

BLOCKS = 12
BLOCK_TOKENS = 16
CHUNKS = 2
Layers = list[tuple[str, torch.Tensor]]


def heads_first(blocks: int = BLOCKS) -> Layers:
    """(blocks, heads, tokens, content), K and V side by side in the content."""
    storage = torch.zeros(2, blocks, 4, BLOCK_TOKENS, 16, dtype=torch.bfloat16)
    return [(f"layer{i}", storage[i]) for i in range(2)]


def tokens_first(blocks: int = BLOCKS) -> Layers:
    return [("layer0", torch.zeros(blocks, BLOCK_TOKENS, 4, 16, dtype=torch.bfloat16).transpose(1, 2))]


def heads_outside(blocks: int = BLOCKS) -> Layers:
    """Each head's blocks in a plane of their own."""
    return [("layer0", torch.zeros(4, blocks, BLOCK_TOKENS, 16, dtype=torch.bfloat16).transpose(0, 1))]


def keys_and_values_apart(blocks: int = BLOCKS) -> Layers:
    return [("layer0", torch.zeros(2, blocks, BLOCK_TOKENS, 4, 8, dtype=torch.float16))]


def keys_and_values_in_the_block(blocks: int = BLOCKS) -> Layers:
    return [("layer0", torch.zeros(blocks, 2, BLOCK_TOKENS, 4, 8, dtype=torch.float16))]


def layers_in_the_block(blocks: int = BLOCKS) -> Layers:
    storage = torch.zeros(blocks, 3, 4, BLOCK_TOKENS, 8, dtype=torch.bfloat16)
    return [(f"layer{i}", storage[:, i]) for i in range(3)]


def latent(blocks: int = BLOCKS) -> Layers:
    return [("layer0", torch.zeros(blocks, BLOCK_TOKENS, 72, dtype=torch.bfloat16))]


def cut_for_kernels(blocks: int = BLOCKS) -> Layers:
    return [("layer0", torch.zeros(2 * blocks, 4, BLOCK_TOKENS // 2, 16, dtype=torch.uint8))]


SHAPES = [
    *(heads_first, tokens_first, heads_outside, keys_and_values_apart, keys_and_values_in_the_block),
    *(layers_in_the_block, latent, cut_for_kernels),
]


def describe(layers: Layers, blocks: int = BLOCKS) -> PagedGroup:
    return describe_gpu_group(
        layers,
        engine="e",
        block_tokens=BLOCK_TOKENS,
        num_blocks=blocks,
        device_type=layers[0][1].device.type,
    )


def block(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """What the engine keeps in a block, by the tensor's own shape."""
    if tensor.shape[0] == BLOCKS:
        return tensor[index]
    if tensor.shape[1] == BLOCKS:
        return tensor[:, index]
    return tensor[2 * index : 2 * index + 2]


def fill(layers: Layers, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in layers:
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype))


def check_round_trip(layers: Layers, group: PagedGroup, gpu: Gpu, *, pinned: bool) -> None:
    """Blocks come back as they were, to other places, and nothing else changes."""
    layout = group.layout(2 * BLOCK_TOKENS)
    assert layout.payload_bytes == 2 * sum(t.numel() * t.element_size() for _, t in layers) // BLOCKS
    slot_bytes = -(-(_native.FRAME_HEADER_BYTES + layout.payload_bytes) // 4096) * 4096
    memory = mmap.mmap(-1, slot_bytes * CHUNKS)
    address = _native.buffer_address(memoryview(memory))
    pinning = gpu.pin_buffer(address, len(memory)) if pinned else None
    if pinning is not None:
        pinning.wait(90.0)
        assert pinning.pinned_bytes == len(memory)
    copier = _native.PagedCopier(address, len(memory), 2, gpu.copy_methods)
    number = copier.add_group(group.segments, 2, BLOCKS)
    slots, hashes = array("Q", [0, slot_bytes]).tobytes(), bytes(range(32)) * CHUNKS
    name = Namespace("model", 1, 0, 0, layout.fingerprint)
    template = _native.frame_template(name.encode(), name.digest, layout.payload_bytes)

    fill(layers, 1)
    originals = [tensor.clone() for _, tensor in layers]
    gpu.fence().wait()
    job = copier.submit_store(number, slots, array("q", [3, 1, 7, 10]), hashes, template)
    assert copier.wait(job, 90.0) == b"\1\1"
    fill(layers, 2)
    expected = [tensor.clone() for _, tensor in layers]
    job = copier.submit_load(number, slots, array("q", [2, 5, -1, 11]), hashes, name.digest, gpu.fence())
    assert copier.wait(job, 90.0) == b"\1\1"
    for (_, tensor), original, after in zip(layers, originals, expected, strict=True):
        for source, destination in ((3, 2), (1, 5), (10, 11)):
            block(after, destination).copy_(block(original, source))
        assert torch.equal(tensor, after)
    copier.close()
    if pinning is not None:
        pinning.close()
