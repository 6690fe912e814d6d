"""What an operation that is given up leaves behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from lmcache.clock import ManualClock
from lmcache.errors import AdapterError
from lmcache.l2.breaker import Breaker
from lmcache.l2.operations import Hold, Lane, Slots
from lmcache.telemetry.metrics import Metrics


def test_who_waited_in_vain_for_a_backend_that_hangs_is_forgotten() -> None:
    async def test() -> None:
        slots = Slots(1)
        assert await slots.acquire(0)
        now = asyncio.get_running_loop().time()
        assert not any(await asyncio.gather(*(slots.acquire(now + 0.01) for _ in range(1000))))
        given_up = [asyncio.ensure_future(slots.acquire(now + 60)) for _ in range(1000)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert not slots._waiting
        slots.release()
        assert await slots.acquire(0)

    asyncio.run(test())


def test_a_fault_that_nobody_waits_for_any_more_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        breaker = Breaker(ManualClock(), failures=5, open_seconds=1, max_open_seconds=1)
        lane = Lane("loads", "mock", 1, breaker, Metrics().timeouts)
        goes_on = asyncio.Event()
        released: list[bool] = []

        async def fail() -> None:
            await goes_on.wait()
            raise AdapterError("no connection")

        hold = Hold(lambda: released.append(True))
        asked = asyncio.ensure_future(lane.run(fail, hold, asyncio.get_running_loop().time() + 60))
        while not lane.running:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        hold.done()
        assert not released
        goes_on.set()
        while lane.running:
            await asyncio.sleep(0)
        assert released
        gc.collect()

    asyncio.run(test())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
