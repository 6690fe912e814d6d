"""Background tasks whose faults are logged, and blocking calls on daemon threads: one that hangs for ever (a dead
network mount) does not keep the process from ending."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lmcache.telemetry.logs import level_of

T = TypeVar("T")

log = logging.getLogger("lmcache.l2")


def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that is not awaited: a fault that ends it is logged."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.log(level_of(fault), "The task %s ended by a fault", name, exc_info=fault)

    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    task.add_done_callback(ended)
    return task


async def until_done(future: asyncio.Future[T]) -> T:
    """Ends when the future has ended and never before that, also when it is cancelled: until then what was lent to the
    work behind it is in use."""
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


async def in_thread(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """Runs the call on a daemon thread of its own. For rare work; a pool would join its threads when the interpreter
    exits."""
    return await begin_in_thread(name, call, *arguments)


def begin_in_thread(name: str, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """As `in_thread`, for who waits later. RuntimeError where the system has no thread to give."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            result = call(*arguments)
        except BaseException as error:  # the root of the thread: the awaiting side handles it
            fault = error
        try:
            loop.call_soon_threadsafe(settle, result, fault)
        except RuntimeError:
            pass  # the loop has been closed: nothing waits for the result

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
