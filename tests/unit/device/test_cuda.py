"""KV layouts of GPU engines, and pinned memory, over a driver without a device."""

from __future__ import annotations

import logging
import mmap
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmcache import _native  # noqa: E402
from lmcache.device.cuda import Gpu, Pinning  # noqa: E402
from lmcache.errors import LayoutRefused  # noqa: E402
from polling import until  # noqa: E402
from unit.device.fake_cuda import FakeCuda  # noqa: E402
from unit.device.gpu_layouts import (  # noqa: E402
    BLOCK_TOKENS,
    BLOCKS,
    SHAPES,
    check_round_trip,
    describe,
    heads_first,
    layers_in_the_block,
)
from unit.integration.engine.workers import gpu_of  # noqa: E402


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("make", SHAPES)
def test_blocks_come_back_as_they_were(make: Any, pinned: bool, fake_cuda: FakeCuda) -> None:
    layers = make()
    group = describe(layers)
    check_round_trip(layers, group, gpu_of(fake_cuda, layers[0][1], [group]), pinned=pinned)


@pytest.mark.parametrize("make", SHAPES)
def test_engines_with_more_blocks_share_objects(make: Any) -> None:
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
    ],
)
def test_what_is_not_understood_is_refused(tensor: Any, blocks: int, words: str) -> None:
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


def test_memory_is_pinned_as_it_comes(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache.device.cuda.PIECE_BYTES", 1 << 20)
    monkeypatch.setattr("lmcache.device.cuda.LOOK_SECONDS", 0.001)
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


def test_memory_that_cannot_be_pinned_is_said_once(fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
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
