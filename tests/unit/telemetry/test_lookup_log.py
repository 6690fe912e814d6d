from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ResourceError
from lmcache.telemetry import lookup_log
from lmcache.telemetry.events import LookupEvent
from lmcache.telemetry.lookup_log import LookupHashLog
from manual_clock import ManualClock


def event(request_id: str = "r1", chunks: int = 2) -> LookupEvent:
    hashes = b"".join(bytes([index]) * 32 for index in range(chunks))
    return LookupEvent(
        1000.5,
        request_id,
        "model",
        256,
        chunks * 256 + 7,
        hashes,
        hit_chunks=1,
        cache_salt="tenant",
        tensors=(("bfloat16", [2, 8, 16]),),
    )


def make_log(folder: Path, clock: ManualClock, **options: int) -> LookupHashLog:
    settings = {"rotation_seconds": 60, "rotation_bytes": 1 << 20, "max_files": 10, **options}
    return LookupHashLog(str(folder), clock=clock, **settings)


def test_one_json_object_a_line(tmp_path: Path) -> None:
    log = make_log(tmp_path / "made" / "here", ManualClock())
    log.handle([event("a"), event("b", chunks=0)])
    log.close()
    (file,) = (tmp_path / "made" / "here").iterdir()
    assert re.fullmatch(r"lookup_hashes_\d{8}_\d{6}_\d{6}\.jsonl", file.name)
    assert file.stat().st_mode & 0o777 == 0o600
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first["chunk_hashes"] == ["0x" + "00" * 32, "0x" + "01" * 32]
    assert {key: first[key] for key in ("timestamp", "request_id", "model_name", "chunk_size", "seq_len")} == {
        "timestamp": 1000.5,
        "request_id": "a",
        "model_name": "model",
        "chunk_size": 256,
        "seq_len": 519,
    }
    assert second["chunk_hashes"] == []
    assert (first["dtypes"], first["shapes"], first["cache_salt"]) == (["bfloat16"], [[2, 8, 16]], "tenant")


def test_a_new_file_after_the_interval(tmp_path: Path) -> None:
    clock = ManualClock()
    log = make_log(tmp_path, clock, rotation_seconds=60)
    log.handle([event()])
    clock.advance(59.9)
    log.handle([event()])
    assert len(list(tmp_path.iterdir())) == 1
    clock.advance(0.1)
    log.handle([event()])
    log.close()
    assert sorted(len(file.read_text().splitlines()) for file in tmp_path.iterdir()) == [1, 2]


def test_a_new_file_beyond_the_size(tmp_path: Path) -> None:
    clock = ManualClock()
    log = make_log(tmp_path, clock, rotation_bytes=1024)
    for _ in range(12):
        clock.advance(0.001)
        log.handle([event(chunks=4)])
    log.close()
    files = list(tmp_path.iterdir())
    assert len(files) > 2
    assert all(file.stat().st_size < 1024 + 1024 for file in files)


def test_only_the_newest_files_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    clock = ManualClock()
    log = make_log(tmp_path, clock, rotation_seconds=1, max_files=3)
    for number in range(8):
        log.handle([event(f"r{number}")])
        clock.advance(1)
    log.close()
    kept = sorted(file for file in tmp_path.iterdir() if file.suffix == ".jsonl")
    assert [json.loads(file.read_text())["request_id"] for file in kept] == ["r5", "r6", "r7"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="--lookup-hash-log-dir"):
        make_log(tmp_path / "file" / "below", ManualClock())


class FullDisk:
    """The module `os` of one whose disk is full."""

    is_full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return os.write(fd, data)


def test_a_full_disk_is_said_once_and_writing_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    log = make_log(tmp_path, clock)
    disk = FullDisk()
    monkeypatch.setattr(lookup_log, "os", disk)
    with caplog.at_level("INFO", logger="lmcache.telemetry"):
        log.handle([event("lost")])
        log.handle([event("lost")])
        disk.is_full = False
        clock.advance(1)
        log.handle([event("kept")])
    log.close()
    said = [record.message for record in caplog.records]
    assert len([line for line in said if "No space left" in line]) == 1
    assert "again" in said[-1]
    newest = max(tmp_path.iterdir(), key=lambda file: file.name)
    assert json.loads(newest.read_text())["request_id"] == "kept"


def test_a_full_disk_takes_nothing_that_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    log = make_log(tmp_path, clock, max_files=2)
    log.handle([event("recorded")])

    class HalfALine:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: memoryview) -> int:
            if len(data) > 10:
                return os.write(fd, data[:10])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(lookup_log, "os", HalfALine())
        for _ in range(5):
            clock.advance(61)
            log.handle([event("lost")])
    log.handle([event("kept")])
    log.close()
    lines = [line for file in sorted(tmp_path.iterdir()) for line in file.read_text().splitlines()]
    assert [json.loads(line)["request_id"] for line in lines] == ["recorded", "kept"]
