"""Blocking calls on a few threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lmcache.l2.call_threads import CallThreads
from unit.l2.support import run

WAIT_SECONDS = 60.0


def test_calls_wait_for_the_threads_that_there_are_where_no_more_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        threads = CallThreads("calls", 2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                await threads.run(lambda: 1)
        first = asyncio.ensure_future(threads.run(lambda: may_end.wait(WAIT_SECONDS)))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            second = asyncio.ensure_future(threads.run(lambda: 2))
            await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.wait_for(first, WAIT_SECONDS)
        assert await asyncio.wait_for(second, WAIT_SECONDS) == 2
        await threads.close()

    run(test)


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_call_ends_when_it_has_ended(fails: bool) -> None:
    may_end = threading.Event()

    def call() -> None:
        may_end.wait(WAIT_SECONDS)
        if fails:
            raise OSError("it failed, too")

    async def test() -> None:
        threads = CallThreads("calls", 1)
        waiting = asyncio.ensure_future(threads.run(call))
        await asyncio.sleep(0)
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
            assert not waiting.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await threads.close()

    run(test)
