"""What a restart finds in L1 reaches the adapters that do not have it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l1.store import L1Store
from lmcache.l2.registry import ConfiguredAdapter
from lmcache.memory.inheritance import Inheritance
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.faults import FaultyAdapter
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from lmcache.tiering.storage import Storage
from polling import until
from unit.tiering.support import FRAME_BYTES, Rig, faulty, keys, namespace

SLOTS = 1024
HEIR = Inheritance(SLOTS * FRAME_BYTES, 4096, 256, "blake3", bytes(32))


@contextmanager
def life(
    name: str, adapters: Sequence[ConfiguredAdapter], *, l1_policy: str = "LRU", store_policy: str = "default"
) -> Iterator[Rig]:
    """One server after another on the same memory."""
    metrics = Metrics()
    l1 = L1Store.open(
        name, HEIR.capacity_bytes, os.urandom(16), policy=l1_policy, init_bytes=HEIR.capacity_bytes, heir=HEIR
    )
    storage = Storage(
        l1,
        list(adapters),
        store_policy=select_store_policy(store_policy),
        prefetch_policy=select_prefetch_policy("default"),
        prefetch_max_in_flight=8,
        eviction_watermark=1.0,
        eviction_ratio=0.2,
        metrics=metrics,
    )
    try:
        storage.start()
        yield Rig(l1, storage, metrics)
        assert storage.stop(10)
        l1.check_idle()
    finally:
        storage.stop(0)
        l1.close()


@pytest.fixture
def name() -> Iterator[str]:
    name = f"lmcache-test-catch-up-{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    os.unlink(f"/dev/shm/{name}")


def held(adapter: FaultyAdapter) -> set[ObjectKey]:
    return set(adapter.inner.objects)  # type: ignore[attr-defined]


def test_every_adapter_gets_what_it_lacks_and_nothing_twice(name: str) -> None:
    wanted = keys(600)
    (first, one), (second, two) = faulty(), faulty(index=1)
    with life(name, [first]) as it:
        it.put(wanted[:200])
        assert it.storage.flush(20)
        it.put(wanted[200:], tell=False)  # killed before it was stored
    stores = one.calls["store"]
    (first, again) = (ConfiguredAdapter(first.config, one), one)
    with life(name, [first, second]) as it:
        until(lambda: held(again) >= set(wanted) and held(two) >= set(wanted))
        assert it.resident(wanted) == 600
        assert it.sample("l2_store_dropped_total", reason="evicted") == 0
    assert again.calls["store"] - stores <= 10  # 400 objects in batches of 64, those it had in none


def test_what_is_corrupt_is_not_stored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = keys(20)
    with life(name, []) as it:
        it.put(wanted)
        offset = it.l1.memory.size_bytes - HEIR.capacity_bytes + 7 * FRAME_BYTES + FRAME_HEADER_BYTES + 9
        it.l1.memory.view(offset, 1)[0] ^= 1
    configured, adapter = faulty()
    with caplog.at_level(logging.WARNING), life(name, [configured]) as it:
        until(lambda: len(held(adapter)) == 19)
        assert wanted[7] not in held(adapter)
        assert it.resident(wanted) == 7
        assert it.sample("corrupt_frames_total", tier="l1") == 1
    assert sum("1 objects of the former server are corrupt" in record.message for record in caplog.records) == 1


def test_skip_l1_empties_what_it_found(name: str) -> None:
    """Without eviction, what a restart found would otherwise stay for ever."""
    of = namespace(salt="tenant")
    configured, adapter = faulty()
    with life(name, [], l1_policy="noop") as it:
        it.put(keys(SLOTS // 2))
        it.put(keys(SLOTS // 2, of=of))
        assert it.l1.core.stats()["free_bytes"] == 0
    with life(name, [configured], l1_policy="noop", store_policy="skip_l1") as it:
        until(lambda: it.l1.core.stats()["objects"] == 0)
        assert held(adapter) == {*keys(SLOTS // 2), *keys(SLOTS // 2, of=of)}
        assert it.put(keys(30, seed=5)) == 30
        until(lambda: it.l1.core.stats()["objects"] == 0)
