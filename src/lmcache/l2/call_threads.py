"""Blocking calls of a library on a few threads of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from lmcache.errors import AdapterError
from lmcache.l2.background import in_thread

T = TypeVar("T")


class _Uncancelled(asyncio.Future[T]):
    """A task that is cancelled while it waits for this ends when this has its result, and not before."""

    def cancel(self, msg: Any | None = None) -> bool:
        return False


class CallThreads:
    """Construct on the loop that uses it. Threads start when calls need them, and are daemons: one that hangs in a call
    does not keep the process from ending."""

    def __init__(self, name: str, most: int, at_end: Callable[[], None] | None = None) -> None:
        """At most so many threads; further calls wait. `at_end` is called on each thread, as its last call."""
        self._name = name
        self._most = most
        self._at_end = at_end
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0  # calls
        self._is_closed = False

    async def run(self, call: Callable[[], T]) -> T:
        """Ends when the call has ended and never before that, also when it is cancelled: until then what `call` was
        lent is in use."""
        if self._is_closed:
            raise AdapterError("the adapter is closed")
        future: _Uncancelled[T] = _Uncancelled(loop=self._loop)
        self._under_way += 1
        try:
            if len(self._threads) < min(self._under_way, self._most):
                self._start_one_more()
            self._jobs.put(partial(self._call, call, future))
            return await future
        finally:
            self._under_way -= 1

    async def close(self) -> None:
        """Waits for everything that was begun. Idempotent."""
        self._is_closed = True
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        if threads:
            await in_thread("l2-close", _join, threads)

    def _start_one_more(self) -> None:
        """Where the system has none to give, calls wait for those that there are. RuntimeError when there is none."""
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _call(self, call: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            settle = partial(future.set_result, call())
        except BaseException as error:  # the awaiting side handles it
            settle = partial(future.set_exception, error)
        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the loop has been closed: nothing waits for the result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self._at_end is not None:
            self._at_end()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
