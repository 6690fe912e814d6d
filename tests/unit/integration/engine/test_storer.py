"""Stores by the thread that asks: interrupts of it, and its end beside orders of the other kind."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from typing import Any, NoReturn  # noqa: E402

from lmcache.client.engine_environment import ENGINE_SYSTEM  # noqa: E402
from lmcache.device.cuda import Gpu  # noqa: E402
from lmcache.errors import ServerUnavailable  # noqa: E402
from lmcache.integration.engine.storer import Storer  # noqa: E402
from lmcache.integration.engine.worker_side import WorkerSide  # noqa: E402
from lmcache.memory.server_memory import ServerMemory  # noqa: E402
from polling import until  # noqa: E402
from unit.device.fake_cuda import FakeCuda  # noqa: E402
from unit.integration.engine.workers import Worker, hashes, store_order  # noqa: E402
from unit.integration.vllm.fakes import FakePending  # noqa: E402


@pytest.mark.parametrize("when", ["reserve", "copy", "commit"])
def test_an_interrupt_of_the_caller_leaves_nothing_reserved(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    faults = iter([KeyboardInterrupt()])

    def interrupt_once(result: Any) -> Any:
        for fault in faults:
            raise fault
        return result

    backend = worker.side.backend
    assert backend is not None
    submit_store, commit = backend.submit_store, worker.client.answers["commit"]

    def submit(*words: Any) -> Any:
        jobs = submit_store(*words)
        for job in jobs:
            wait = job.wait
            monkeypatch.setattr(job, "wait", lambda seconds, wait=wait: interrupt_once(None) or wait(seconds))
        return jobs

    if when == "reserve":
        monkeypatch.setattr(FakePending, "wait", lambda pending, _: interrupt_once(pending.done()))
    elif when == "copy":
        monkeypatch.setattr(backend, "submit_store", submit)
    else:
        worker.client.answers["commit"] = lambda message: interrupt_once(commit(message))
    with pytest.raises(KeyboardInterrupt):
        worker.side.store(store_order(8, [[1, 2]], hashes(10)))
    assert not worker.side.storing and worker.ended_stores() == Counter({8: 1})
    until(lambda: worker.client.messages("commit"))
    (message,) = worker.client.messages("commit")
    assert (message.reservation, message.written) == (5, b"\1" if when == "commit" else b"\0")
    until(lambda: is_idle(worker.side))


def test_an_interrupt_while_slots_are_asked_for_frees_them_by_registering_again(worker: Worker) -> None:
    def fail(message: Any) -> NoReturn:
        raise KeyboardInterrupt

    worker.client.answers["reserve"] = fail
    with pytest.raises(KeyboardInterrupt):
        worker.side.store(store_order(8, [[1, 2]], hashes(10)))
    assert worker.ended_stores() == Counter({8: 1})
    until(lambda: len(worker.client.declared) == 2 and is_idle(worker.side))
    worker.client.hello = None  # nothing is sent
    assert worker.side.store(store_order(9, [[1, 2]], hashes(10))) == b"" and is_idle(worker.side)


def is_idle(side: WorkerSide) -> bool:
    with contextlib.suppress(AssertionError):
        side.check_idle()
        return True
    return False


def test_an_interrupt_before_the_callers_turn_ends_its_order(worker: Worker) -> None:
    class Lock:
        def __enter__(self) -> NoReturn:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    made = Storer(
        worker.client,  # type: ignore[arg-type]
        worker.side.identity,
        lambda: None,
        lambda: None,
        replace(ENGINE_SYSTEM, lock=Lock, queue=lambda: Unread()),  # type: ignore[arg-type]
    )
    with pytest.raises(KeyboardInterrupt):
        made.store(store_order(8, [[1, 2]], hashes(10)), None)
    assert not made.busy and made.take_ended() == (Counter({8: 1}), Counter({8: 1}))


class Unread(queue.SimpleQueue):  # type: ignore[type-arg]
    """What is put there is read when that was as much as the test waits for."""

    def __init__(self, wanted: int = 1 << 20) -> None:
        self.left = wanted
        self.is_open = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.left -= 1
        if not self.left:
            self.is_open.set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.is_open.wait()
        return super().get(block, timeout)


def test_orders_of_both_kinds_end_when_the_worker_leaves(memory: ServerMemory) -> None:
    """One by the caller, whose commit did not come through, and one behind it."""
    mixed = Worker(memory, environment=replace(ENGINE_SYSTEM, queue=lambda: Unread(3)))
    mixed.client.answers["commit"] = lambda message: ServerUnavailable("no answer")
    mixed.side.store(store_order(8, [[1, 2]], hashes(10)))
    mixed.store(9, [[1, 2]], hashes(11))
    mixed.side.close()  # the third
    assert mixed.ended_stores(2) == Counter({8: 1, 9: 1})


def test_a_store_by_the_caller_ends_when_the_gpu_fails(
    memory: ServerMemory, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gpu: Gpu) -> NoReturn:
        raise RuntimeError("no event")

    worker = Worker(memory, "gpu shm")
    monkeypatch.setattr(Gpu, "fence", fail)
    assert worker.side.store(store_order(8, [[1, 2]], hashes(10))) == b""
    assert worker.ended_stores() == Counter({8: 1})
    worker.side.close()
