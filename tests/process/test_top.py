"""`lmcache top` on a real server, printed once and live on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer
from polling import until
from process.commands import LMCACHE, lmcache
from process.support import SmallEngine

SECONDS = 30.0


class Terminal:
    """A command on a terminal of its own. TERM is one without tricks, so that what it paints can be read."""

    def __init__(self, *words: str, rows: int = 30, columns: int = 130) -> None:
        self._own, theirs = pty.openpty()
        self.resize(rows, columns)
        os.set_blocking(self._own, False)
        self._seen = ""
        self.process = subprocess.Popen(
            [*LMCACHE, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "linux"},
            start_new_session=True,
        )
        os.close(theirs)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def read(self) -> str:
        """What was painted since the last time."""
        while True:
            try:
                piece = os.read(self._own, 65536)
            except (BlockingIOError, OSError):
                break
            if not piece:
                break
            self._seen += piece.decode(errors="replace")
        seen, self._seen = self._seen, ""
        return seen

    def sees(self, text: str, *, repaint: bool = True) -> None:
        """Waits until it is painted; all is painted anew each time, as a terminal gets what has changed alone."""
        painted: list[str] = []

        def shown() -> bool:
            if repaint:
                self.press("\x0c")
            painted[:] = [self.read() or (painted[-1] if painted else "")]
            return text in painted[-1]

        until(shown, SECONDS, tell=lambda: repr(painted))

    def ends(self) -> int:
        """The exit code. What is painted must be read, or the command could wait for that."""

        def ended() -> bool:
            self.read()
            return self.process.poll() is not None

        until(ended, SECONDS)
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._own)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        yield server


def test_once(server: CacheServer) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    with SmallEngine(server.port, instance_id="engine-a") as engine:
        engine.store(engine.tokens(1, 2))
        engine.lookup("r", engine.tokens(1, 2))
        done = lmcache("top", "--url", url, "--interval", "0.2", "--format", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["metrics"]
        assert found["l1_objects"] == 2 and found["leases"] == 1 and found["lookups_per_second"] == 0
        assert [row["instance"] for row in found["engines"]] == ["engine-a"]
        assert [row["type"] for row in found["adapters"]] == ["fs_native"]
        assert [row["model"] for row in found["tenants"]] == ["model"]
        shown = lmcache("top", "--url", url, "--interval", "0.2", "--once").stdout
        assert "engine-a" in shown and "fs_native" in shown and "ADAPTER" in shown
        engine.end("r")


def test_live(server: CacheServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    terminal = Terminal("top", "--url", url, "--interval", "0.2", "--timeout", "2")
    try:
        with SmallEngine(server.port, instance_id="engine-a"), SmallEngine(server.port, instance_id="engine-b"):
            terminal.sees("engine-b")
            terminal.press("/")
            terminal.sees("filter: _")
            terminal.press("ne-a\n")
            terminal.sees("only with 'ne-a'")
            assert terminal.process.poll() is None
            terminal.press("/\x1b")  # no filter
            terminal.sees("engine-b")
            terminal.press("r")
            terminal.sees("ENGINEv")
            terminal.press("\t")
            terminal.sees("fs_native")
            terminal.press("h")
            terminal.sees("shorter interval")
            terminal.press("x+")
            terminal.sees("every 0.5 s")
            terminal.resize(4, 20)
            terminal.sees("lmcache top")
            terminal.resize(30, 130)
            terminal.sees("fs_native")
            terminal.press(" ")
            terminal.sees("paused")
            terminal.press(" ")
        server.stop()
        terminal.sees("no figures for")
        options: dict[str, Any] = {"port": server.port, "http_port": server.http_port, "shm_name": server.shm_name}
        with CacheServer(tmp_path, l1_size_gb=0.0625, log_name="second.log", **options) as second:
            second.wait_ready()
            terminal.sees("no adapters")
        terminal.press("q")
        assert terminal.ends() == 0
    finally:
        terminal.close()


def test_it_leaves_by_a_signal(server: CacheServer) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 0)):
        terminal = Terminal("top", "--url", f"http://127.0.0.1:{server.http_port}")
        try:
            terminal.sees("lmcache top", repaint=False)
            terminal.process.send_signal(number)
            assert terminal.ends() == code
        finally:
            terminal.close()
