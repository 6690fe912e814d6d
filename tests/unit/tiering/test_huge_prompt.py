"""A huge prompt of one tenant in an adapter that has become ten times slower costs small hits of another nothing."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.key import ObjectKey
from lmcache.l2.adapter_types import build, parse_adapter
from unit.tiering.support import FRAME_BYTES, Rig, keys, namespace, open_rig

HUGE_CHUNKS = 400  # of 256 tokens: more than 100,000
SMALL_CHUNKS = 8
LOOKUPS = 100
HUGE_REQUESTS = 12  # at once: more than have places
SLOWER = 10
SAME = 3  # times, on a machine that others use
NOISE_SECONDS = 0.02


def small_hit(rig: Rig, wanted: list[ObjectKey]) -> float:
    """Seconds of a prompt of which the folder has SMALL_CHUNKS."""
    started = time.perf_counter()
    result = rig.fetch(wanted)
    seconds = time.perf_counter() - started
    assert result.chunks == SMALL_CHUNKS and rig.holds(result, wanted)
    rig.l1.core.release(result.lease)
    return seconds


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


@pytest.mark.parametrize("beyond", [0, 4])
def test_a_huge_prompt_in_a_slow_adapter_costs_others_nothing(tmp_path: Path, beyond: int) -> None:
    """`beyond`: chunks of the small prompts that nobody has, so that both adapters are asked for them."""
    local = build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path)}, 0))
    settings: dict[str, Any] = {"bytes_per_second": 20e6, "answer_seconds": 0.001}
    module = str(Path(__file__).with_name("throttled_plugin.py"))
    plugin = {"type": "plugin", "module_path": module, "class_name": "Throttled", "adapter_params": settings}
    remote = build(parse_adapter(plugin, 1))
    huge = [keys(HUGE_CHUNKS, seed, of=namespace(salt="huge")) for seed in range(HUGE_REQUESTS)]
    small = keys(SMALL_CHUNKS + beyond, of=namespace(salt="small"))
    with open_rig([local, remote], slots=HUGE_CHUNKS * (HUGE_REQUESTS + 1)) as rig:
        rig.put(small[:SMALL_CHUNKS])
        assert rig.storage.flush(20)
        frame = rig.l1.memory  # what the remote service holds was stored by another server
        inner: Any = remote.adapter.inner  # type: ignore[attr-defined]
        for wanted in huge:
            rig.put(wanted, tell=False)
            acquired = rig.l1.core.acquire(1, wanted[0].namespace.digest, b"".join(k.chunk_hash for k in wanted), 1e18)
            for chunk, key in enumerate(wanted):
                slot = int.from_bytes(acquired.slots[8 * chunk : 8 * chunk + 8], "little")
                inner.objects[key] = bytes(frame.view(slot, FRAME_BYTES))
            rig.l1.core.release(acquired.lease)
        rig.storage.clear("l1")

        alone = [small_hit(rig, small) for _ in range(LOOKUPS)]
        rig.storage.call_soon(lambda: inner.slow_down(SLOWER))
        waiting = [rig.begin_fetch(wanted, deadline_seconds=60.0) for wanted in huge]
        beside = [small_hit(rig, small) for _ in range(LOOKUPS)]
        under_way = sum(answers.empty() for answers, _ in waiting)
        for answers, cancel in waiting:
            cancel()
            rig.l1.core.release(answers.get(timeout=30).lease)
        figures = {"alone": alone, "beside": beside}
        shown = {name: (round(1e3 * statistics.median(s), 2), round(1e3 * p99(s), 2)) for name, s in figures.items()}
        print("median and p99 in ms:", shown, "huge prompts under way at the end:", under_way)
        assert under_way >= HUGE_REQUESTS - 2
        answer_seconds = inner.answer_seconds if beyond else 0.0  # of the service, which is slow
        assert statistics.median(beside) < SAME * (statistics.median(alone) + answer_seconds) + NOISE_SECONDS, shown
        assert p99(beside) < SAME * (p99(alone) + answer_seconds) + 1.0, shown  # a load of the slow service takes 2 s
