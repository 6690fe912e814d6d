"""Tensors in, bytes out and back: the copier moves exactly the blocks' content, for every shape that engines use."""

from __future__ import annotations

import mmap
from array import array
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmcache import _native  # noqa: E402
from lmcache.core.key import Namespace  # noqa: E402
from lmcache.device.cpu import PagedGroup, describe_group  # noqa: E402
from lmcache.errors import LayoutRefused  # noqa: E402

BLOCKS = 12
CHUNKS = 2


def head_major() -> list[tuple[str, Any]]:
    """What vLLM's CPU attention registers: one storage, a layer after another, block content contiguous."""
    storage = torch.zeros(2, BLOCKS, 4, 32, 16, dtype=torch.bfloat16)
    return [(f"layer{i}", storage[i]) for i in range(2)]


def block_major() -> list[tuple[str, Any]]:
    """All layers of a block side by side."""
    storage = torch.zeros(BLOCKS, 2, 4, 32, 16, dtype=torch.bfloat16)
    return [(f"layer{i}", storage[:, i]) for i in range(2)]


def padded_pages() -> list[tuple[str, Any]]:
    """Content shorter than the page, and a gap between heads."""
    storage = torch.zeros(BLOCKS, 5, 40, 16, dtype=torch.uint8)
    return [("layer0", storage[:, :4, :32])]


def permuted() -> list[tuple[str, Any]]:
    """Shape in one order, memory in another."""
    return [("layer0", torch.zeros(BLOCKS, 32, 4, 16, dtype=torch.float16).transpose(1, 2))]


def latent() -> list[tuple[str, Any]]:
    return [("layer0", torch.zeros(BLOCKS, 1, 16, 72, dtype=torch.bfloat16))]


def fill(tensors: list[tuple[str, Any]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in tensors:
        values = torch.randint(0, 100, tensor.shape, generator=generator)
        tensor.copy_(values.to(tensor.dtype))


class Arena:
    """Anonymous memory to copy to and from, with the copier over it."""

    def __init__(self, group: PagedGroup, chunk_tokens: int) -> None:
        self.layout = group.layout(chunk_tokens)
        slot_bytes = -(-(_native.FRAME_HEADER_BYTES + self.layout.payload_bytes) // 4096) * 4096
        self.memory = mmap.mmap(-1, slot_bytes * CHUNKS)
        self.slots = array("Q", [slot_bytes * i for i in range(CHUNKS)]).tobytes()
        self.copier = _native.PagedCopier(_native.buffer_address(memoryview(self.memory)), len(self.memory), 2)
        self.group = self.copier.add_group(group.segments, self.layout.blocks_per_chunk, group.num_blocks)
        self.namespace = Namespace("model", 1, 0, 0, self.layout.fingerprint)
        self.hashes = bytes(range(32)) * CHUNKS

    def store(self, blocks: list[int]) -> bytes:
        template = _native.frame_template(self.namespace.encode(), self.namespace.digest, self.layout.payload_bytes)
        job = self.copier.submit_store(self.group, self.slots, array("q", blocks).tobytes(), self.hashes, template)
        result = self.copier.wait(job, 10.0)
        assert result is not None
        return result

    def load(self, blocks: list[int]) -> bytes:
        job = self.copier.submit_load(
            self.group, self.slots, array("q", blocks).tobytes(), self.hashes, self.namespace.digest
        )
        result = self.copier.wait(job, 10.0)
        assert result is not None
        return result


@pytest.mark.parametrize("make", [head_major, block_major, padded_pages, permuted, latent])
def test_blocks_come_back_as_they_were_and_nothing_else_changes(make: Any) -> None:
    tensors = make()
    fill(tensors, seed=1)
    originals = [tensor.clone() for _, tensor in tensors]
    group = describe_group(tensors, engine="e", block_tokens=16, num_blocks=BLOCKS)
    arena = Arena(group, chunk_tokens=32)
    assert arena.layout.payload_bytes == 2 * sum(t[0].numel() * t.element_size() for _, t in tensors)

    assert arena.store([3, 1, 7, 10]) == b"\1\1"
    fill(tensors, seed=2)
    others = [tensor.clone() for _, tensor in tensors]
    assert arena.load([2, 5, -1, 11]) == b"\1\1"

    for (_, tensor), original, other in zip(tensors, originals, others, strict=True):
        other[2], other[5], other[11] = original[3], original[1], original[10]
        assert torch.equal(tensor, other)


def test_layers_that_share_bytes_are_copied_once() -> None:
    tensor = torch.zeros(BLOCKS, 4, 32, 16)
    group = describe_group([("a", tensor), ("b", tensor)], engine="e", block_tokens=32, num_blocks=BLOCKS)
    assert [layer.name for layer in group.layers] == ["a"]


def test_the_fingerprint_tells_engines_apart() -> None:
    def fingerprint(tensors: Any, engine: Any = "e", block_tokens: int = 16, chunk_tokens: int = 32) -> str:
        group = describe_group(tensors, engine=engine, block_tokens=block_tokens, num_blocks=BLOCKS)
        return group.layout(chunk_tokens).fingerprint

    assert fingerprint(head_major()) == fingerprint(head_major())
    distinct = [
        fingerprint(head_major()),
        fingerprint(head_major(), engine="other"),
        fingerprint(head_major(), block_tokens=32),
        fingerprint(head_major(), chunk_tokens=64),
        fingerprint(permuted()),
        fingerprint([("layer0", torch.zeros(BLOCKS, 4, 32, 16, dtype=torch.float16))]),
        fingerprint([("layer0", torch.zeros(BLOCKS, 4, 32, 16, dtype=torch.bfloat16))]),
    ]
    assert len(set(distinct)) == len(distinct)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(BLOCKS + 1, 4, 32), "first dimension"),
        (torch.zeros(1, 4, 32).expand(BLOCKS, 4, 32), "overlap"),
        (torch.zeros(BLOCKS, 1, 32).expand(BLOCKS, 4, 32), "overlapping"),
        (torch.zeros(4, BLOCKS, 32).transpose(0, 1), "interleave"),
        (torch.zeros(BLOCKS, 4, device="meta"), "lies on meta"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_sentence(tensor: Any, words: str) -> None:
    with pytest.raises(LayoutRefused, match=words):
        describe_group([("layer0", tensor)], engine="e", block_tokens=16, num_blocks=BLOCKS)


def test_layers_that_overlap_are_refused() -> None:
    storage = torch.zeros(BLOCKS + 1, 64)
    with pytest.raises(LayoutRefused, match="overlap"):
        describe_group([("a", storage[:-1]), ("b", storage[1:])], engine="e", block_tokens=16, num_blocks=BLOCKS)


def test_chunks_must_be_whole_blocks() -> None:
    group = describe_group(head_major(), engine="e", block_tokens=640, num_blocks=BLOCKS)
    with pytest.raises(LayoutRefused, match="--chunk-size"):
        group.layout(256)
