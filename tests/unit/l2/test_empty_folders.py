"""Folders of a file adapter that nothing is left in: they go, nothing is charged for them, and who shares them loses
no store."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapters import fs_native
from lmcache.testing.frames import FrameMemory, keys, namespace
from unit.l2.support import OneServer, run

CAP_BYTES = int(0.01 * GIB)
SALTS = 1300  # whose empty folders alone would take CAP_BYTES; tests/process/test_many_salts.py has three times both
ROUNDS = 500
OWN = {".lmcache", "quarantine", "tmp"}


class Server(OneServer):
    def __init__(self, base: Path, **settings: Any) -> None:
        super().__init__({"type": "fs_native", "base_path": str(base), "io_engine": "posix", **settings})

    async def store_keys(self, wanted: list[ObjectKey]) -> list[StoreOutcome]:
        buffers = [self.memory.fill(slot, key) for slot, key in enumerate(wanted)]
        return await self.runner.store(wanted, buffers, lambda: None)

    @property
    def used_bytes(self) -> int:
        return int(self.runner.status()["used_bytes"])


def folders_of_objects(base: Path) -> list[Path]:
    return [path for path in base.rglob("*") if path.is_dir() and path.relative_to(base).parts[0] not in OWN]


def disk_bytes(base: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [base, *base.rglob("*")])


def of_salt(number: int, count: int = 1) -> list[ObjectKey]:
    return keys(count, number, namespace(salt=f"salt {number}"))


@pytest.mark.parametrize("relative_tmp_dir", ["", "tmp"])
def test_months_of_salts_leave_room_for_the_next(tmp_path: Path, relative_tmp_dir: str) -> None:
    settings: dict[str, Any] = {
        "max_capacity_gb": CAP_BYTES / GIB,
        "eviction": {"eviction_policy": "LRU"},
        "relative_tmp_dir": relative_tmp_dir,
    }

    async def test() -> None:
        async with Server(tmp_path, **settings) as server:
            empty_bytes = server.used_bytes
            for number in range(SALTS):
                assert await server.store_keys(of_salt(number)) == [StoreOutcome.STORED], number
            assert disk_bytes(tmp_path) <= CAP_BYTES
            objects = server.runner.status()["objects"]
            assert objects > 160
            assert len(folders_of_objects(tmp_path)) == 2 * objects
            before = server.used_bytes
        async with Server(tmp_path, **settings) as server:
            # The base folder itself may have grown since it was measured last.
            assert before <= server.used_bytes <= before + (1 << 20)
            assert server.runner.status()["objects"] == objects
            assert (await server.runner.clear())[0] == objects
            assert folders_of_objects(tmp_path) == []
            assert server.used_bytes <= empty_bytes + (1 << 20)
            assert await server.store_keys(of_salt(0, 8)) == [StoreOutcome.STORED] * 8

    run(test)


def test_what_was_refused_is_charged_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path, max_capacity_gb=(1 << 20) / GIB) as server:
            number = 0
            while await server.store_keys(of_salt(number)) == [StoreOutcome.STORED]:
                number += 1
            full_bytes = server.used_bytes
            for refused in range(number, number + 200):
                assert await server.store_keys(of_salt(refused)) == [StoreOutcome.FULL]
                server.clock.advance(100)  # it is tried each time
            assert server.used_bytes == full_bytes
            assert server.runner.status()["full"]
            await server.runner.clear()
            assert not server.runner.status()["full"]
            assert await server.store_keys(of_salt(0)) == [StoreOutcome.STORED]

    run(test)


def test_a_start_removes_what_is_empty_and_nothing_else(tmp_path: Path) -> None:
    """As an earlier version, or kill -9 between making a folder and its first file, leaves them."""
    foreign = tmp_path / ("c" * 64) / "ab" / "notes"
    alien = tmp_path / "somebody" / "ab"
    for number in range(300):
        (tmp_path / namespace(salt=f"{number}").digest.hex() / "7f").mkdir(parents=True)
    (tmp_path / ("d" * 64)).mkdir()
    dead = tmp_path / ("e" * 64) / "ab" / f".{'ab' * 32}.{'0' * 16}.1.tmp"
    for path in (foreign, dead):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    alien.mkdir(parents=True)

    async def test() -> None:
        async with Server(tmp_path, max_capacity_gb=(1 << 20) / GIB) as server:
            assert server.used_bytes < 200_000
            assert sorted(folders_of_objects(tmp_path)) == sorted(
                [alien, alien.parent, foreign.parent, foreign.parent.parent]
            )
            assert await server.store(8) == [StoreOutcome.STORED] * 8
            assert (await server.runner.clear())[0] == 8
        assert foreign.read_bytes() == b"x"

    run(test)


def test_a_store_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            (key,) = keys(1)
            digest, name = key.namespace.digest.hex(), key.chunk_hash.hex()
            (tmp_path / digest / name[:2] / f"{name}.data").mkdir(parents=True)  # a folder in place of the file
            assert await server.store_keys([key]) == [StoreOutcome.FAILED]
            (tmp_path / digest / name[:2] / f"{name}.data").rmdir()
            assert await server.store_keys([key]) == [StoreOutcome.STORED]
            assert await server.runner.adapter.delete([key]) == [True]
            assert folders_of_objects(tmp_path) == []

    run(test)


def test_a_corrupt_object_takes_its_folder_along(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            await server.store(1)
            (file,) = tmp_path.glob("*/*/*.data")
            file.write_bytes(bytes(FrameMemory(1).slot_bytes))
            assert await server.load(1) == [LoadOutcome.CORRUPT]
            assert folders_of_objects(tmp_path) == []

    run(test)


@pytest.mark.parametrize("relative_tmp_dir", ["", "tmp"])
def test_two_servers_take_folders_away_from_each_other(
    tmp_path: Path, relative_tmp_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both store into the same few folders, delete, and scan for what is empty: no write fails, no object is lost."""
    monkeypatch.setattr(fs_native, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(fs_native, "SCAN_SHARE", 1)
    settings: dict[str, Any] = {
        "relative_tmp_dir": relative_tmp_dir,
        "max_capacity_gb": (4 << 20) / GIB,
        "eviction": {"eviction_policy": "LRU"},
    }

    async def hammer(server: Server, seed: int) -> None:
        rng, memory, target = random.Random(seed), FrameMemory(1), FrameMemory(1)
        for number in range(ROUNDS):
            (key,) = keys(1, (seed << 20) + number, namespace(salt=f"{rng.randrange(2)}"))
            key = key._replace(chunk_hash=b"\x11" + key.chunk_hash[1:])
            stored = await server.runner.store([key], [memory.fill(0, key)], lambda: None)
            assert stored == [StoreOutcome.STORED]
            assert await server.runner.adapter.load([key], target.buffers) == [LoadOutcome.LOADED]
            assert target.holds(0, key)
            assert await server.runner.adapter.delete([key]) == [True]
            server.runner.lost([key])

    async def test() -> None:
        async with Server(tmp_path, **settings) as server:
            ready.wait()
            await asyncio.gather(*(hammer(server, rng.getrandbits(40)) for _ in range(2)))
            ready.wait()
            await server.runner.clear()
            ready.wait()
            assert folders_of_objects(tmp_path) == []
            while len(server.runner.ledger):  # what a scan saw before it was deleted goes with the next one
                await asyncio.sleep(0.005)

    def serve() -> None:
        try:
            run(test)
        except BaseException as fault:
            faults.append(fault)
            ready.abort()

    rng = random.Random(7)
    ready = threading.Barrier(2, timeout=40)
    faults: list[BaseException] = []
    servers = [threading.Thread(target=serve) for _ in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    if faults:
        raise faults[0]
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
