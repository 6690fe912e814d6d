"""A process that ends is noticed by whoever waits for its answer, also where a child of it keeps its sockets open."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from lmcache.testing.processes import LOOPBACK, ManagedProcess, ProcessEnded, free_port
from polling import until

# Listens, leaves the socket to a child that never answers, and goes on until it is killed.
PROGRAM = """
import os, socket, sys, time
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
if os.fork():
    print("the last words of the process", flush=True)
time.sleep(60)
"""
SECONDS = 30.0


@pytest.fixture
def process(tmp_path: Path):
    port = free_port()
    with ManagedProcess([sys.executable, "-c", PROGRAM, LOOPBACK, str(port)], tmp_path / "log") as process:
        until(lambda: "last words" in process.log())
        yield process, port


def test_the_end_of_a_process_ends_the_wait_for_its_answer(process) -> None:
    asked, port = process
    threading.Timer(0.5, os.kill, (asked.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(ProcessEnded, match=r"ended with code -9:\n.*the last words of the process"):
        asked.ask(port, "GET", "/", timeout_seconds=SECONDS)
    assert time.monotonic() - began < SECONDS / 2


def test_a_process_that_has_ended_is_not_asked(process) -> None:
    asked, port = process
    os.kill(asked.pid, signal.SIGKILL)
    until(lambda: not asked.alive())
    with pytest.raises(ProcessEnded, match="the last words"):
        asked.ask(port, "GET", "/", timeout_seconds=SECONDS)


def test_a_process_that_does_not_answer_is_waited_for(process) -> None:
    asked, port = process
    with pytest.raises(TimeoutError):
        asked.ask(port, "GET", "/", timeout_seconds=0.5)
    assert asked.alive()
