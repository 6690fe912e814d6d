from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lmcache

ROOT = Path(__file__).resolve().parents[3]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tiers.py"), "--small", "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(lmcache.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "raw_block recovery of 1000" in done.stdout and "raw_block lookup" in done.stdout
    if shutil.which("fio"):
        assert done.stdout.count("of fio") >= 4
    else:
        assert "fio is not installed" in done.stderr
    assert not list(tmp_path.iterdir())
