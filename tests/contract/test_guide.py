"""The guide for authors of adapters: its code works as printed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from lmcache.errors import ResourceError
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.testing.contract_run import RecordingInventory

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "write-an-adapter.md"
ADAPTER, TESTS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)

exec(TESTS)  # defines TestSqlite
TestSqlite.steps = 2000  # type: ignore[name-defined]  # noqa: F821


@pytest.fixture(autouse=True)
def _where_the_reader_saved_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sqlite_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sqlite_adapter", raising=False)


def test_the_example_is_short() -> None:
    assert len(TESTS.splitlines()) == 2
    assert sum(bool(line.strip()) for line in ADAPTER.splitlines()) <= 66


def test_the_example_refuses_a_bad_path() -> None:
    spec = {
        "type": "plugin",
        "module_path": "sqlite_adapter",
        "class_name": "SqliteAdapter",
        "adapter_params": {"path": "/nowhere/at/all"},
    }

    async def test() -> None:
        adapter = build(parse_adapter(spec, 0)).adapter
        with pytest.raises(ResourceError, match="/nowhere/at/all: unable to open database file"):
            await adapter.open(RecordingInventory())
        await adapter.close()

    asyncio.run(test())
