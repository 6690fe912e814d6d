from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.cli import doctor_checks
from lmcache.cli.main import main
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.memory.memory_limit import MemoryProbe


@pytest.fixture
def small_probe(tmp_path: Path) -> MemoryProbe:
    """2 GiB of memory, 512 MiB of which the cgroup allows."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "box").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n")
    (proc / "self" / "cgroup").write_text("0::/box\n")
    (cgroups / "box" / "memory.max").write_text(str(512 << 20))
    (cgroups / "box" / "memory.current").write_text("0")
    (cgroups / "box" / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    return MemoryProbe(proc, cgroups)


def test_shared_memory_names_what_is_too_small(small_probe: MemoryProbe) -> None:
    assert doctor_checks.shared_memory(64 << 20, Path("/dev/shm"), small_probe).level == doctor_checks.OK
    verdict = doctor_checks.shared_memory(1 << 30, Path("/dev/shm"), small_probe)
    assert verdict.level == doctor_checks.PROBLEM
    assert "1.0 GiB asked for" in verdict.found
    assert "raise that limit" in verdict.remedy


def test_no_shared_memory_at_all_is_a_problem(tmp_path: Path) -> None:
    verdict = doctor_checks.shared_memory(0, tmp_path / "none")
    assert verdict.level == doctor_checks.PROBLEM
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
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as live:
        assert live.stdin is not None
        assert live.stdout is not None
        assert live.stdout.readline() == b"locked\n"
        assert doctor_checks.left_behind(tmp_path).level == doctor_checks.OK
        live.stdin.close()
        live.wait(10)
    verdict = doctor_checks.left_behind(tmp_path)
    assert verdict.level == doctor_checks.NOTE
    assert verdict.details == (f"{path} (4.0 KiB)",)
    assert verdict.found == f"1 file seems to belong to no running server: 4.0 KiB in {tmp_path}"
    assert path.exists()


def test_many_dead_servers_take_a_line_each_and_only_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(300):
        (tmp_path / f"lmcache-{number}").write_bytes(Header(HEADER_BYTES, b"x" * 16, 1).pack())
    large = tmp_path / "lmcache-large"
    large.write_bytes(Header(HEADER_BYTES, b"x" * 16, 1).pack().ljust(1 << 20, b"x"))
    verdict = doctor_checks.left_behind(tmp_path)
    monkeypatch.setattr(doctor_checks, "left_behind", lambda: verdict)
    main(["doctor", "--skip-import"])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(f"note     dead servers: 301 files seem to belong to no running server: 2.2 MiB in {tmp_path}")
    assert lines[first + 1] == f"         {large} (1.0 MiB)"
    assert lines[first + 9] == "         and 293 more, which --format json lists"
    assert lines[first + 10].startswith("         -> ")
    assert max(map(len, lines[first : first + 10])) < 200
    main(["doctor", "--skip-import", "--format", "json"])
    checks = json.loads(capsys.readouterr().out)["metrics"]["checks"]
    assert sum(len(check["details"]) for check in checks) == 301


def test_folder(tmp_path: Path) -> None:
    assert doctor_checks.folder(tmp_path).level in (doctor_checks.OK, doctor_checks.NOTE)
    assert list(tmp_path.iterdir()) == []  # nothing stays
    verdict = doctor_checks.folder(tmp_path / "none")
    assert verdict.level == doctor_checks.PROBLEM
    assert "No such file" in verdict.found


def test_a_folder_without_direct_io_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    verdict = doctor_checks.folder(tmp_path)
    assert verdict.level == doctor_checks.NOTE
    assert "no O_DIRECT (Invalid argument)" in verdict.found


def test_a_port_in_use_is_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        verdict = doctor_checks.port(taken.getsockname()[1], "--port")
    assert verdict.level == doctor_checks.NOTE
    assert "in use" in verdict.found


def test_native_core_and_kernel_are_looked_at() -> None:
    assert doctor_checks.native_core().found.startswith("copies by ")
    assert doctor_checks.io_uring().level in (doctor_checks.OK, doctor_checks.NOTE)
    assert doctor_checks.locked_memory().level in (doctor_checks.OK, doctor_checks.NOTE)
    assert doctor_checks.open_files().level in (doctor_checks.OK, doctor_checks.NOTE)


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
