"""Carries events from the threads where they happen to the subscribers' thread.

Invariant: publishing never waits and never fails. A full queue drops the newest event and counts it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from lmcache.telemetry.batch_queue import BatchQueue
from lmcache.telemetry.events import LookupEvent
from lmcache.telemetry.metrics import EventBusMetrics

logger = logging.getLogger("lmcache.telemetry")

_STOP_SECONDS = 5.0


class Subscriber(Protocol):
    @property
    def name(self) -> str: ...

    def handle(self, events: Sequence[LookupEvent]) -> None:
        """On the bus thread. A fault loses these events for this subscriber, is logged and counted."""
        ...

    def close(self) -> None: ...


class EventBus:
    """Without subscribers it has no thread, and `active` tells publishers not to make events at all."""

    def __init__(self, subscribers: Sequence[Subscriber], queue_size: int, metrics: EventBusMetrics) -> None:
        self.active = bool(subscribers)
        self._subscribers = list(subscribers)
        self._queue: BatchQueue[LookupEvent] = BatchQueue(self._hand_over, queue_size, "lmcache-events")
        self._dropped = metrics.event_bus_dropped_events
        self._exceptions = metrics.event_bus_subscriber_exceptions
        metrics.event_bus_queue_depth.set_function(lambda: len(self._queue))

    def start(self) -> None:
        if self.active:
            self._queue.start()

    def publish(self, event: LookupEvent) -> None:
        """Any thread."""
        if self.active and not self._queue.put(event):
            self._dropped.inc()

    def stop(self) -> None:
        """Hands over what is queued, then closes the subscribers. Idempotent."""
        self.active = False
        self._queue.stop(_STOP_SECONDS)
        while self._subscribers:
            self._subscribers.pop().close()

    def _hand_over(self, events: list[LookupEvent], dropped: int) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber.handle(events)
            except Exception:
                self._exceptions.labels(subscriber.name).inc()
                logger.exception("%s failed; %d events are lost to it", subscriber.name, len(events))
