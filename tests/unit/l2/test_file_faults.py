"""fs_native, and what shares its folders, on disks that fail: faults of single calls (a preloaded shim), read-only
remounts, files that somebody removed, changed, swapped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import lmcache
from lmcache.core.key import ObjectKey
from lmcache.core.limits import L2_BREAKER_MAX_OPEN_SECONDS
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapters import fs_native
from lmcache.testing.frames import FrameMemory, keys
from services import nixl
from unit.l2.support import OneServer, run

HERE = Path(__file__).parent
COUNT = 8
COMPILER = os.environ.get("CC", "cc")
LOADED, MISSING, FAILED = LoadOutcome.LOADED, LoadOutcome.MISSING, LoadOutcome.FAILED

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")


# ---- faults of single calls ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["buffered", "direct"])
def faulty_disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each fault."""
    if shutil.which(COMPILER) is None:
        pytest.skip("needs a C compiler for the shim")
    folder = tmp_path_factory.mktemp("faults")
    shim, control = folder / "io_faults.so", folder / "control"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(shim), str(HERE / "io_faults.c"), "-ldl"], check=True
    )
    control.write_bytes(b"\0\0")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "IO_FAULTS": str(control),
        "PYTHONPATH": str(Path(lmcache.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "io_faults_child.py"), str(folder), request.param],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize(
    ("fault", "during", "after"),
    [
        ("read E", ["FAILED"] * COUNT, ["whole"] * COUNT),
        ("read 3", ["whole"] * 2 + ["FAILED"] + ["whole"] * 5, ["whole"] * COUNT),
        ("read S", ["whole"] * COUNT, ["whole"] * COUNT),
        ("read I", ["whole"] * COUNT, ["whole"] * COUNT),
        ("read Z", ["CORRUPT"] * COUNT, ["MISSING"] * COUNT),  # moved aside
        ("read F", ["CORRUPT"] * COUNT, ["MISSING"] * COUNT),
    ],
)
def test_faults_of_reads(faulty_disk: dict[str, Any], fault: str, during: list[str], after: list[str]) -> None:
    assert faulty_disk[fault]["during"] == during
    assert faulty_disk[fault]["after"] == after
    assert len(faulty_disk[fault]["warnings"]) == ("FAILED" in during)


@pytest.mark.parametrize(
    ("fault", "during", "seen"),
    [
        ("write E", ["FAILED"] * COUNT, ["MISSING"] * COUNT),
        ("write 3", ["STORED"] * 2 + ["FAILED"] + ["STORED"] * 5, ["whole"] * 2 + ["MISSING"] + ["whole"] * 5),
        ("write N", ["FULL"] * COUNT, ["MISSING"] * COUNT),
        ("write S", ["STORED"] * COUNT, ["whole"] * COUNT),
        ("write I", ["STORED"] * COUNT, ["whole"] * COUNT),
    ],
)
def test_faults_of_writes(faulty_disk: dict[str, Any], fault: str, during: list[str], seen: list[str]) -> None:
    assert faulty_disk[fault]["during"] == during
    assert faulty_disk[fault]["seen"] == seen
    assert faulty_disk[fault]["after"] == ["STORED"] * COUNT
    assert faulty_disk[fault]["temporary"] == []
    assert len(faulty_disk[fault]["warnings"]) == ("FAILED" in during)  # once, however often it happens


def test_a_disk_that_lies_about_writes(faulty_disk: dict[str, Any]) -> None:
    """Half of each file is written, success is reported: never whole, never wrong."""
    assert faulty_disk["write T"]["during"] == ["STORED"] * COUNT
    assert all(seen == "CORRUPT" or seen.startswith("wrong ") for seen in faulty_disk["write T"]["seen"])


# ---- folders that change under a server ------------------------------------------------------------------------------
class Server(OneServer):
    def __init__(self, base: Path, kind: str = "fs_native", **settings: Any) -> None:
        place: dict[str, Any] = {"base_path": str(base)}
        if kind == "nixl_store_dynamic":
            nixl.need()
            place = {"backend": "POSIX", "backend_params": {"file_path": str(base), "use_direct_io": "false"}}
        super().__init__({"type": kind, **place, **settings})

    async def verified_load(self, seed: int = 0) -> tuple[list[LoadOutcome], list[str]]:
        """Outcomes, and what is wrong with each frame."""
        wanted, target = keys(COUNT, seed), FrameMemory(COUNT)
        outcomes = await self.runner.load(wanted, target.buffers, lambda: None)
        return outcomes, [target.verify(slot, key) for slot, key in enumerate(wanted)]


