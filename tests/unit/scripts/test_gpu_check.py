"""What the GPU check makes of its parts' output, and what it says without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpu_check
from gpu_check import Checks, Row, line, speed_rows, stream_rows, suite_row, why_no_gpu

SCRIPT = Path(gpu_check.__file__)


def test_without_a_gpu_one_sentence_and_a_code_of_its_own() -> None:
    if not why_no_gpu():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(SCRIPT), "run"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(("There is no NVIDIA driver", "The NVIDIA driver")) and done.stderr.count("\n") == 1


def test_tests_count_only_when_some_have_passed() -> None:
    assert suite_row("copies", 0, "....s\n4 passed, 1 skipped in 2.1s\n") == Row(
        "copies", "4 passed, 1 skipped", ok=True
    )
    assert suite_row("copies", 0, "s\n1 skipped in 0.1s\n").ok is False
    failed = suite_row("copies", 1, "E   assert 1 == 2\n1 failed, 3 passed in 2.1s\n")
    assert failed.ok is False and "assert 1 == 2" in failed.value and "code 1" in failed.value
    assert suite_row("copies", 9, "4 passed\n========= ERROR SUMMARY: 2 errors\n").ok is False


def test_figures_have_a_verdict_where_they_have_a_target() -> None:
    figures = [
        {"name": "8B: store", "value": 41.237, "unit": "GB/s", "target": "", "ok": True, "detail": "by kernel copies"},
        {"name": "ratio", "value": 0.8, "unit": "ratio", "target": "at least 0.9", "ok": False, "detail": ""},
    ]
    told, missed = speed_rows(figures)
    assert told == Row("8B: store", "41.2 GB/s    by kernel copies") and line(told).startswith("     8B: store")
    assert missed.ok is False and line(missed).startswith("FAIL ratio")


def test_a_stream_counts_beside_what_was_moved() -> None:
    measured = {"alone": 2.0, "storing": 2.5, "stored": 64, "loading": 2.0, "loaded": 0}
    alone, storing, loading = stream_rows(measured, limit=None)
    assert alone.ok is None and storing == Row(
        "a decoding step while storing", "2.500 ms, 1.25 times, 64 chunks stored", ok=True
    )
    assert loading.ok is False


def test_on_a_gpu_a_stream_may_hardly_slow_down() -> None:
    measured = {"alone": 2.0, "storing": 2.08, "stored": 64, "loading": 2.05, "loaded": 64}
    _, storing, loading = stream_rows(measured, limit=1.03)
    assert (storing.ok, loading.ok) == (False, True)
    assert storing.value == "2.080 ms, 1.04 times, 64 chunks stored  at most 1.03"


def test_a_check_that_cannot_be_made_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("gpu_check.Path.exists", lambda path: False)
    (row,) = Checks("cuda", "small", {}).sanitizer()
    assert row.ok is False
    assert row.value == "not installed: install the CUDA toolkit, or leave the check out with --no-sanitizer"


def test_a_machine_without_vllm_skips_what_needs_it() -> None:
    """The check runs the whole folder, and torch alone is asked of the machine."""
    without = "import sys; sys.modules['vllm'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    path = str(SCRIPT.parent.parent / "tests" / "gpu" / "test_engine.py")
    done = subprocess.run(
        [sys.executable, "-c", without, "-p", "no:cacheprovider", "-rs", path],
        cwd=SCRIPT.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 skipped" in done.stdout and "needs vLLM" in done.stdout, done.stdout + done.stderr
