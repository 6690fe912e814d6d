from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
BURNT_SECONDS = 0.2


def burn() -> None:
    until = time.thread_time() + BURNT_SECONDS
    while time.thread_time() < until:
        pass


def test_the_processor_time_of_threads_that_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from measure import processor_seconds

    before = processor_seconds(os.getpid())
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert processor_seconds(os.getpid()) >= before + BURNT_SECONDS


def test_a_process_that_has_ended_has_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from measure import processor_seconds

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError, match=f"process {ended.pid} has ended"):
        processor_seconds(ended.pid)
