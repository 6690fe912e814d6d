"""Carries items from the threads where they come up to a thread that has time for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("lmcache.telemetry")

T = TypeVar("T")


class BatchQueue(Generic[T]):
    """Invariant: `put` never waits for what handles the items. When `limit` items wait, a new one is dropped."""

    def __init__(
        self,
        handle: Callable[[list[T], int], object],
        limit: int,
        thread_name: str,
        *,
        logs_faults: bool = True,
    ) -> None:
        """`handle` runs on the queue's thread. It gets all that wait, in order, and how many were dropped since the
        batch before. A batch for which it raises counts as dropped. `logs_faults`: False where `handle` writes the
        log, to which each fault would add a line."""
        self._handle = handle
        self._limit = limit
        self._thread_name = thread_name
        self._logs_faults = logs_faults
        self._items: list[T] = []
        self._dropped = 0
        self._handling = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """False when it was dropped. Any thread."""
        with self._changed:
            if len(self._items) >= self._limit:
                self._dropped += 1
                return False
            self._items.append(item)
            if len(self._items) == 1:  # who waits for the end of the queue is told by its thread
                self._changed.notify_all()
        return True

    def drain(self, seconds: float) -> bool:
        """Waits until all that was put before is handled; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._items or self._handling), seconds)

    def stop(self, seconds: float) -> None:
        """Handles what waits and ends the thread, or gives up after that time. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._stopping)
                if not self._items:
                    return
                items, self._items = self._items, []
                dropped, self._dropped = self._dropped, 0
                self._handling = True
            lost = self._lost(items, dropped)
            with self._changed:
                self._dropped += lost
                self._handling = False
                self._changed.notify_all()

    def _lost(self, items: list[T], dropped: int) -> int:
        """How many items the handler has not handled, or not been told of."""
        count = len(items)
        try:
            self._handle(items, dropped)
        except Exception:  # the root of the thread: what comes next is handled all the same
            if self._logs_faults:
                log.exception("%d items of the thread %s were lost", count, self._thread_name)
            return count + dropped
        return 0
