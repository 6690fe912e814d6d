"""The guide for authors of serdes: its code works as printed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.testing.frames import keys
from unit.l2.support import OneServer

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-serde.md"
(SERDE,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
SPEC: dict[str, Any] = {
    "type": "mock",
    "max_size_gb": 1,
    "mock_bandwidth_gb": 100,
    "serde": {"type": "plugin", "factory": "zlib_serde:ZlibSerde", "params": {"level": 1}},
}


@pytest.fixture(autouse=True)
def _where_the_reader_saved_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zlib_serde.py").write_text(SERDE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zlib_serde", raising=False)


def test_objects_come_back_compressed_or_as_they_are() -> None:
    async def test() -> None:
        async with OneServer(SPEC) as server:
            assert await server.store() == [StoreOutcome.STORED] * 8  # of random bytes
            assert await server.load() == [LoadOutcome.LOADED] * 8
            even = keys(2, seed=1)
            payload = bytes(server.memory.payload_bytes)
            buffers = [server.memory.fill(slot, key, payload) for slot, key in enumerate(even)]
            assert await server.runner.store(even, buffers, lambda: None) == [StoreOutcome.STORED] * 2
            before = [bytes(buffer) for buffer in buffers]
            for buffer in buffers:
                buffer[:] = bytes(buffer.nbytes)
            assert await server.runner.load(even, buffers, lambda: None) == [LoadOutcome.LOADED] * 2
            assert [bytes(buffer) for buffer in buffers] == before
            stored = server.runner.adapter.objects  # type: ignore[attr-defined]
            sizes = sorted(len(frame) for frame in stored.values())
            assert sizes == [8192] * 2 + [16_384] * 8

    asyncio.run(asyncio.wait_for(test(), 60))
