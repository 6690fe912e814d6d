from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.cli import machine
from lmcache.cli.main import main
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.memory.room import Machine


@pytest.fixture
def small_machine(tmp_path: Path) -> Machine:
    """2 GiB of memory, 512 MiB of which the cgroup allows."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "box").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n")
    (proc / "self" / "cgroup").write_text("0::/box\n")
    (cgroups / "box" / "memory.max").write_text(str(512 << 20))
    (cgroups / "box" / "memory.current").write_text("0")
    (cgroups / "box" / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    return Machine(proc, cgroups)


def test_shared_memory_names_what_is_too_small(small_machine: Machine) -> None:
    assert machine.shared_memory(64 << 20, Path("/dev/shm"), small_machine).level == machine.OK
    verdict = machine.shared_memory(1 << 30, Path("/dev/shm"), small_machine)
    assert verdict.level == machine.PROBLEM
    assert "1.0 GiB asked for" in verdict.found
    assert "raise that limit" in verdict.remedy


def test_no_shared_memory_at_all_is_a_problem(tmp_path: Path) -> None:
    verdict = machine.shared_memory(0, tmp_path / "none")
    assert verdict.level == machine.PROBLEM
    assert "--shm-size" in verdict.remedy


def test_memory_of_a_dead_server_is_found_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lmcache-1"
    path.write_bytes(Header(HEADER_BYTES, b"x" * 16, 1).pack())
    (tmp_path / "other").write_bytes(bytes(HEADER_BYTES))
    hold = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    live = subprocess.Popen([sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert live.stdin is not None
    assert live.stdout is not None
    assert live.stdout.readline() == b"locked\n"
    assert machine.left_behind(tmp_path).level == machine.OK
    live.stdin.close()
    live.wait(10)
    verdict = machine.left_behind(tmp_path)
    assert verdict.level == machine.NOTE
    assert str(path) in verdict.found
    assert "other" not in verdict.found
    assert path.exists()


def test_folder(tmp_path: Path) -> None:
    assert machine.folder(tmp_path).level in (machine.OK, machine.NOTE)
    assert list(tmp_path.iterdir()) == []  # nothing stays
    verdict = machine.folder(tmp_path / "none")
    assert verdict.level == machine.PROBLEM
    assert "No such file" in verdict.found


def test_a_folder_without_direct_io_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    verdict = machine.folder(tmp_path)
    assert verdict.level == machine.NOTE
    assert "no O_DIRECT (Invalid argument)" in verdict.found


def test_a_port_in_use_is_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        verdict = machine.port(taken.getsockname()[1], "--port")
    assert verdict.level == machine.NOTE
    assert "in use" in verdict.found


def test_native_core_and_kernel_are_looked_at() -> None:
    assert machine.processor().found.startswith("copies by ")
    assert machine.io_uring().level in (machine.OK, machine.NOTE)
    assert machine.locked_memory().level in (machine.OK, machine.NOTE)
    assert machine.open_files().level in (machine.OK, machine.NOTE)


def test_doctor_ends_with_1_when_something_stands_in_the_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--skip-import", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"folder {tmp_path}" in text
    assert main(["doctor", "--skip-import", "--folder", str(tmp_path / "none"), "--format", "json"]) == 1
    result = json.loads(capsys.readouterr().out)["metrics"]
    assert result["problems"] == 1
    (problem,) = [check for check in result["checks"] if check["level"] == "problem"]
    assert problem["remedy"]
