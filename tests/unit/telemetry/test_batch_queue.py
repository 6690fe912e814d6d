from __future__ import annotations

import threading

import pytest

from lmcache.telemetry.batch_queue import BatchQueue
from lmcache.telemetry.logs import count_faults
from polling import until

SECONDS = 30.0


def test_items_of_many_threads_are_handled_once_each_in_the_order_of_their_thread() -> None:
    handled: list[tuple[int, int]] = []
    queue: BatchQueue[tuple[int, int]] = BatchQueue(lambda items, dropped: handled.extend(items), 10_000, "test")
    queue.start()

    def put(thread: int) -> None:
        for number in range(500):
            assert queue.put((thread, number))

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.drain(SECONDS)
    assert sorted(handled) == [(thread, number) for thread in range(4) for number in range(500)]
    for producer in range(4):
        assert [number for source, number in handled if source == producer] == list(range(500))
    queue.stop(SECONDS)


def test_what_is_too_much_is_dropped_and_reported_with_the_next_batch() -> None:
    entered, gate = threading.Event(), threading.Event()
    batches: list[tuple[list[str], int]] = []

    def handle(items: list[str], dropped: int) -> None:
        entered.set()
        gate.wait(SECONDS)
        batches.append((list(items), dropped))

    queue: BatchQueue[str] = BatchQueue(handle, 2, "test")
    queue.start()
    queue.put("first")
    assert entered.wait(SECONDS)
    assert [queue.put(name) for name in "abcd"] == [True, True, False, False]
    assert len(queue) == 2
    assert not queue.drain(0.0)
    gate.set()
    assert queue.drain(SECONDS)
    queue.put("last")
    until(lambda: len(batches) == 3)
    assert batches == [(["first"], 0), (["a", "b"], 2), (["last"], 0)]
    queue.stop(SECONDS)


def test_a_fault_of_the_handler_costs_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    batches: list[tuple[list[str], int]] = []
    faults: list[str] = []

    def handle(items: list[str], dropped: int) -> None:
        if items == ["bad"]:
            raise MemoryError
        batches.append((items, dropped))

    stop_counting = count_faults(faults.append)
    for logs_faults in (True, False):
        queue: BatchQueue[str] = BatchQueue(handle, 2, "test", logs_faults=logs_faults)
        queue.start()
        for item in ("bad", "good", "last"):
            queue.put(item)
            assert queue.drain(SECONDS)
        queue.stop(SECONDS)
    stop_counting()
    assert batches == [(["good"], 1), (["last"], 0)] * 2
    assert caplog.text.count("1 items of the thread test were lost") == 1 and faults == ["lmcache.telemetry"]


def test_the_end_handles_what_waits_and_does_not_wait_for_what_hangs() -> None:
    handled: list[int] = []
    queue: BatchQueue[int] = BatchQueue(lambda items, dropped: handled.extend(items), 100, "test")
    queue.put(1)  # before the start
    queue.start()
    queue.put(2)
    queue.stop(SECONDS)
    queue.stop(SECONDS)
    assert handled == [1, 2]

    gate = threading.Event()
    hanging: BatchQueue[int] = BatchQueue(lambda items, dropped: gate.wait(SECONDS), 100, "test")
    hanging.start()
    hanging.put(1)
    hanging.stop(0.05)
    gate.set()
    hanging.stop(SECONDS)
