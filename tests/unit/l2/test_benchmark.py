from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="needs a C++ compiler")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "files.py"), "--small", "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(lmcache.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fs_native O_DIRECT") == 2 and done.stdout.count("fs_native page cache") == 2
    assert not list(tmp_path.iterdir())
