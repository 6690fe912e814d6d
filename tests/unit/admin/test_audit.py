"""The audit log as a file, under a disk that fails, and under logrotate."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from lmcache.admin.audit import AuditLog, refuse_unusable
from lmcache.core.limits import MAX_AUDIT_REFUSALS_AT_ONCE, MAX_AUDIT_TEXT_CHARACTERS
from lmcache.errors import ResourceError
from manual_clock import ManualClock


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_change_is_one_line_that_says_when_who_what_and_how_it_ended(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock())
    log.audit("cache.clear", "127.0.0.1:4321 token ops", {"tier": "l1", "note": "two\nlines"}, "ok")
    log.close()
    (record,) = lines(tmp_path / "audit.jsonl")
    assert list(record) == ["time", "caller", "action", "detail", "outcome"]
    assert str(record["time"]).endswith("Z")
    assert record["detail"] == {"tier": "l1", "note": "two\nlines"}
    assert stat.S_IMODE(os.stat(tmp_path / "audit.jsonl").st_mode) == 0o600


def test_later_servers_append(tmp_path: Path) -> None:
    for number in range(3):
        log = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock())
        log.audit("quota.put", f"caller {number}", {}, "ok")
        log.close()
    assert [record["caller"] for record in lines(tmp_path / "audit.jsonl")] == ["caller 0", "caller 1", "caller 2"]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock())
    log.audit("first", "", {}, "ok")
    assert log.drain(5.0)
    (tmp_path / "audit.jsonl").rename(tmp_path / "audit.jsonl.1")
    log.audit("second", "", {}, "ok")
    log.close()
    assert [record["action"] for record in lines(tmp_path / "audit.jsonl.1")] == ["first"]
    assert [record["action"] for record in lines(tmp_path / "audit.jsonl")] == ["second"]


def test_a_disk_that_is_full_is_said_and_the_line_goes_to_the_log_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("lmcache").propagate = True
    log = AuditLog("/dev/full", ManualClock())
    log.audit("quota.delete", "somebody", {"salt": "tenant"}, "ok")
    log.close()
    assert "/dev/full cannot be written: No space left on device" in caplog.text
    assert "quota.delete" in caplog.text


def test_a_caller_cannot_make_a_line_as_long_as_it_likes(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), ManualClock())
    log.audit("quota.put", "c" * 100_000, {"salt": "s" * 100_000}, "o" * 100_000)
    log.close()
    assert (tmp_path / "audit.jsonl").stat().st_size < 5 * MAX_AUDIT_TEXT_CHARACTERS


def test_those_who_may_not_ask_cannot_fill_the_disk(tmp_path: Path) -> None:
    clock = ManualClock()
    log = AuditLog(str(tmp_path / "audit.jsonl"), clock)
    for _ in range(10_000):
        log.audit_refused("quota.put", "192.0.2.9", {"cache_salt": "s" * 4000}, "no token")
    clock.advance(1.0)
    log.audit_refused("cache.clear", "192.0.2.9", {}, "no token")
    log.audit_refused("cache.clear", "192.0.2.9", {}, "no token")
    log.audit("cache.clear", "127.0.0.1", {}, "ok")
    log.close()
    actions = [(record["action"], record["detail"]) for record in lines(tmp_path / "audit.jsonl")]
    assert len(actions) == MAX_AUDIT_REFUSALS_AT_ONCE + 4
    assert actions[MAX_AUDIT_REFUSALS_AT_ONCE:] == [
        ("refused", {"requests": 10_000 - MAX_AUDIT_REFUSALS_AT_ONCE}),
        ("cache.clear", {}),
        ("cache.clear", {}),
        ("refused", {"requests": 1}),
    ]
    assert (tmp_path / "audit.jsonl").stat().st_size < 500 * len(actions)


def test_a_file_that_cannot_be_opened_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "link", tmp_path / "missing" / "audit.jsonl"):
        with pytest.raises(ResourceError, match=r"--audit-log .* cannot be written"):
            refuse_unusable(str(path))
    refuse_unusable("")
    refuse_unusable(str(tmp_path / "audit.jsonl"))
    assert not (tmp_path / "audit.jsonl").exists()
