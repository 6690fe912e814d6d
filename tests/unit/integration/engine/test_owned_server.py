"""What keeps an engine from starting or joining a server is an error that the engine goes on after."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ResourceError
from lmcache.integration.engine.owned_server import OwnedServer
from lmcache.integration.engine.run_folder import run_folder_path
from lmcache.integration.engine.server_guardian import RestartPause, pause, remove_old_logs
from lmcache.integration.engine.server_order import autostart_order
from lmcache.testing.processes import free_port


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fcntl.flock", errno.ENOLCK),
        ("fcntl.fcntl", errno.ENOLCK),
        ("os.open", errno.EMFILE),
        ("os.pipe2", errno.EMFILE),
        ("os.pwrite", errno.ENOSPC),
    ],
)
def test_files_and_locks_that_cannot_be_had(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order = autostart_order(f"tcp://127.0.0.1:{free_port()}", [], {}, keep=True)
    server = OwnedServer.enter(order)

    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(call, fails)
        with pytest.raises(ResourceError, match=os.strerror(number)):
            server.begin()
    server.leave()
    for path in run_folder_path().glob(f"{order.name}*"):
        path.unlink()


def test_a_server_that_was_ready_for_long_is_started_again_soon() -> None:
    restart_pause = RestartPause()
    assert [restart_pause.after(3.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [restart_pause.after(ready) for ready in (600.0, 600.0, 3.0, 3.0)] == [1, 1, 2, 4]


def test_the_death_of_a_child_ends_no_pause_and_a_signal_to_end_does() -> None:
    wakeup, signals = os.pipe()
    left, leaving = os.pipe()
    try:
        os.write(signals, bytes([signal.SIGCHLD]))
        began = time.monotonic()
        assert pause(wakeup, left, 0.2)
        assert time.monotonic() - began >= 0.2
        os.write(signals, bytes([signal.SIGCHLD, signal.SIGTERM]))
        assert not pause(wakeup, left, 60.0)
        os.write(leaving, b"x")
        assert not pause(wakeup, left, 60.0)
    finally:
        for fd in (wakeup, signals, left, leaving):
            os.close(fd)


def test_an_entry_that_cannot_be_looked_at_keeps_no_old_log(tmp_path: Path) -> None:
    for number in range(8):  # in whatever order they are found
        for suffix in (".sock", "-gone.log"):
            (tmp_path / f"{number}{suffix}").symlink_to("/nowhere")
        (tmp_path / f"{number}-folder.log").mkdir()
        for suffix in (".log", ".log.old", "-used.log", "-used.lock", ".txt"):
            (tmp_path / f"{number}{suffix}").touch()
    remove_old_logs(str(tmp_path), time.time())
    assert len(list(tmp_path.iterdir())) == 64
    remove_old_logs(str(tmp_path), time.time() + 8 * 86400)
    left = {path.name.lstrip("01234567") for path in tmp_path.iterdir()}
    assert left == {".sock", "-gone.log", "-folder.log", "-used.log", "-used.lock", ".txt"}
