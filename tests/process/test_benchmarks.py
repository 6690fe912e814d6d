from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("rpc", ["--runs", "1", "--chunks", "4", "--seconds", "0.2"], 11),
        ("copies", ["--runs", "1"], 8),
        ("startup", ["--runs", "1", "--idle-seconds", "0.2"], 4),
    ],
)
def test_a_benchmark_runs_small(name: str, options: list[str], count: int) -> None:
    """Whether targets are met says nothing here: the exit code may be 0 or 1."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *options, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.returncode in (0, 1), done.stderr
    results = {result["name"]: result["value"] for result in json.loads(done.stdout)}
    assert len(results) == count
    assert all(value >= 0 for value in results.values()), results
