"""Threads with a NIXL agent each: transfers are posted and polled there, one at a time an agent, never on the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapters.nixl_agent import Agent, AgentSettings
from lmcache.l2.background import in_thread

T = TypeVar("T")

READ_LANES = 2  # while the transfer of one agent ends, another's has begun
WRITE_LANES = 1

Job = Callable[[Callable[[], Agent]], None]  # gets what gives the agent of the thread


class Lanes:
    """Construct on the loop that uses it. Threads are daemons: one that hangs in a backend does not keep the process
    from ending."""

    def __init__(self, name: str, settings: AgentSettings, lanes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{at}", daemon=True) for at in range(lanes)]
        for thread in self._threads:
            thread.start()

    async def open(self) -> None:
        """ResourceError where the backend cannot be used."""
        await self.open_with(lambda _: None)

    async def open_with(self, call: Callable[[Agent], T]) -> T:
        """As `run`, but for ResourceErrors, which pass."""
        return await self._run_job(call)

    async def run(self, call: Callable[[Agent], T]) -> T:
        """Calls it on one of the threads. Ends when the call has ended and never before that, also when it is
        cancelled: until then what `call` was lent is in use. AdapterError where the backend does not open again."""
        try:
            return await self._run_job(call)
        except ResourceError as error:
            raise AdapterError(str(error), retryable=True) from None

    async def close(self) -> None:
        """Waits for everything that was begun. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        if threads:
            await in_thread("l2-close", _join, threads)

    async def _run_job(self, call: Callable[[Agent], T]) -> T:
        if not self._threads:
            raise AdapterError("the adapter is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(partial(self._call, call, future))
        was_cancelled = False
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                was_cancelled = True
        if was_cancelled:
            future.exception()  # seen
            raise asyncio.CancelledError
        return future.result()

    def _call(self, call: Callable[[Agent], T], future: asyncio.Future[T], agent: Callable[[], Agent]) -> None:
        try:
            settle = partial(future.set_result, call(agent()))
        except BaseException as error:  # the awaiting side handles it
            settle = partial(future.set_exception, error)
        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the loop has been closed: nothing waits for the result

    def _run(self) -> None:
        agent: Agent | None = None

        def usable() -> Agent:
            nonlocal agent
            if agent is None or not agent.is_open:
                agent = Agent(self._settings)
            return agent

        while (job := self._jobs.get()) is not None:
            job(usable)
        if agent is not None:
            agent.close()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
