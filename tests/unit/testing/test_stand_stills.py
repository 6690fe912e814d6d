"""A process that was stopped finds out that it was."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from lmcache.testing.processes import ManagedProcess
from polling import until
from support.stand_stills import StandStills

PROGRAM = """
import sys, time
from support.stand_stills import StandStills
began, noted = time.monotonic(), StandStills()
print("runs", flush=True)
while noted.seconds_since(began) < float(sys.argv[1]):
    time.sleep(0.01)
print("stood still", flush=True)
"""
SECONDS = 1.0


def test_a_process_notes_that_it_stood_still(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with ManagedProcess([sys.executable, "-c", PROGRAM, str(SECONDS)], tmp_path / "log", environment) as process:
        until(lambda: "runs" in process.log() or process.check_alive())
        process.pause()
        stopped_at = time.monotonic()
        until(lambda: time.monotonic() - stopped_at > 1.5 * SECONDS)
        process.signal_group(signal.SIGCONT)
        until(lambda: "stood still" in process.log())


def test_gaps_count_from_the_moment_that_is_asked_for() -> None:
    noted = StandStills()
    noted.close()
    noted.gaps.extend([(10.0, 0.5), (20.0, 2.0), (30.0, 0.25)])
    assert [noted.seconds_since(began) for began in (5.0, 20.0, 25.0, 40.0)] == [2.75, 2.25, 0.25, 0]
