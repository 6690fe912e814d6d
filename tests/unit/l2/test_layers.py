"""Each layer by itself: what it passes on and keeps back, and that an operation that is given up leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Sequence

import pytest

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.l2.circuit_breaker import CircuitBreaker
from lmcache.l2.layers.breaker import BreakerLayer
from lmcache.l2.layers.concurrency_limit import ConcurrencyLimit
from lmcache.l2.layers.deadline import DeadlineLayer
from lmcache.l2.layers.operation import Batch, Operation, SharedRelease
from lmcache.l2.layers.retries import RetryLayer
from lmcache.l2.runner import Runner
from lmcache.l2.turns import Turns
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import FrameMemory, keys
from manual_clock import ManualClock
from support.faults import FaultyAdapter
from support.held_items import held_items


def test_who_waited_in_vain_for_a_backend_that_hangs_is_forgotten() -> None:
    async def test() -> None:
        turns = Turns(1)
        assert await turns.acquire(0)
        now = asyncio.get_running_loop().time()
        assert not any(await asyncio.gather(*(turns.acquire(now + 0.01) for _ in range(1000))))
        given_up = [asyncio.ensure_future(turns.acquire(now + 60)) for _ in range(1000)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert not held_items(turns, "lmcache.l2.turns")
        turns.release()
        assert await turns.acquire(0)

    asyncio.run(test())


def test_nobody_gets_a_turn_after_the_end() -> None:
    async def test() -> None:
        turns = Turns(1)
        deadline = asyncio.get_running_loop().time() + 3600
        assert await turns.acquire(deadline)
        waiting = [asyncio.ensure_future(turns.acquire(deadline)) for _ in range(3)]
        await asyncio.sleep(0)
        turns.end()
        assert await asyncio.gather(*waiting) == [False] * 3
        turns.release()
        assert not await turns.acquire(deadline)

    asyncio.run(test())


def test_a_fault_that_nobody_waits_for_any_more_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        deadline = DeadlineLayer("mock", Metrics().l2.timeouts)
        limit = ConcurrencyLimit("mock", 1, deadline)
        circuit = CircuitBreaker(ManualClock(), failures=5, open_seconds=1, max_open_seconds=1)
        breaker = BreakerLayer("loads", "mock", circuit, lambda: None, limit)
        goes_on = asyncio.Event()
        released: list[bool] = []

        async def fail() -> None:
            await goes_on.wait()
            raise AdapterError("no connection")

        lent = SharedRelease(lambda: released.append(True))
        asked = asyncio.ensure_future(breaker.run(fail, Operation(asyncio.get_running_loop().time() + 60, lent)))
        while not deadline.running:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        lent.done()
        assert not released
        goes_on.set()
        while deadline.running:
            await asyncio.sleep(0)
        assert released
        gc.collect()

    asyncio.run(test())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_what_was_lent_is_given_back_once_by_the_last_user_in_the_opposite_order() -> None:
    released: list[str] = []
    lent = SharedRelease(lambda: released.append("buffers"))
    lent.on_release(lambda: released.append("room"))
    lent.add_user()
    lent.done()
    assert not released
    lent.done()
    assert released == ["room", "buffers"]


def soon(seconds: float = 60, **options: object) -> Operation:
    return Operation(asyncio.get_running_loop().time() + seconds, **options)  # type: ignore[arg-type]


def test_while_loads_are_suspended_a_trial_runs_that_the_caller_does_not_wait_for() -> None:
    async def test() -> None:
        clock, changes = ManualClock(), []
        circuit = CircuitBreaker(clock, failures=1, open_seconds=5, max_open_seconds=5)
        breaker = BreakerLayer(
            "loads", "mock", circuit, lambda: changes.append(1), DeadlineLayer("mock", Metrics().l2.timeouts)
        )
        ran: list[str] = []

        async def load() -> None:
            ran.append("load")
            raise AdapterError("no connection")

        async def trial() -> None:
            ran.append("trial")

        with pytest.raises(AdapterError, match="no connection"):
            await breaker.run(load, soon(trial=trial))
        for _ in range(3):
            with pytest.raises(AdapterError, match="mock: loads are suspended after faults"):
                await breaker.run(load, soon(trial=trial))
        assert ran == ["load"] and breaker.is_suspended and len(changes) == 1
        await breaker.run(trial, soon(forced=True))
        assert breaker.is_suspended  # that somebody insisted and it went well proves nothing about the rest
        clock.advance(5)
        with pytest.raises(AdapterError, match="suspended"):
            await breaker.run(load, soon(trial=trial))
        await asyncio.gather(*breaker.trials)
        assert ran == ["load", "trial", "trial"] and not breaker.is_suspended and len(changes) == 2

    asyncio.run(test())


def test_only_what_failed_is_tried_again_and_only_while_there_is_time() -> None:
    async def test() -> None:
        retries = RetryLayer(random.Random(1), DeadlineLayer("mock", Metrics().l2.timeouts))
        asked: list[list[ObjectKey]] = []

        async def load(wanted: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
            assert len(buffers) == len(wanted)
            asked.append(list(wanted))
            return [LoadOutcome.LOADED if key != keys(3)[1] else LoadOutcome.FAILED for key in wanted]

        batch = Batch(keys(3), FrameMemory(3).buffers)
        expected = [LoadOutcome.LOADED, LoadOutcome.FAILED, LoadOutcome.LOADED]
        assert await retries.run_batch(load, batch, LoadOutcome.FAILED, soon()) == expected
        assert asked == [keys(3)] + limits.L2_RETRIES * [[keys(3)[1]]]
        asked.clear()
        no_time = soon(limits.L2_RETRY_BACKOFF_SECONDS / 2)
        assert await retries.run_batch(load, batch, LoadOutcome.FAILED, no_time) == expected
        assert asked == [keys(3)]
        nothing = await retries.run_batch(load, Batch([], []), LoadOutcome.FAILED, soon())
        assert (nothing, len(asked)) == ([], 1)

    asyncio.run(test())


@pytest.mark.parametrize("waits_for", ["its turn", "another try"])
def test_no_load_begins_once_an_adapter_is_drained(waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write into memory that is lent no more, through an adapter that is closed."""
    monkeypatch.setattr(limits, "L2_MAX_READS_IN_FLIGHT", 2)
    monkeypatch.setattr(limits, "L2_RETRY_BACKOFF_SECONDS", 0.05)

    async def test() -> None:
        configured = build(parse_adapter({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}, 0))
        adapter = FaultyAdapter(configured.adapter)
        runner = Runner(ConfiguredAdapter(configured.config, adapter), Metrics().l2, ManualClock())
        await runner.open()
        memory = FrameMemory(4)
        if waits_for == "its turn":
            adapter.gate.clear()
        else:
            adapter.load_outcome = LoadOutcome.FAILED
        loads = [
            asyncio.ensure_future(runner.load([key], [memory.buffers[slot]], lambda: None))
            for slot, key in enumerate(keys(4))
        ]
        while adapter.calls["load"] < (2 if waits_for == "its turn" else 4):
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(runner.drain(10))
        await asyncio.sleep(0)
        adapter.gate.set()
        assert await draining
        begun = adapter.calls["load"]
        outcomes = [outcome for [outcome] in await asyncio.gather(*loads)]
        assert adapter.calls["load"] == begun and LoadOutcome.FAILED in outcomes

    asyncio.run(asyncio.wait_for(test(), 30))
