"""The cap of an adapter, seen from outside: `du` over the folder of a process that stores far more than fits.

The process is stopped while `du` looks, as `du` takes its time: otherwise it would count a file here that has already
made room for another one there. TEST_CAP_STORE_GB=10 stores that many GB (10^9 bytes) under each policy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CAP_BYTES = 20_000_000
STORE_BYTES = int(float(os.environ.get("TEST_CAP_STORE_GB", "0.15")) * 1e9)
SECONDS_BETWEEN_LOOKS = 0.02
FILL_FOLDER = Path(__file__).with_name("fill_folder.py")


def disk_usage(folder: Path) -> int:
    done = subprocess.run(["du", "-s", "--block-size=1", str(folder)], capture_output=True, text=True, timeout=60)
    return int(done.stdout.split()[0])


@pytest.mark.parametrize("policy", ["LRU", "S3FIFO"])
def test_du_never_sees_more_than_the_cap(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    arguments = [sys.executable, str(FILL_FOLDER), str(folder), str(CAP_BYTES), str(STORE_BYTES), policy]
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    seen: list[int] = []
    try:
        while True:
            try:
                process.wait(SECONDS_BETWEEN_LOOKS)
                break
            except subprocess.TimeoutExpired:
                pass
            os.kill(process.pid, signal.SIGSTOP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                process.returncode = os.waitstatus_to_exitcode(status)
                break
            seen.append(disk_usage(folder))
            os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    seen.append(disk_usage(folder))
    assert max(seen) <= CAP_BYTES, f"{max(seen)} bytes at look {seen.index(max(seen)) + 1} of {len(seen)}"
    assert seen[-1] >= CAP_BYTES // 2  # it was really full
    assert int(out.split()[-1]) > 0
    print(f"{policy}: {len(seen)} looks, at most {max(seen)} bytes, {out.strip()}")
