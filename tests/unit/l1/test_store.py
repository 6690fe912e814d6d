"""L1Store over real shared memory."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lmcache import _native
from lmcache._native import L1Core, Reserved
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import GIB, MIB
from lmcache.errors import ResourceError, ServerUnavailable
from lmcache.l1 import growth
from lmcache.l1.store import L1Options, L1Store
from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.server_memory import ServerMemory
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import batch_of
from manual_clock import ManualClock
from polling import until
from support.small_machine import machine_with

EPOCH = bytes(16)
FOREVER = 1e18
DEADLINE_SECONDS = 20.0
NAMESPACE = Namespace("model", 2, 0, 0, "00" * 16, "tenant")


@pytest.fixture
def name() -> Iterator[str]:
    name = f"lmcache_test_{os.getpid()}_{secrets.token_hex(4)}"
    yield name
    assert not os.path.exists(f"/dev/shm/{name}"), "the test left shared memory behind"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "L1_GROW_STEP_BYTES", 2 * MIB)
    monkeypatch.setattr(growth, "L1_GROW_INLINE_BYTES", 8 * MIB)
    monkeypatch.setattr(growth, "L1_HEADROOM_BYTES", 4 * MIB)


def reserve(store: L1Store, count: int, size_bytes: int, first: int = 0) -> Reserved:
    keys = [ObjectKey(NAMESPACE, hashlib.sha256(str(first + i).encode()).digest()) for i in range(count)]
    return store.reserve(1, batch_of(keys, size_bytes), FOREVER)


def put(store: L1Store, count: int, size_bytes: int, first: int = 0) -> int:
    """Stores `count` objects and returns how many found no room."""
    reserved = reserve(store, count, size_bytes, first)
    store.core.commit(reserved.reservation)
    return reserved.chunks_without_room


def committed(store: L1Store) -> int:
    return store.core.stats()["committed_bytes"]


def test_a_large_lazy_l1_is_ready_at_once_and_fills_in_the_background(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(4 * GIB, policy="LRU", init_bytes=256 * MIB))
    try:
        assert committed(store) < GIB
        until(lambda: committed(store) >= GIB)  # the headroom beyond what is used
        store.check_idle()
    finally:
        store.close()


@pytest.mark.usefixtures("small_steps")
def test_the_background_stays_ahead_of_use(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(32 * MIB, policy="LRU", init_bytes=2 * MIB))
    try:
        until(lambda: committed(store) == 4 * MIB)
        put(store, 3, MIB)
        until(lambda: committed(store) == 7 * MIB)
        for step in range(1, 15):
            put(store, 2, MIB, first=100 * step)
            until(lambda: committed(store) == min(7 + 2 * step, 32) * MIB)  # noqa: B023
        assert store.stats()["evicted_objects"] == 0
    finally:
        store.close()


@pytest.mark.usefixtures("small_steps")
def test_a_reservation_grows_l1_rather_than_evict(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(32 * MIB, policy="LRU", init_bytes=2 * MIB))
    try:
        assert store.growth is not None
        until(lambda: committed(store) == 4 * MIB)
        store.growth.stop()  # no background: only what reservations do themselves
        assert put(store, 10, MIB) == 0
        assert committed(store) == 10 * MIB
        assert put(store, 8, MIB, first=100) == 0
        assert (committed(store), store.stats()["evicted_objects"]) == (18 * MIB, 0)
        # What one reservation may wait for is limited; beyond that it makes do by eviction.
        assert put(store, 12, MIB, first=200) == 0
        assert (committed(store), store.stats()["evicted_objects"]) == (26 * MIB, 4)
        assert put(store, 8, MIB, first=300) == 0
        assert (committed(store), store.stats()["evicted_objects"]) == (32 * MIB, 6)
    finally:
        store.close()


@pytest.mark.usefixtures("small_steps")
def test_when_the_machine_has_no_more_l1_evicts_and_asks_again_later(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    machine = machine_with(tmp_path, 1000)
    store = L1Store.open(name, EPOCH, L1Options(32 * MIB, policy="LRU", init_bytes=4 * MIB), clock=clock, probe=machine)
    try:
        assert store.growth is not None
        until(lambda: committed(store) == 4 * MIB)
        store.growth.stop()
        machine_with(tmp_path, 1)
        with caplog.at_level(logging.WARNING, logger="lmcache.l1"):
            assert put(store, 4, MIB) == 0
            assert put(store, 4, MIB, first=100) == 0
            assert put(store, 4, MIB, first=200) == 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "this machine's memory leaves" in caplog.text
        assert (committed(store), store.stats()["evicted_objects"]) == (4 * MIB, 8)
        with caplog.at_level(logging.WARNING, logger="lmcache.l1"):
            clock.advance(60)
            put(store, 4, MIB, first=300)
        assert len(caplog.records) == 1
        machine_with(tmp_path, 1000)
        put(store, 4, MIB, first=400)
        assert committed(store) == 4 * MIB
        clock.advance(60)
        put(store, 4, MIB, first=500)
        assert committed(store) == 8 * MIB
    finally:
        store.close()


def test_an_eager_l1_has_all_its_memory_before_it_opens(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(16 * MIB, policy="noop"))
    try:
        assert committed(store) == 16 * MIB
        assert os.stat(store.memory.path).st_blocks * 512 == 16 * MIB + 4096
    finally:
        store.close()
        store.close()


def test_what_cannot_be_had_leaves_nothing_behind(name: str) -> None:
    with pytest.raises(ResourceError, match="L1 needs"):
        L1Store.open(name, EPOCH, L1Options(1 << 44, policy="LRU", init_bytes=MIB))
    with pytest.raises(ValueError, match="policy"):
        L1Store.open(name, EPOCH, L1Options(16 * MIB, policy="guess", init_bytes=MIB))


def test_slots_lie_aligned_behind_the_header(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(16 * MIB, policy="LRU", align_bytes=65536, init_bytes=16 * MIB))
    try:
        slots = reserve(store, 2, store.frame_bytes(100_000)).slots
        assert struct.unpack("<2Q", slots) == (65536, 65536 + 131072)
        assert store.address_of(65536) == store.memory.address + 65536
        store.memory.view(65536, 131072 * 2)[:] = bytes([1]) * (131072 * 2)
    finally:
        store.close()


@pytest.mark.parametrize(
    ("payload_bytes", "align_bytes", "expected"),
    [(1, 4096, 8192), (4096, 4096, 8192), (4097, 4096, 12288), (2 * MIB, 4096, 2 * MIB + 4096), (5, 65536, 65536)],
)
def test_frame_bytes(name: str, payload_bytes: int, align_bytes: int, expected: int) -> None:
    store = L1Store.open(name, EPOCH, L1Options(MIB, policy="LRU", align_bytes=align_bytes, init_bytes=MIB))
    try:
        assert store.frame_bytes(payload_bytes) == expected
    finally:
        store.close()


def test_metrics_follow_the_core(name: str) -> None:
    metrics = Metrics()
    store = L1Store.open(name, EPOCH, L1Options(4 * MIB, policy="LRU", init_bytes=4 * MIB), metrics=metrics.l1)
    try:
        put(store, 4, MIB)
        put(store, 2, MIB, first=10)
        reserve(store, 1, 5 * MIB, first=20)
        store.stats()
        store.stats()
        expected = {
            "l1_usage_ratio": 1.0,
            "l1_memory_usage_bytes": 4 * MIB,
            "l1_evicted_chunks_total": 2,
            "l1_allocation_failure_chunks_total": 1,
        }
        assert {name: metrics.registry.get_sample_value(f"lmcache_mp_{name}") for name in expected} == expected
    finally:
        store.close()


def test_idle_means_that_nobody_holds_anything(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(4 * MIB, policy="LRU", init_bytes=4 * MIB))
    try:
        reservation = reserve(store, 1, MIB).reservation
        with pytest.raises(AssertionError, match="'reservations': 1, 'staged': 1"):
            store.check_idle()
        store.core.commit(reservation, b"", lease_owner=2, deadline=FOREVER)
        with pytest.raises(AssertionError, match="'leases': 1"):
            store.check_idle()
        store.core.drop_owner(2)
        store.check_idle()
    finally:
        store.close()


def test_engines_can_map_ahead_what_the_server_has_filled(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(16 * MIB, policy="LRU"))
    try:
        engine = EngineMemory.attach(store.memory.path, store.memory.size_bytes, EPOCH)
        assert engine.prefault_present(2) == store.memory.size_bytes
        assert engine.prefault_present(2) == 0
        engine.close()
        assert engine.prefault_present(2) == 0
    finally:
        store.close()


def mapped_kib(address: int, kind: str = "Rss") -> int:
    """How much of the mapping at `address` this process has in its page tables."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = found or line.startswith(f"{address:x}-")
        if found and line.startswith(f"{kind}:"):
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.usefixtures("small_steps")
def test_mapping_ahead_follows_growth(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(32 * MIB, policy="LRU", align_bytes=65536, init_bytes=2 * MIB))
    engine = EngineMemory.attach(store.memory.path, store.memory.size_bytes, EPOCH)
    try:
        engine.map_ahead()
        until(lambda: mapped_kib(engine.address) >= 4 * 1024)
        for step in range(1, 15):
            put(store, 2, MIB, first=100 * step)
        until(lambda: committed(store) == 32 * MIB)
        until(lambda: mapped_kib(engine.address) >= 28 * 1024)
    finally:
        engine.close()
        store.close()


