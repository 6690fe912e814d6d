from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "dax.py"


def test_the_benchmark_of_dax_runs_small(tmp_path: Path) -> None:
    """Whether targets are met says nothing here: the exit code may be 0 or 1."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--small", "--rounds", "2", "--folder", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.returncode in (0, 1), done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 4 and all(result["value"] > 0 for result in results)
