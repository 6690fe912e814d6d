"""The real driver does what the fake one of the other tests pretends: copies by every way, in order with the engine."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmcache import _native  # noqa: E402
from lmcache.device.cuda import DRIVER, Gpu  # noqa: E402
from unit.device.gpu_layouts import SHAPES, check_round_trip, describe, heads_first  # noqa: E402


def test_every_way_returns_what_was_written() -> None:
    ways = _native.CudaCopyMethods(_native.CudaDevice(DRIVER, 0), 64 << 10, 16 << 20)
    trials = {way: min(store, load) for way, store, load in ways.trials}
    assert {"single", "kernel"} <= trials.keys()
    assert all(speed > 0 for speed in trials.values()), trials


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("make", SHAPES)
def test_blocks_come_back_as_they_were(make: Any, pinned: bool) -> None:
    with torch.device("cuda"):
        layers = make()
    group = describe(layers)
    check_round_trip(layers, group, Gpu([group], layers[0][1].get_device()), pinned=pinned)


def test_a_fence_passes_when_the_engines_stream_has_come_to_it() -> None:
    with torch.device("cuda"):
        layers = heads_first()
    gpu = Gpu([describe(layers)], 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # noqa: SLF001  # clock cycles, some tenths of a second; there is no public way
        layers[0][1].fill_(3)
        fence = gpu.fence()
    assert not stream.query()
    fence.wait()
    assert stream.query()
