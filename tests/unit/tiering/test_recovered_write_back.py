"""What a restart finds in L1 reaches the adapters that do not have it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import StoreOutcome
from lmcache.environment import SYSTEM
from lmcache.l1.store import L1Options, L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.memory.restart_compatibility import RestartCompatibility
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.storage_loop import StorageLoop
from polling import until
from support.faults import FaultyAdapter
from unit.tiering.support import FRAME_BYTES, MOCK, Rig, faulty, keys, namespace, storage_settings

SLOTS = 1024
COMPATIBILITY = RestartCompatibility(SLOTS * FRAME_BYTES, 4096, 256, "blake3", bytes(32))


@contextmanager
def open_again(
    name: str, adapters: Sequence[ConfiguredAdapter], *, l1_policy: str = "LRU", store_policy: str = "default"
) -> Iterator[Rig]:
    """One server after another on the same memory."""
    metrics = Metrics()
    l1 = L1Store.open(
        name,
        os.urandom(16),
        L1Options(
            COMPATIBILITY.capacity_bytes,
            policy=l1_policy,
            init_bytes=COMPATIBILITY.capacity_bytes,
            compatibility=COMPATIBILITY,
        ),
    )
    storage = StorageLoop(l1, list(adapters), storage_settings(store_policy), metrics=metrics.l2, clock=SYSTEM.clock)
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
    return set(adapter.inner.objects)


def test_every_adapter_gets_what_it_lacks_and_nothing_twice(name: str) -> None:
    wanted = keys(600)
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_again(name, [first]) as rig:
        rig.put(wanted[:200])
        assert rig.storage.flush(20)
        rig.put(wanted[200:], tell=False)  # killed before it was stored
    stores = front.calls["store"]
    (first, again) = (ConfiguredAdapter(first.config, front), front)
    with open_again(name, [first, second]) as rig:
        until(lambda: held(again) >= set(wanted) and held(back) >= set(wanted))
        assert rig.resident(wanted) == 600
        assert rig.sample("l2_store_dropped_total", reason="evicted") == 0
    assert again.calls["store"] - stores <= 10  # 400 objects in batches of 64, those it had in none


@pytest.mark.parametrize("slow", ["probe", "store"])
@pytest.mark.parametrize("store_policy", ["default", "skip_l1"])
def test_a_slow_adapter_delays_no_other(name: str, slow: str, store_policy: str) -> None:
    wanted = keys(600)
    (first, mute), (second, fast) = faulty(), faulty(index=1)
    with open_again(name, []) as rig:
        rig.put(wanted)
    mute.stalls = {slow}
    mute.gate.clear()
    with open_again(name, [first, second], store_policy=store_policy) as rig:
        until(lambda: held(fast) >= set(wanted), tell=rig.storage.status)
        assert not held(mute) and rig.resident(wanted) == 600
        rig.storage.call_soon(mute.gate.set)
        until(lambda: held(mute) >= set(wanted), tell=rig.storage.status)
        until(lambda: rig.l1.core.stats()["objects"] == (0 if store_policy == "skip_l1" else 600))


def test_what_one_of_two_takes_leaves_l1_and_what_none_takes_stays(name: str) -> None:
    wanted = keys(600)
    (first, full), (second, other) = faulty(), faulty(index=1)
    with open_again(name, []) as rig:
        rig.put(wanted)
    full.store_outcome = other.store_outcome = StoreOutcome.FULL
    with open_again(name, [first, second], store_policy="skip_l1") as rig:
        until(lambda: rig.storage.status()["store"]["unstored_objects"] == 600, tell=rig.storage.status)
        assert rig.resident(wanted) == 600 and rig.sample("l2_store_lost_chunks_total") == 0
    other.store_outcome = None
    pairs = [(first, full), (second, other)]
    (first, full), (second, other) = [(ConfiguredAdapter(made.config, adapter), adapter) for made, adapter in pairs]
    with open_again(name, [first, second], store_policy="skip_l1") as rig:
        until(lambda: rig.l1.core.stats()["objects"] == 0, tell=rig.storage.status)
        assert held(other) == set(wanted) and not held(full)


def test_an_adapter_with_a_lossy_serde_lacks_no_exact_objects(name: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = keys(220)
    first, front = faulty()
    second = build(parse_adapter({**MOCK, "serde": {"type": "fp8"}}, 1))
    with open_again(name, [first]) as rig:
        rig.put(wanted[:200])
        assert rig.storage.flush(20)
        rig.put(wanted[200:], tell=False)  # killed before it was stored
    with caplog.at_level(logging.INFO), open_again(name, [ConfiguredAdapter(first.config, front), second]):
        until(lambda: held(front) >= set(wanted))
        until(lambda: "of the previous server's L1" in caplog.text)
    said = [record.message for record in caplog.records if "was given" in record.message]
    assert said == ["mock_0: was given 20 objects of the previous server's L1"]


def test_what_is_corrupt_is_not_stored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = keys(20)
    with open_again(name, []) as rig:
        rig.put(wanted)
        offset = rig.l1.memory.size_bytes - COMPATIBILITY.capacity_bytes + 7 * FRAME_BYTES + FRAME_HEADER_BYTES + 9
        rig.l1.memory.view(offset, 1)[0] ^= 1
    configured, adapter = faulty()
    with caplog.at_level(logging.WARNING), open_again(name, [configured]) as rig:
        until(lambda: len(held(adapter)) == 19)
        assert wanted[7] not in held(adapter)
        assert rig.resident(wanted) == 7
        assert rig.sample("corrupt_frames_total", tier="l1") == 1
    assert sum("1 objects of the previous server are corrupt" in record.message for record in caplog.records) == 1


def test_skip_l1_empties_what_it_found(name: str) -> None:
    """Without eviction, what a restart found would otherwise stay for ever."""
    of = namespace(salt="tenant")
    configured, adapter = faulty()
    with open_again(name, [], l1_policy="noop") as rig:
        rig.put(keys(SLOTS // 2))
        rig.put(keys(SLOTS // 2, of=of))
        assert rig.l1.core.stats()["free_bytes"] == 0
    with open_again(name, [configured], l1_policy="noop", store_policy="skip_l1") as rig:
        until(lambda: rig.l1.core.stats()["objects"] == 0)
        assert held(adapter) == {*keys(SLOTS // 2), *keys(SLOTS // 2, of=of)}
        assert rig.put(keys(30, seed=5)) == 30
        until(lambda: rig.l1.core.stats()["objects"] == 0)
