"""Copies that several threads wait for."""

from __future__ import annotations

import threading
import time

import pytest

from lmcache.integration.engine.shm_transfer import CopyJob
from polling import until


class SlowCopier:
    """One job, which ends when the test says so; as in the real one, a result is handed out once."""

    def __init__(self) -> None:
        self.waiting = 0
        self._done = threading.Event()
        self._collected = False

    def end(self) -> None:
        self._done.set()

    def wait(self, number: int, seconds: float) -> bytes | None:
        self.waiting += 1
        if not self._done.wait(seconds):
            return None
        assert not self._collected
        self._collected = True
        return b"\x01"


@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_a_look_at_a_copy_does_not_last_as_long_as_somebody_elses_wait_for_it(seconds: float) -> None:
    """The engine's thread looks at copies in its steps, while others wait for the same ones to close or to commit."""
    copier = SlowCopier()
    job = CopyJob(copier, 1, threading.Lock(), b"\0")  # type: ignore[arg-type]
    results: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: results.append(job.wait(30.0)))
    waiter.start()
    until(lambda: copier.waiting == 1)
    began = time.monotonic()
    assert job.wait(seconds) is None
    assert time.monotonic() - began < 15.0
    copier.end()
    waiter.join(30.0)
    assert results == [b"\x01"]
    assert job.wait(seconds) == b"\x01"


def test_a_copy_whose_result_was_lost_to_an_interrupt_has_ended() -> None:
    class Interrupted(SlowCopier):
        def wait(self, number: int, seconds: float) -> bytes | None:
            if self.waiting:
                raise ValueError("job 1 is unknown or was collected")
            super().wait(number, seconds)
            raise KeyboardInterrupt

    copier = Interrupted()
    copier.end()
    job = CopyJob(copier, 1, threading.Lock(), b"\2")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        job.wait(1.0)
    assert job.wait(1.0) == job.wait(0.0) == b"\2"
