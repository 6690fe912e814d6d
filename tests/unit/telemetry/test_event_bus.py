from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache.telemetry.event_bus import EventBus
from lmcache.telemetry.events import LookupEvent
from lmcache.telemetry.metrics import Metrics

DEADLINE_SECONDS = 10.0


@dataclass
class Recorder:
    name: str = "recorder"
    seen: list[str] = field(default_factory=list)
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    closed: bool = False

    def handle(self, events: Sequence[LookupEvent]) -> None:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(DEADLINE_SECONDS)
        if self.fails:
            raise ValueError("broken subscriber")
        self.seen += [event.request_id for event in events]

    def close(self) -> None:
        self.closed = True


def event(request_id: str) -> LookupEvent:
    return LookupEvent(0.0, request_id, "model", 256, 0, b"", 0)


def value(metrics: Metrics, name: str) -> float:
    return sum(
        sample.value for family in metrics.registry.collect() for sample in family.samples if sample.name == name
    )


def test_events_arrive_in_order_and_stop_hands_over_the_rest() -> None:
    recorder = Recorder()
    bus = EventBus([recorder], 1000, Metrics().events)
    bus.start()
    for number in range(500):
        bus.publish(event(str(number)))
    bus.stop()
    bus.stop()
    assert recorder.seen == [str(number) for number in range(500)]
    assert recorder.closed


def test_a_full_queue_drops_the_newest_and_counts_it() -> None:
    metrics = Metrics()
    recorder = Recorder(gate=threading.Event())
    bus = EventBus([recorder], 2, metrics.events)
    bus.start()
    bus.publish(event("held"))
    assert recorder.entered.wait(DEADLINE_SECONDS)  # the thread is inside handle: the queue is empty and stays ours
    for name in ("a", "b", "c", "d"):
        bus.publish(event(name))
    assert value(metrics, "lmcache_mp_event_bus_queue_depth") == 2
    assert value(metrics, "lmcache_mp_event_bus_dropped_events_total") == 2
    assert recorder.gate is not None
    recorder.gate.set()
    bus.stop()
    assert recorder.seen == ["held", "a", "b"]


def test_a_failing_subscriber_is_counted_and_the_others_still_get_everything() -> None:
    metrics = Metrics()
    broken, whole = Recorder(name="broken", fails=True), Recorder()
    bus = EventBus([broken, whole], 100, metrics.events)
    bus.start()
    bus.publish(event("a"))
    assert whole.entered.wait(DEADLINE_SECONDS)
    bus.publish(event("b"))
    bus.stop()
    assert whole.seen == ["a", "b"]
    assert value(metrics, "lmcache_mp_event_bus_subscriber_exceptions_total") >= 1


def test_without_subscribers_there_is_no_thread_and_nothing_is_kept() -> None:
    metrics = Metrics()
    before = threading.active_count()
    bus = EventBus([], 10, metrics.events)
    bus.start()
    assert not bus.active
    bus.publish(event("a"))
    assert value(metrics, "lmcache_mp_event_bus_queue_depth") == 0
    assert threading.active_count() == before
    bus.stop()
