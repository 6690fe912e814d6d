"""The runner over an adapter whose faults the test decides. Breakers follow a clock that the test moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from lmcache.core import limits
from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, CapacityError, ResourceError
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.l2.layers import eviction
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys
from manual_clock import ManualClock
from polling import STALL_SECONDS
from support.faults import FaultyAdapter
from unit.l2.support import eviction_order

SHORT_SECONDS = 0.05


class Bench:
    def __init__(self, **spec: Any) -> None:
        whole = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000, **spec}
        configured = build(parse_adapter(whole, 0))
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.adapter = FaultyAdapter(configured.adapter)
        self.runner = Runner(ConfiguredAdapter(configured.config, self.adapter), self.metrics.l2, self.clock)
        self.released = 0
        self.memory = FrameMemory(8)

    def release(self) -> None:
        self.released += 1

    def be_impatient(self) -> None:
        """From now on: what a test needs before it may take its time."""
        self.runner.context.config = replace(self.runner.context.config, timeout_seconds=SHORT_SECONDS)

    async def store(self, count: int = 8, seed: int = 0) -> list[StoreOutcome]:
        wanted = keys(count, seed)
        buffers = [self.memory.fill(i, key) for i, key in enumerate(wanted)]
        return await self.runner.store(wanted, buffers, self.release)

    async def load(self, count: int = 8, seed: int = 0) -> list[LoadOutcome]:
        return await self.runner.load(keys(count, seed), self.memory.buffers[:count], self.release)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"lmcache_mp_{name}", labels)


def run(test: Callable[[Bench], Awaitable[None]], **spec: Any) -> None:
    async def whole() -> None:
        bench = Bench(**spec)
        await bench.runner.open()
        await test(bench)
        bench.adapter.gate.set()
        assert await bench.runner.drain(5)
        bench.runner.check_idle()
        assert await bench.runner.close(5)

    asyncio.run(whole())


def capacity_gb(frames: float) -> dict[str, float]:
    return {"max_capacity_gb": frames * FrameMemory(1).slot_bytes / GIB}


LRU = {"eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.5, "eviction_ratio": 0.25}}


@pytest.mark.parametrize("operation", ["store", "load"])
def test_a_late_operation_keeps_its_buffers_until_it_ends(operation: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.store()
        bench.runner.lost(keys(8))
        bench.adapter.gate.clear()
        bench.be_impatient()
        act = bench.store if operation == "store" else bench.load
        assert {outcome.name for outcome in await act()} == {"FAILED"}
        assert bench.sample("timeouts_total") == 1
        assert (bench.released, bench.adapter.stalled) == (1, 1)
        assert bench.runner.status()["abandoned"] == 1
        assert not await bench.runner.drain(0.01)
        bench.adapter.gate.set()
        assert await bench.runner.drain(5)
        await asyncio.sleep(0)
        assert bench.released == 2
        assert bench.runner.status()["abandoned"] == 0

    run(test)


def test_stuck_operations_do_not_pile_up() -> None:
    async def test(bench: Bench) -> None:
        bench.adapter.gate.clear()
        bench.be_impatient()
        await asyncio.gather(*(bench.load(seed=seed) for seed in range(3 * limits.L2_MAX_READS_IN_FLIGHT)))
        assert bench.adapter.stalled == limits.L2_MAX_READS_IN_FLIGHT
        assert bench.runner.status()["loads_suspended"] and not bench.runner.status()["stores_suspended"]
        assert bench.released == 2 * limits.L2_MAX_READS_IN_FLIGHT  # those that never began

    run(test)


def test_what_may_be_tried_again_is() -> None:
    async def test(bench: Bench) -> None:
        bench.adapter.raises = AdapterError("hiccup", retryable=True)
        asyncio.get_running_loop().call_later(0.01, setattr, bench.adapter, "raises", None)
        assert await bench.store() == [StoreOutcome.STORED] * 8
        assert bench.adapter.calls["store"] == 2
        bench.adapter.raises = AdapterError("no")
        assert await bench.load() == [LoadOutcome.FAILED] * 8
        assert bench.adapter.calls["load"] == 1
        bench.adapter.raises = None
        bench.adapter.load_outcome = LoadOutcome.FAILED
        assert await bench.load() == [LoadOutcome.FAILED] * 8
        assert bench.adapter.calls["load"] == 2 + limits.L2_RETRIES
        assert bench.released == 3

    run(test)


def test_a_failing_backend_is_left_alone_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        await bench.store()
        bench.adapter.raises = ZeroDivisionError("a defect of the adapter")
        caplog.clear()
        for _ in range(limits.L2_BREAKER_FAILURES + 20):
            assert await bench.load() == [LoadOutcome.FAILED] * 8
        assert bench.adapter.calls["load"] == limits.L2_BREAKER_FAILURES
        assert bench.sample("l2_breaker_open", l2_name="mock_0") == 1
        assert (await bench.runner.probe(keys(8))) == [True] * 8  # known, without asking
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        await bench.load()  # begins a trial, which fails: open for twice as long
        await asyncio.gather(*bench.runner.layers.loads.breaker.trials)
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        await bench.load()
        assert not bench.runner.layers.loads.breaker.trials
        assert bench.adapter.calls["load"] == limits.L2_BREAKER_FAILURES + 1
        bench.adapter.raises = None
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        assert await bench.load() == [LoadOutcome.FAILED] * 8  # nobody waits for the trial
        await asyncio.gather(*bench.runner.layers.loads.breaker.trials)
        assert await bench.load() == [LoadOutcome.LOADED] * 8
        assert await bench.load() == [LoadOutcome.LOADED] * 8
        said = [
            record.message for record in caplog.records if "suspended" in record.message or "go on" in record.message
        ]
        assert len(said) == 2 and "a defect of the adapter" in said[0]

    caplog.set_level(logging.INFO, "lmcache.l2")
    run(test)


def test_a_full_backend_is_a_state_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        await bench.store(seed=1)
        bench.adapter.store_outcome = StoreOutcome.FULL
        for seed in range(2, 6):
            assert await bench.store(seed=seed) == [StoreOutcome.FULL] * 8
        assert bench.adapter.calls["store"] == 2
        assert bench.sample("l2_full_total", l2_name="mock_0") == 4 * 8
        assert await bench.load(seed=1) == [LoadOutcome.LOADED] * 8  # served on
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        bench.adapter.store_outcome = None
        bench.adapter.raises = CapacityError("full in another way")
        assert await bench.store(seed=6) == [StoreOutcome.FULL] * 8
        assert bench.runner.status()["full"] and not bench.runner.status()["stores_suspended"]
        bench.adapter.raises = None
        bench.clock.advance(2 * limits.L2_BREAKER_OPEN_SECONDS)
        assert await bench.store(seed=7) == [StoreOutcome.STORED] * 8
        said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1 and "no space left" in said[0]
        assert sum("has room again" in record.message for record in caplog.records) == 1

    caplog.set_level(logging.INFO, "lmcache.l2")
    run(test)


def test_the_capacity_is_never_exceeded() -> None:
    async def test(bench: Bench) -> None:
        assert await bench.store(8, seed=1) == [StoreOutcome.STORED] * 8
        assert await bench.store(8, seed=2) == [StoreOutcome.STORED] * 2 + [StoreOutcome.FULL] * 6
        assert await bench.store(8, seed=1) == [StoreOutcome.ALREADY_THERE] * 8
        assert len(bench.adapter.inner.objects) == 10
        await bench.runner.clear()
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        assert await bench.store(8, seed=3) == [StoreOutcome.STORED] * 8

    run(test, **capacity_gb(10.5))


def test_stores_that_run_together_share_the_capacity() -> None:
    async def test(bench: Bench) -> None:
        outcomes = await asyncio.gather(*(bench.store(4, seed=seed) for seed in range(5)))
        assert sum(outcome is StoreOutcome.STORED for batch in outcomes for outcome in batch) == 10

    run(test, **capacity_gb(10))


def test_a_store_that_nobody_waits_for_any_more_is_counted_when_it_ends() -> None:
    async def test(bench: Bench) -> None:
        bench.adapter.gate.clear()
        bench.be_impatient()
        assert await bench.store(6, seed=1) == [StoreOutcome.FAILED] * 6
        assert bench.runner.ledger.stats().reserved_bytes == 6 * bench.memory.slot_bytes
        bench.runner.context.config = replace(bench.runner.context.config, timeout_seconds=30)
        bench.adapter.gate.set()
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        outcomes = await bench.store(6, seed=2)
        assert outcomes == [StoreOutcome.STORED] * 4 + [StoreOutcome.FULL] * 2
        assert await bench.runner.drain(5)
        await asyncio.sleep(0)
        assert bench.runner.ledger.used_bytes == 10 * bench.memory.slot_bytes
        assert len(bench.adapter.inner.objects) == 10

    run(test, **capacity_gb(10))


def test_what_is_being_read_is_no_victim() -> None:
    async def test(bench: Bench) -> None:
        await bench.store(4, seed=1)
        await bench.store(4, seed=2)
        bench.adapter.gate.clear()
        bench.be_impatient()
        assert await bench.load(4, seed=1) == [LoadOutcome.FAILED] * 4  # it goes on in the background
        assert eviction_order(bench.runner.ledger) == keys(4, 2)[::-1]
        bench.adapter.gate.set()
        assert await bench.runner.drain(5)
        await asyncio.sleep(0)
        assert len(eviction_order(bench.runner.ledger)) == 8

    run(test, **capacity_gb(10), **LRU)


def test_what_is_being_evicted_is_stored_anew() -> None:
    async def test(bench: Bench) -> None:
        await bench.store(4)
        bench.adapter.stalls = {"delete"}
        bench.adapter.gate.clear()
        evicting = asyncio.create_task(bench.runner.layers.eviction.evict(1 << 30))
        while not bench.adapter.stalled:
            await asyncio.sleep(0)
        assert await bench.load(4) == [LoadOutcome.LOADED] * 4, "until it is gone it is served"
        storing = asyncio.create_task(bench.store(4))
        await asyncio.sleep(0)
        bench.adapter.gate.set()
        assert (await evicting).objects == 4
        assert await storing == [StoreOutcome.STORED] * 4
        assert await bench.load(4) == [LoadOutcome.LOADED] * 4

    run(test, **capacity_gb(10), **LRU)


def test_a_store_waits_for_the_deletion_of_its_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "DELETE_SLICE_OBJECTS", 4)

    async def test(bench: Bench) -> None:
        await bench.store(4, seed=1)
        await bench.store(4, seed=2)
        bench.adapter.stalls = {"delete"}
        bench.adapter.gate.clear()
        evicting = asyncio.create_task(bench.runner.layers.eviction.evict(8 * bench.memory.slot_bytes))
        while not bench.adapter.stalled:
            await asyncio.sleep(0)
        storing = asyncio.create_task(bench.store(4, seed=1))
        await asyncio.sleep(0)
        bench.adapter.gate.set()
        bench.adapter.gate.clear()
        assert await asyncio.wait_for(storing, 5) == [StoreOutcome.STORED] * 4
        assert not evicting.done(), "another four are still being deleted"
        bench.adapter.gate.set()
        assert (await evicting).objects == 8

    run(test, **capacity_gb(20), **LRU)


def test_no_victims_are_chosen_in_vain_for_a_suspended_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "DELETE_SLICE_OBJECTS", 1)

    async def test(bench: Bench) -> None:
        await bench.store(8)
        victims = Mock(wraps=bench.runner.ledger.victims)
        monkeypatch.setattr(bench.runner.ledger, "victims", victims)
        bench.adapter.raises = AdapterError("unplugged")
        for calls in (limits.L2_BREAKER_FAILURES, limits.L2_BREAKER_FAILURES + 1):
            assert await bench.runner.layers.eviction.evict(1 << 30) == (0, 0)
            assert victims.call_count == calls
        assert bench.adapter.calls["delete"] == limits.L2_BREAKER_FAILURES
        bench.adapter.raises = None
        bench.clock.advance(limits.L2_BREAKER_OPEN_SECONDS)
        assert (await bench.runner.layers.eviction.evict(1 << 30)).objects == 8

    run(test, **capacity_gb(10), **LRU)


def test_what_a_scan_found_before_it_was_cleared_is_gone() -> None:
    async def test(bench: Bench) -> None:
        clear = bench.adapter.inner.clear

        async def clear_during_a_scan() -> tuple[int, int]:
            bench.runner.found([(key, bench.memory.slot_bytes) for key in keys(6)])  # two are of another server
            return await clear()

        bench.adapter.inner.clear = clear_during_a_scan
        await bench.store(4)
        assert await bench.runner.clear() == (4, 4 * bench.memory.slot_bytes)
        assert bench.runner.ledger.known(keys(6)) == [False] * 6
        assert await bench.store(4) == [StoreOutcome.STORED] * 4

    run(test, **capacity_gb(10), **LRU)


def test_room_is_made_when_asked() -> None:
    async def test(bench: Bench) -> None:
        for seed in range(4):
            assert await bench.store(4, seed=seed) == [StoreOutcome.STORED] * 4
            await bench.load(1, seed=0)
        kept = [await bench.runner.probe(keys(4, seed)) for seed in range(4)]
        assert kept == [[True, False, False, False], [True, False, False, False], [True] * 4, [True] * 4]
        assert bench.sample("l2_evicted_objects_total", l2_name="mock_0") == 6

    run(test, **capacity_gb(10), **LRU)


def test_the_watermark() -> None:
    async def test(bench: Bench) -> None:
        await bench.store(8, seed=1)
        assert await bench.runner.layers.eviction.evict_above_watermark() == (0, 0)
        await bench.store(4, seed=2)
        objects, freed_bytes = await bench.runner.layers.eviction.evict_above_watermark()
        assert (objects, freed_bytes) == (3, 3 * bench.memory.slot_bytes)
        assert await bench.runner.probe(keys(8, 1)) == [True] * 5 + [False] * 3
        assert await bench.runner.layers.eviction.evict_above_watermark() == (0, 0)

    run(test, **capacity_gb(20), **LRU)


def test_a_medium_smaller_than_the_capacity_makes_room_too() -> None:
    async def test(bench: Bench) -> None:
        await bench.store(8, seed=1)
        bench.adapter.store_outcome = StoreOutcome.FULL
        delete = bench.adapter.inner.delete

        async def delete_and_have_room(*arguments: Any, **options: Any) -> list[bool]:
            bench.adapter.store_outcome = None
            return await delete(*arguments, **options)

        bench.adapter.inner.delete = delete_and_have_room
        assert await bench.store(2, seed=2) == [StoreOutcome.STORED] * 2
        assert not bench.runner.status()["full"]

    run(test, **capacity_gb(100), **LRU)


def test_what_found_no_room_is_full_also_when_it_cannot_be_tried_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.store(8, seed=1)
        bench.adapter.store_outcome = StoreOutcome.FULL
        delete = bench.adapter.inner.delete

        async def delete_and_break(*arguments: Any, **options: Any) -> list[bool]:
            bench.adapter.raises = AdapterError("no connection")
            return await delete(*arguments, **options)

        bench.adapter.inner.delete = delete_and_break
        assert await bench.store(2, seed=2) == [StoreOutcome.FULL] * 2
        assert bench.runner.status()["full"] and bench.sample("l2_full_total", l2_name="mock_0") == 2

    run(test, **capacity_gb(100), **LRU)


def test_bounded_stores_wait_for_the_inventory() -> None:
    async def whole() -> None:
        bench = Bench(**capacity_gb(10))
        opened: list[Runner] = []

        async def open_silently(inventory: Any) -> None:
            opened.append(inventory)

        bench.adapter.inner.open = open_silently
        await bench.runner.open()
        patient = bench.runner.config
        bench.be_impatient()
        assert await bench.store() == [StoreOutcome.FAILED] * 8
        assert bench.adapter.calls["store"] == 0
        bench.runner.context.config = patient
        asyncio.get_running_loop().call_later(0.01, opened[0].complete)
        assert await bench.store() == [StoreOutcome.STORED] * 8

    asyncio.run(whole())


def test_a_backend_that_does_not_open_is_refused() -> None:
    async def whole() -> None:
        bench = Bench(timeout_seconds=SHORT_SECONDS)

        async def hang(inventory: Any) -> None:
            await asyncio.Event().wait()

        bench.adapter.inner.open = hang
        with pytest.raises(ResourceError, match=r"--l2-adapter 1 \(mock\): the backend did not answer within 0.05 s"):
            await bench.runner.open()

    asyncio.run(whole())


def test_corrupt_objects_are_counted_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        await bench.store()
        await bench.runner.corrupted(keys(3), "payload checksum")
        assert await bench.runner.probe(keys(4)) == [False] * 3 + [True]
        assert bench.sample("corrupt_frames_total", tier="l2") == 3
        said = [record.message for record in caplog.records if "corrupt" in record.message]
        assert said == [
            f"mock_0: 3 corrupt objects moved aside, the first: {keys(1)[0].chunk_hash.hex()} (payload checksum)"
        ]

    run(test)


def test_objects_that_are_not_to_persist_go_at_the_end() -> None:
    async def whole() -> None:
        bench = Bench(persist_enabled=False)
        await bench.runner.open()
        await bench.store()
        assert await bench.runner.drain(1) and await bench.runner.close(5)
        assert bench.adapter.inner.objects == {}
        assert await bench.store() == [StoreOutcome.FAILED] * 8  # drained

    asyncio.run(whole())


def test_an_empty_backend_is_not_asked_to_delete_nothing() -> None:
    async def whole() -> None:
        bench = Bench(persist_enabled=False)
        await bench.runner.open()
        assert await bench.runner.drain(1) and await bench.runner.close(5)
        assert bench.adapter.calls["delete"] == 0

    asyncio.run(whole())


def test_what_cannot_be_deleted_in_time_at_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def whole() -> None:
        bench = Bench(persist_enabled=False)
        await bench.runner.open()
        await bench.store()
        never = asyncio.Event()

        async def delete(wanted: Any, **_: Any) -> list[bool]:
            await never.wait()
            return [True] * len(wanted)

        bench.adapter.delete = delete
        assert await bench.runner.drain(1)
        loop = asyncio.get_running_loop()
        started = loop.time()
        with caplog.at_level(logging.WARNING, logger="lmcache.l2"):
            assert await bench.runner.close(0.4)
        assert loop.time() - started < 5 + STALL_SECONDS
        never.set()

    asyncio.run(whole())
    assert "8 of 8 objects were not deleted" in caplog.text
