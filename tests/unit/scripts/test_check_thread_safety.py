"""A native method that forgets its lock does not pass lint."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_thread_safety

SOURCES = check_thread_safety.ROOT / "native/src"
LOCK = "    const MutexLock lock(mutex_);\n"


@pytest.mark.skipif(not check_thread_safety.TIDY.exists(), reason="clang-tidy is not installed")
@pytest.mark.parametrize(
    ("name", "head", "variable"),
    [
        ("ledger_report.cc", "LedgerStats Ledger::stats() const {\n", "known_"),
        ("fleet_directory.cc", "FleetStats FleetDirectory::stats() const {\n", "blocks_"),
    ],
)
def test_what_reads_without_its_lock_is_named(tmp_path: Path, name: str, head: str, variable: str) -> None:
    source = (SOURCES / name).read_text()
    assert head + LOCK in source
    unlocked = tmp_path / name
    unlocked.write_text(source.replace(head + LOCK, head))
    assert f"reading variable '{variable}' requires holding mutex 'mutex_'" in check_thread_safety.check(unlocked)
