"""`persist_enabled: false` with many objects: the end of a real server deletes them, or says how many it did not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from lmcache.testing.processes import CacheServer
from polling import until
from process.support import SmallEngine

OBJECTS = 20_000
STOP_SECONDS = 20.0


def objects_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.data"))


def server_of(folder: Path, **settings: object) -> CacheServer:
    adapter = {"type": "fs_native", "base_path": str(folder / "l2"), **settings}
    return CacheServer(folder, l1_size_gb=0.0625, extra=["--l2-adapter", json.dumps(adapter)])


def multiply(file: Path, count: int) -> None:
    """The file of an object under the names of others, in folders as they would have them."""
    for number in range(count):
        name = number.to_bytes(32, "big")[::-1].hex()
        folder = file.parents[1] / name[:2]
        folder.mkdir(exist_ok=True)
        os.link(file, folder / f"{name}.data")


def test_many_objects_that_are_not_to_persist_go_at_the_end(tmp_path: Path) -> None:
    with server_of(tmp_path) as first:
        first.wait_ready()
        with SmallEngine(first.port) as engine:
            assert engine.store(engine.tokens(1)) == 1
            until(lambda: objects_in(tmp_path))
        assert first.stop() == 0
    (file,) = objects_in(tmp_path)
    multiply(file, OBJECTS - 1)
    with server_of(tmp_path, persist_enabled=False) as second:
        second.wait_ready()
        until(lambda: second.status()["l2"]["adapters"][0]["objects"] == OBJECTS, tell=second.status)
        assert second.stop(STOP_SECONDS) == 0
        said = re.findall(rf"(\d+) of {OBJECTS} objects were not deleted within", second.log())
    # A slice that was being deleted when the time was up goes, too.
    assert len(objects_in(tmp_path)) <= sum(map(int, said))
