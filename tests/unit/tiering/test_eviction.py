"""Each tier is brought below its watermark by a task of its own."""

from __future__ import annotations

from lmcache.core.limits import GIB
from polling import until
from unit.tiering.support import FRAME_BYTES, MOCK, faulty, keys, open_rig

EVICTING = {
    **MOCK,
    "max_size_gb": 100 * FRAME_BYTES / GIB,
    "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.3, "eviction_ratio": 0.9},
}


def test_an_adapter_that_deletes_slowly_holds_up_neither_l1_nor_others() -> None:
    (first, slow), (second, fast) = faulty(EVICTING), faulty(EVICTING, 1)
    slow.stalls = {"delete"}
    with open_rig([first, second], slots=100, eviction_watermark=0.5) as rig:
        rig.storage.call_soon(slow.gate.clear)
        rig.put(keys(40, seed=1))
        until(lambda: slow.stalled == 1)
        rig.put(keys(25, seed=2), tell=False)  # L1 alone
        until(lambda: rig.l1.core.stats()["used_bytes"] <= 50 * FRAME_BYTES)
        assert slow.stalled == 1
        until(lambda: len(fast.inner.objects) < 30)
        rig.storage.call_soon(slow.gate.set)
        until(lambda: len(slow.inner.objects) < 30)


def test_a_server_stops_while_an_adapter_deletes() -> None:
    configured, slow = faulty(EVICTING)
    slow.stalls = {"delete"}
    with open_rig([configured], slots=100) as rig:
        rig.storage.call_soon(slow.gate.clear)
        rig.put(keys(40))
        until(lambda: slow.stalled == 1)
        assert not rig.storage.stop(0.1)
        rig.storage.stop(0)