def test_steps_of_any_size_leave_no_small_pages(name: str) -> None:
    """Where the kernel makes large pages of shared memory at all. They are made with the memory, not out of small ones,
    which takes ten times as long."""
    memory = ServerMemory.create(name, 16 * MIB, EPOCH)
    try:
        memory.grow(4 * MIB)
        if mapped_kib(memory.address, "ShmemPmdMapped") != 4 * 1024:
            pytest.skip("the kernel makes no large pages here")
        memory.grow(9 * MIB)
        memory.grow(memory.size_bytes)
        assert mapped_kib(memory.address, "ShmemPmdMapped") == 16 * 1024
        engine = EngineMemory.attach(memory.path, memory.size_bytes, EPOCH)
        engine.prefault_present(1)
        assert mapped_kib(engine.address, "ShmemPmdMapped") == 16 * 1024
        engine.close()
    finally:
        memory.close()


def test_small_pages_of_a_previous_server_become_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ServerMemory.create(name, 16 * MIB, EPOCH)
    try:
        with monkeypatch.context() as without:
            without.setattr(_native, "take_large_pages", lambda *_: None)
            memory.grow(memory.size_bytes)
        memory.prefault(0, 5 * MIB, 1, large_pages=True)
        if mapped_kib(memory.address, "ShmemPmdMapped") != 4 * 1024:
            pytest.skip("the kernel makes no large pages here")
        memory.prefault(5 * MIB, 11 * MIB, 1, large_pages=True)
        assert mapped_kib(memory.address, "ShmemPmdMapped") == 16 * 1024
    finally:
        memory.close()