def data_file(base: Path, index: int, seed: int = 0) -> Path:
    key = keys(COUNT, seed)[index]
    name = key.chunk_hash.hex()
    return base / key.namespace.digest.hex() / name[:2] / f"{name}.data"


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder))
    yield folder
    while os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


@as_root
@pytest.mark.parametrize("kind", ["fs", "fs_native", "nixl_store_dynamic"])
def test_a_disk_that_becomes_read_only_is_read_on(own_disk: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Server(own_disk, kind) as server:
            await server.store(seed=1)
            mount("--bind", str(own_disk), str(own_disk))  # over it, as the server has files open
            mount("-o", "remount,ro,bind", str(own_disk))
            for seed in range(2, 5):
                assert await server.store(seed=seed) == [StoreOutcome.FAILED] * COUNT
            assert server.runner.status()["stores_suspended"]
            assert (await server.verified_load(1))[0] == [LOADED] * COUNT
            await server.runner.corrupted(keys(1, 1), "test")  # it cannot be moved: never met again all the same
            assert (await server.runner.probe(keys(COUNT, 1)))[0] is False
            mount("-o", "remount,rw,bind", str(own_disk))
            server.clock.advance(L2_BREAKER_MAX_OPEN_SECONDS)
            assert await server.store(seed=2) == [StoreOutcome.STORED] * COUNT
            assert not server.runner.status()["stores_suspended"]
        said = [record.getMessage() for record in caplog.records if "Read-only file system" in record.getMessage()]
        assert 1 <= len(said) <= 2, said  # the fault, and that stores are suspended

    run(test)


def test_removed_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_native, "WATCH_SECONDS", 0.01)

    async def test() -> None:
        async with Server(tmp_path, max_capacity_gb=1) as server:
            await server.store(seed=1)
            await server.store(seed=2)
            before = server.runner.ledger.used_bytes
            for index in range(COUNT):
                data_file(tmp_path, index, 1).unlink()
            while server.runner.status()["objects"] > COUNT:
                await asyncio.sleep(0.005)
            assert server.runner.ledger.used_bytes == before // 2
            shutil.rmtree(data_file(tmp_path, 0, 2).parents[1])
            while server.runner.status()["objects"]:
                await asyncio.sleep(0.005)
            assert server.runner.ledger.used_bytes == 0
            assert await server.store(seed=2) == [StoreOutcome.STORED] * COUNT

    run(test)


def test_of_what_is_known_only_that_is_asked_for_whose_name_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each folder has changed, as it does whenever something was stored in it."""
    monkeypatch.setattr(fs_native, "WATCH_SECONDS", 0.01)

    async def test() -> None:
        async with Server(tmp_path, max_capacity_gb=1) as server:
            adapter, asked = server.runner.adapter, list[ObjectKey]()
            probe = adapter.probe

            async def counted(wanted: Sequence[ObjectKey]) -> list[int | None]:
                asked.extend(wanted)
                return await probe(wanted)

            for seed in range(40):
                await server.store(seed=seed)
            monkeypatch.setattr(adapter, "probe", counted)
            files = [data_file(tmp_path, index, seed) for seed in range(40) for index in range(COUNT)]
            for file in files:
                file.with_suffix(".other").touch()
            files[50].unlink()
            shutil.rmtree(files[100].parent)
            while server.runner.status()["objects"] != sum(map(Path.exists, files)):
                await asyncio.sleep(0.005)
            assert len(asked) < len(files) / 4

    run(test)


def change_a_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_what_is_not_what_its_name_says_never_verifies(tmp_path: Path, kind: str) -> None:
    async def test() -> None:
        async with Server(tmp_path, kind) as server:
            await server.store()
            change_a_bit(data_file(tmp_path, 0), 9000)  # payload
            change_a_bit(data_file(tmp_path, 1), 40)  # header
            os.replace(data_file(tmp_path, 2), data_file(tmp_path, 3))  # misnamed: 3 has the frame of 2
            data_file(tmp_path, 4).write_bytes(os.urandom(FrameMemory(1).slot_bytes))  # foreign
            data_file(tmp_path, 5).write_bytes(b"")
            corrupt = LoadOutcome.CORRUPT
            outcomes, faults = await server.verified_load()
            assert outcomes == [corrupt, corrupt, MISSING, corrupt, corrupt, corrupt, LOADED, LOADED]
            assert faults[6:] == ["", ""]
            assert (await server.verified_load())[0] == [MISSING] * 6 + [LOADED] * 2
            assert len(list((tmp_path / "quarantine").iterdir())) == 5
            assert (await server.store()).count(StoreOutcome.STORED) == 6
            assert await server.verified_load() == ([LOADED] * COUNT, [""] * COUNT)

    run(test)
