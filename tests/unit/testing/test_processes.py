"""A process that ends is noticed by whoever waits for its answer, also where a child of it keeps its sockets open."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import LOOPBACK, ManagedProcess, ProcessEnded, VllmEngine, free_port
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
def process(tmp_path: Path) -> Iterator[tuple[ManagedProcess, int]]:
    port = free_port()
    with ManagedProcess([sys.executable, "-c", PROGRAM, LOOPBACK, str(port)], tmp_path / "log") as process:
        until(lambda: "last words" in process.log())
        yield process, port


def test_a_free_port_is_given_once_and_is_never_that_of_a_connection() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports) and max(ports) < 32_768
    with socket.create_server((LOOPBACK, taken := free_port())):
        assert all(free_port() != taken for _ in range(20_000))


def test_the_end_of_a_process_ends_the_wait_for_its_answer(process: Any) -> None:
    asked, port = process
    threading.Timer(0.5, os.kill, (asked.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(ProcessEnded, match=r"ended with code -9:\n.*the last words of the process"):
        asked.ask(port, "GET", "/", timeout_seconds=SECONDS)
    assert time.monotonic() - began < SECONDS / 2


def test_a_process_that_has_ended_is_not_asked(process: Any) -> None:
    asked, port = process
    os.kill(asked.pid, signal.SIGKILL)
    until(lambda: not asked.alive())
    with pytest.raises(ProcessEnded, match="the last words"):
        asked.ask(port, "GET", "/", timeout_seconds=SECONDS)


def test_a_process_that_does_not_answer_is_waited_for(process: Any) -> None:
    asked, port = process
    with pytest.raises(TimeoutError):
        asked.ask(port, "GET", "/", timeout_seconds=0.5)
    assert asked.alive()


# Answers /health only, and has a worker of the name that vLLM gives it.
ENGINE = """
import http.server, os, sys, time
worker = os.fork()
if not worker:
    open("/proc/self/comm", "w").write("VLLM::Worker")
    time.sleep(60)
while "VLLM" not in open(f"/proc/{worker}/comm").read():
    time.sleep(0.01)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health":
            time.sleep(60)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments): pass
print("worker", worker, "the last words of the engine", flush=True)
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


class Engine(VllmEngine):
    """What looks like one from outside."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._parts = {}
        ManagedProcess.__init__(self, [sys.executable, "-c", ENGINE, LOOPBACK, str(self.port)], folder / "log")


def test_the_end_of_a_worker_ends_the_wait_for_the_engine(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.wait_ready()
        worker = int(re.findall(r"worker (\d+)", engine.log())[0])
        engine.check_alive()
        threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
        with pytest.raises(ProcessEnded, match=rf"vLLM has lost VLLM::Worker \({worker}\):\n.*the last words"):
            engine.ask(engine.port, "GET", "/", timeout_seconds=SECONDS)
