"""The bench in small, against a real folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache.cli.main import main


def bench(capsys: pytest.CaptureFixture[str], adapter: dict[str, object], *more: str) -> tuple[int, str, str]:
    small = ["--objects", "70", "--object-mib", "0.06", "--rounds", "2"]  # more than one batch
    code = main(["bench", "l2", "--l2-adapter", json.dumps(adapter), *small, *more])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_folder_is_measured_beside_plain_files_and_left_as_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("stays")
    adapter: dict[str, object] = {"type": "fs_native", "base_path": str(tmp_path)}
    code, out, err = bench(capsys, adapter, "--format", "json")
    assert (code, err) == (0, "")
    figures = json.loads(out)["metrics"]
    assert figures["same_bytes"] == "identical"
    for name in ("store", "load", "plain_write", "plain_read", "copy"):
        assert figures[f"{name}_mb_per_second"] > 0
    assert figures["store_share_of_limit"] == pytest.approx(
        figures["store_mb_per_second"] / figures["plain_write_mb_per_second"], rel=0.01
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_adapter_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = bench(capsys, {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100})
    assert code == 0
    assert "Store rate" in out
    assert "Plain files" not in out


def test_a_backend_that_is_too_small_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = bench(capsys, {"type": "mock", "max_size_gb": 0.001, "mock_bandwidth_gb": 100})
    assert (code, out) == (1, "")
    assert "full" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_folder_that_cannot_be_written_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = bench(capsys, {"type": "fs_native", "base_path": str(tmp_path / "file" / "below")})
    assert (code, out) == (1, "")
    assert "base_path" in err
    assert err.count("\n") == 1