def test_engines_leave_small_pages_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New pages would be charged to them."""
    monkeypatch.setattr(_native, "take_large_pages", lambda *_: None)
    memory = ServerMemory.create(name, 16 * MIB, EPOCH)
    try:
        memory.grow(memory.size_bytes)
        _native.prefault(memory.address, memory.size_bytes, 1)
        engine = EngineMemory.attach(memory.path, memory.size_bytes, EPOCH)
        assert engine.prefault_present(1) == memory.size_bytes
        assert mapped_kib(engine.address, "ShmemPmdMapped") == 0
        engine.close()
    finally:
        memory.close()


def test_mapping_ahead_makes_no_memory(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(2 * GIB, policy="LRU", init_bytes=MIB))
    try:
        assert store.growth is not None
        store.growth.stop()
        before = os.stat(store.memory.path).st_blocks
        engine = EngineMemory.attach(store.memory.path, store.memory.size_bytes, EPOCH)
        assert engine.prefault_present(1) < 2 * GIB
        assert os.stat(store.memory.path).st_blocks == before
        engine.close()
    finally:
        store.close()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_ages_of_sampled_objects_are_metrics(rate: float) -> None:
    core = L1Core(4 * 4096, 0, 4096, "LRU")
    core.set_committed(4 * 4096)
    core.set_age_sample_rate(rate)
    metrics = Metrics()
    store = L1Store(cast(ServerMemory, None), core, metrics.l1)
    namespace = bytes(32)

    def put(number: int) -> bytes:
        chunk_hash = bytes([number]) * 32
        core.commit(core.reserve(1, namespace, "", (4096).to_bytes(8, "little"), chunk_hash, 1e18).reservation)
        return chunk_hash

    for number in range(4):
        chunk_hash = put(number)
    for is_use in (True, False, True):
        core.release(core.acquire(1, namespace, chunk_hash, 1e18, is_use=is_use).lease)
    core.touch(namespace, chunk_hash)
    for number in range(4, 7):
        put(number)
    core.remove(namespace, chunk_hash)
    store.stats()

    def sample(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"lmcache_mp_{name}")

    assert sample("l1_chunk_reuse_gap_seconds_count") == 2 * rate
    assert sample("l1_chunk_lifetime_seconds_count") == sample("l1_chunk_idle_before_evict_seconds_count") == 3 * rate
    assert (
        0 <= (sample("l1_chunk_idle_before_evict_seconds_sum") or 0) <= (sample("l1_chunk_lifetime_seconds_sum") or 0)
    )
    assert (sample("l1_eviction_age_seconds") or 0) * 3 == pytest.approx(
        sample("l1_chunk_idle_before_evict_seconds_sum")
    )
    store.stats()
    assert sample("l1_chunk_lifetime_seconds_count") == 3 * rate


def test_a_sample_is_about_as_large_as_asked_for() -> None:
    core = L1Core(20_000 * 4096, 0, 4096, "LRU")
    core.set_committed(20_000 * 4096)
    core.set_age_sample_rate(0.1)
    namespace = bytes(32)
    hashes = os.urandom(32 * 20_000)
    core.commit(core.reserve(1, namespace, "", (4096).to_bytes(8, "little"), hashes, 1e18).reservation)
    core.evict(20_000 * 4096)
    ages = core.take_ages()
    assert 1500 < len(ages.lifetimes) == len(ages.idle_before_eviction) < 2500
    assert ages.reuse_gaps == []
    with pytest.raises(ValueError, match="from 0 to 1"):
        core.set_age_sample_rate(1.5)


def test_a_closed_l1_gives_its_memory_back_and_its_addresses_stay(name: str) -> None:
    """A thread that outlives L1 finds zeros, writes where nobody reads, and gets no signal."""
    store = L1Store.open(name, EPOCH, L1Options(8 * MIB, policy="LRU"))
    address, view = store.address_of(4096), store.memory.view(4096, 4096)
    store.close()
    del view
    with pytest.raises(ServerUnavailable):
        store.core.clear()
    assert ctypes.string_at(address, 4096) == bytes(4096)
    ctypes.memset(address, 1, 4096)
    assert name not in Path("/proc/self/maps").read_text()


def test_memory_in_use_keeps_its_bytes(name: str) -> None:
    store = L1Store.open(name, EPOCH, L1Options(8 * MIB, policy="LRU"))
    address = store.address_of(4096)
    ctypes.memset(address, 7, 4096)
    store.close(in_use=True)
    assert ctypes.string_at(address, 4096) == bytes([7]) * 4096
    assert not os.path.exists(store.memory.path)


def test_a_start_can_be_ended_while_memory_is_taken(name: str) -> None:
    class Enough(Exception):
        pass

    def checkpoint() -> None:
        if os.path.exists(f"/dev/shm/{name}"):
            raise Enough

    with pytest.raises(Enough):
        L1Store.open(name, EPOCH, L1Options(64 * MIB, policy="LRU"), checkpoint=checkpoint)
    assert not os.path.exists(f"/dev/shm/{name}")


def test_growth_that_is_stopped_before_it_sleeps_does_not_sleep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "L1_HEADROOM_BYTES", 0)
    woken, stops = threading.Event(), threading.Event()

    class Late(threading.Event):
        """Once `woken`, `stop` comes just before the event is cleared."""

        def set(self) -> None:
            super().set()
            if is_stopping:
                stops.set()

        def clear(self) -> None:
            if self.is_set():
                woken.set()
                stops.wait(DEADLINE_SECONDS)
            super().clear()

    is_stopping = False
    monkeypatch.setattr(growth, "threading", SimpleNamespace(Event=Late, Thread=threading.Thread))
    store = L1Store.open(name, EPOCH, L1Options(64 * MIB, policy="LRU", init_bytes=MIB))
    try:
        assert store.growth is not None
        until(lambda: store.stats()["committed_bytes"] == MIB)
        store.growth.note_left(-1)
        assert woken.wait(DEADLINE_SECONDS)
        is_stopping = True
        store.growth.stop()
        assert all(thread.name != "l1-grower" for thread in threading.enumerate())
    finally:
        store.close()
