"""A native method that forgets its lock does not pass lint."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_thread_safety

LEDGER = check_thread_safety.ROOT / "native/src/ledger_report.cc"
HEAD = "LedgerStats Ledger::stats() const {\n"
LOCK = "    const MutexLock lock(mutex_);\n"


@pytest.mark.skipif(not check_thread_safety.TIDY.exists(), reason="clang-tidy is not installed")
def test_what_reads_without_its_lock_is_named(tmp_path: Path) -> None:
    source = LEDGER.read_text()
    assert HEAD + LOCK in source
    unlocked = tmp_path / "ledger.cc"
    unlocked.write_text(source.replace(HEAD + LOCK, HEAD))
    assert "reading variable 'known_' requires holding mutex 'mutex_'" in check_thread_safety.check(unlocked)
