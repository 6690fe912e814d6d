from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "index.py"


def test_the_benchmark_of_the_index_runs_small() -> None:
    """Times say nothing at this size; memory an object is the same on every machine."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--runs", "2", "--objects", "40000", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.returncode in (0, 1), done.stderr
    results = {result["name"]: result["value"] for result in json.loads(done.stdout)}
    assert len(results) == 19
    assert all(value > 0 for value in results.values()), results
    assert results["index memory"] <= 200
    assert results["S3FIFO: index memory"] <= 200
