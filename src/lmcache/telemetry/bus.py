"""Carries events from the threads where they happen to a thread where there is time for them.

Invariant: publishing never waits and never fails. A full queue drops the newest event and counts it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from lmcache.telemetry.events import Event
from lmcache.telemetry.metrics import Metrics

logger = logging.getLogger("lmcache.telemetry")

_STOP_SECONDS = 5.0


class Subscriber(Protocol):
    @property
    def name(self) -> str: ...

    def handle(self, events: Sequence[Event]) -> None:
        """On the bus thread. A fault loses these events for this subscriber, is logged and counted."""
        ...

    def close(self) -> None: ...


class EventBus:
    """Without subscribers it has no thread, and `active` tells publishers not to make events at all."""

    def __init__(self, subscribers: Sequence[Subscriber], queue_size: int, metrics: Metrics) -> None:
        self.active = bool(subscribers)
        self._subscribers = list(subscribers)
        self._queue_size = queue_size
        self._queue: deque[Event] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._dropped = metrics.event_bus_dropped_events
        self._exceptions = metrics.event_bus_subscriber_exceptions
        metrics.event_bus_queue_depth.set_function(lambda: len(self._queue))
        self._thread = threading.Thread(target=self._run, name="lmcache-events", daemon=True)

    def start(self) -> None:
        if self.active:
            self._thread.start()

    def publish(self, event: Event) -> None:
        """Any thread."""
        if not self.active:
            return
        if len(self._queue) >= self._queue_size:
            self._dropped.inc()
            return
        self._queue.append(event)
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        """Hands over what is queued, then closes the subscribers. Idempotent."""
        self.active = False
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        while self._subscribers:
            self._subscribers.pop().close()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            self._hand_over()
        self._hand_over()

    def _hand_over(self) -> None:
        events = [self._queue.popleft() for _ in range(len(self._queue))]
        if not events:
            return
        for subscriber in self._subscribers:
            try:
                subscriber.handle(events)
            except Exception:
                self._exceptions.labels(subscriber.name).inc()
                logger.exception("%s failed; %d events are lost to it", subscriber.name, len(events))
