from __future__ import annotations

import asyncio
import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache import _native
from lmcache.clock import SystemClock
from lmcache.core.limits import GIB
from lmcache.environment import SYSTEM
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import fs_native, io_engine_probe
from lmcache.l2.adapters.io_engine_probe import TRIAL_BYTES, Trial, trial_paths, try_engines
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics

WRITER = "0123456789abcdef"

needs_io_uring = pytest.mark.skipif(_native.io_uring_refusal() != 0, reason="io_uring is refused here")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_engine_probe, "TRIAL_SECONDS", 90.0)
    monkeypatch.setattr(fs_native, "TRIAL_SECONDS", 90.0)
    monkeypatch.setattr(io_engine_probe, "SMALLEST_CAPACITY_BYTES", 0)  # of the disk


def status_of(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """Of an adapter that has opened, reported its inventory, and closed again."""

    async def live() -> dict[str, Any]:
        spec = {"type": "fs_native", "base_path": str(tmp_path / "l2"), **settings}
        runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock())
        await runner.open()
        status = runner.status()
        assert await runner.wait_for_inventory(90)
        await runner.close(90)
        return status

    return asyncio.run(live())


def left_files(base: Path) -> list[Path]:
    return [path for path in base.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("threads", "ring", "prefers"),
    [
        ((4.0, 5.0), (1.0, 3.1), True),
        ((4.0, 5.0), (1.0, 3.3), False),  # once not clearly faster
        ((4.0, 9.0), (4.0, 4.0), False),
    ],
)
def test_threads_stand_unless_io_uring_is_clearly_faster(
    threads: tuple[float, float], ring: tuple[float, float], prefers: bool
) -> None:
    assert Trial(threads, ring).prefers_ring is prefers


@needs_io_uring
@pytest.mark.parametrize("prefers", [True, False])
def test_the_trial_decides_and_leaves_nothing(
    tmp_path: Path, patient: None, prefers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Trial, "prefers_ring", prefers)
    caplog.set_level(logging.INFO, "lmcache.l2")
    assert status_of(tmp_path)["io_uring"] == int(prefers)
    said = [message for message in caplog.messages if "the files (trial: threads" in message]
    assert len(said) == 1 and ("io_uring moves" in said[0]) is prefers
    assert not left_files(tmp_path / "l2")


def test_a_named_engine_and_a_small_capacity_need_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_native, "try_engines", lambda *_: pytest.fail("there was a trial"))
    assert status_of(tmp_path, io_engine="posix")["io_uring"] == 0
    assert status_of(tmp_path, max_capacity_gb=0.5)["io_uring"] == 0


def test_the_files_of_the_trial_are_charged(tmp_path: Path, patient: None) -> None:
    plain = status_of(tmp_path, max_capacity_gb=1.0, io_engine="posix")["used_bytes"]
    assert status_of(tmp_path, max_capacity_gb=1.0)["used_bytes"] == plain + TRIAL_BYTES
    assert status_of(tmp_path, max_capacity_gb=1.0)["capacity_bytes"] == GIB


@needs_io_uring
@pytest.mark.parametrize("waits_for_inventory", [True, False])
def test_a_late_trial_is_not_waited_for_and_leaves_nothing(
    tmp_path: Path, waits_for_inventory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_native, "TRIAL_SECONDS", 0.01)
    go_on, real_round = threading.Event(), io_engine_probe.measure_round

    def slow_round(*arguments: Any) -> float:
        go_on.wait(90)
        return real_round(*arguments)

    monkeypatch.setattr(io_engine_probe, "measure_round", slow_round)

    async def live() -> None:
        spec = {"type": "fs_native", "base_path": str(tmp_path / "l2")}
        runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock())
        await runner.open()
        assert runner.status()["io_uring"] == 0 and not runner.status()["inventory_complete"]
        go_on.set()
        if waits_for_inventory:
            assert await runner.wait_for_inventory(90)
            assert not list((tmp_path / "l2").rglob("*.tmp"))
        assert await runner.close(90)

    asyncio.run(live())
    assert not left_files(tmp_path / "l2")


@needs_io_uring
def test_a_disk_that_fails_leaves_the_choice_to_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_engines(trial_paths(str(tmp_path / "gone"), WRITER), 2, False, SYSTEM) is None

    def fail(*_: Any) -> float:
        raise OSError(errno.EIO, "of the test")

    monkeypatch.setattr(io_engine_probe, "measure_round", fail)
    assert try_engines(trial_paths(str(tmp_path), WRITER), 2, False, SYSTEM) is None


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_engine_probe, "SMALLEST_CAPACITY_BYTES", 1 << 62)
    assert try_engines(trial_paths(str(tmp_path), WRITER), 2, False, SYSTEM) is None
    assert not left_files(tmp_path)


@needs_io_uring
def test_what_a_killed_server_left_of_its_trial_goes(tmp_path: Path) -> None:
    own = tmp_path / "l2" / ".lmcache"
    own.mkdir(parents=True)
    for path in trial_paths(str(own), WRITER):
        Path(path).write_bytes(b"x")
    status_of(tmp_path, io_engine="posix")
    assert not left_files(tmp_path / "l2")
