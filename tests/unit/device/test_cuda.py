"""KV layouts of GPU engines, and pinned memory, over a driver without a device."""

from __future__ import annotations

import logging
import mmap
from array import array

import pytest

torch = pytest.importorskip("torch")

from lmcache import _native  # noqa: E402
from lmcache.core.key import Namespace  # noqa: E402
from lmcache.device.cuda import Gpu, Pinning, describe_gpu_group  # noqa: E402
from lmcache.errors import LayoutRefused  # noqa: E402
from unit.device.fake_cuda import FakeCuda  # noqa: E402
from unit.integration.vllm.workers import gpu_of, until  # noqa: E402

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


def describe(layers: Layers, blocks: int = BLOCKS):
    return describe_gpu_group(layers, engine="e", block_tokens=BLOCK_TOKENS, num_blocks=blocks, device_type="cpu")


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


@pytest.mark.parametrize("make", SHAPES)
def test_blocks_come_back_as_they_were_and_nothing_else_changes(make, fake_cuda: FakeCuda) -> None:
    layers = make()
    group = describe(layers)
    gpu = gpu_of(fake_cuda, layers[0][1], [group])
    layout = group.layout(2 * BLOCK_TOKENS)
    assert layout.payload_bytes == 2 * sum(t.numel() * t.element_size() for _, t in layers) // BLOCKS
    slot_bytes = -(-(_native.FRAME_HEADER_BYTES + layout.payload_bytes) // 4096) * 4096
    memory = mmap.mmap(-1, slot_bytes * CHUNKS)
    copier = _native.PagedCopier(_native.buffer_address(memoryview(memory)), len(memory), 2, gpu.ways)
    number = copier.add_group(group.segments, 2, BLOCKS)
    slots, hashes = array("Q", [0, slot_bytes]).tobytes(), bytes(range(32)) * CHUNKS
    name = Namespace("model", 1, 0, 0, layout.fingerprint)
    template = _native.frame_template(name.encode(), name.digest, layout.payload_bytes)

    fill(layers, 1)
    originals = [tensor.clone() for _, tensor in layers]
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


@pytest.mark.parametrize("make", SHAPES)
def test_engines_with_more_blocks_share_objects(make) -> None:
    prints = {describe(make(blocks), blocks).layout(2 * BLOCK_TOKENS).fingerprint for blocks in (BLOCKS, 2 * BLOCKS)}
    assert len(prints) == 1


def test_layouts_that_order_bytes_otherwise_do_not_share_objects() -> None:
    prints = {describe(make()).layout(2 * BLOCK_TOKENS).fingerprint for make in SHAPES}
    assert len(prints) == len(SHAPES)
    # Where the blocks of a layer lie does not matter, what is in a block does.
    assert (
        describe(layers_in_the_block()).layers
        == describe(
            [(f"layer{i}", torch.zeros(BLOCKS, 4, BLOCK_TOKENS, 8, dtype=torch.bfloat16)) for i in range(3)]
        ).layers
    )


@pytest.mark.parametrize(
    ("tensor", "blocks", "words"),
    [
        (torch.zeros(BLOCKS + 1, 4, BLOCK_TOKENS, 8), BLOCKS, "not the 12 block ids"),
        (torch.zeros(3 * BLOCKS, 4, BLOCK_TOKENS, 8), BLOCKS, "are not in it"),
        (torch.zeros(BLOCKS, 4, 2 * BLOCK_TOKENS, 8), BLOCKS, "are not in it"),
        (torch.zeros(2, 2, BLOCK_TOKENS, 8), 2, "cannot be told"),
        (torch.zeros(1, 4, BLOCK_TOKENS, 8).expand(BLOCKS, 4, BLOCK_TOKENS, 8), BLOCKS, "overlap"),
        (torch.zeros(BLOCKS, 4, BLOCK_TOKENS, 8, device="meta"), BLOCKS, "lies on meta"),
    ],
)
def test_what_is_not_understood_is_refused(tensor: torch.Tensor, blocks: int, words: str) -> None:
    with pytest.raises(LayoutRefused, match=words):
        describe([("layer0", tensor)], blocks)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuInit", "cuInit failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain failed"),
        ("cuMemAlloc_v2", "cuMemAlloc failed"),
    ],
)
def test_a_driver_that_refuses_is_named(call: str, words: str, fake_cuda: FakeCuda) -> None:
    fake_cuda.fail(call)
    layers = heads_first()
    with pytest.raises(LayoutRefused, match=words):
        gpu_of(fake_cuda, layers[0][1], [describe(layers)])


def test_without_a_driver_the_sentence_says_so() -> None:
    with pytest.raises(LayoutRefused, match="cannot open the NVIDIA driver"):
        Gpu([describe(heads_first())], 0, library="libno-such-driver.so.1")


def test_memory_is_pinned_as_it_comes(fake_cuda: FakeCuda, monkeypatch) -> None:
    monkeypatch.setattr("lmcache.device.cuda._PIECE_BYTES", 1 << 20)
    monkeypatch.setattr("lmcache.device.cuda._LOOK_SECONDS", 0.001)
    memory = mmap.mmap(-1, 5 << 20)
    present = [0]
    device = _native.CudaDevice(fake_cuda.path, 0)
    pinning = Pinning(device, _native.buffer_address(memoryview(memory)), len(memory), lambda: present[-1])
    for total in (2 << 20, (2 << 20) + 4096, 5 << 20):
        present.append(total)
        until(lambda total=total: pinning.pinned_bytes == total)
    pinning.close()
    pinning.close()
    assert fake_cuda.calls("cuMemHostRegister_v2") == fake_cuda.calls("cuMemHostUnregister") == 6


def test_memory_that_cannot_be_pinned_is_said_once(fake_cuda: FakeCuda, caplog) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    device = _native.CudaDevice(fake_cuda.path, 0)
    fake_cuda.fail("cuMemHostRegister_v2", times=1000)
    with caplog.at_level(logging.WARNING, "lmcache.device"):
        pinning = Pinning(device, _native.buffer_address(memoryview(memory)), len(memory), lambda: len(memory))
        until(lambda: bool(caplog.records))
    pinning.close()
    (record,) = caplog.records
    assert "Only 0 of 1 MiB could be pinned" in record.getMessage()
    assert "cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY" in record.getMessage()
