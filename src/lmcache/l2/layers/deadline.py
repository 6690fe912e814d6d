"""Stops waiting for a call at its deadline. The call itself is never cancelled: it is abandoned until it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client import Counter

from lmcache.errors import AdapterError, DeadlineError
from lmcache.l2.layers.operation import Operation, Start, T

log = logging.getLogger("lmcache.l2")


class DeadlineLayer:
    def __init__(self, adapter_name: str, late: Counter) -> None:
        """`late` counts the calls that ran into their deadline."""
        self.running: set[asyncio.Task[Any]] = set()  # abandoned ones included
        self.abandoned = 0
        self._adapter_name = adapter_name
        self._late = late

    async def run(self, start: Start[T], operation: Operation) -> T:
        loop = asyncio.get_running_loop()
        lent = operation.lent
        lent.add_user()
        task = loop.create_task(start())
        self.running.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self.running.discard(task)
            lent.done()
            if not task.cancelled():
                task.exception()  # seen: the caller may have been cancelled

        task.add_done_callback(ended)
        done, _ = await asyncio.wait({task}, timeout=max(0.0, operation.deadline - loop.time()))
        if not done:
            self.abandoned += 1
            self._late.inc()
            task.add_done_callback(self._came_late)
            raise DeadlineError(f"{self._adapter_name}: an operation did not end within its deadline")
        try:
            return task.result()
        except AdapterError:
            raise
        except Exception as error:  # the root of an operation: an adapter's defect must not end a controller
            log.exception("%s: unexpected fault", self._adapter_name)
            raise AdapterError(f"{self._adapter_name}: {type(error).__name__}: {error}") from error

    def _came_late(self, task: asyncio.Task[Any]) -> None:
        self.abandoned -= 1
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s: an abandoned operation failed: %s", self._adapter_name, task.exception())
