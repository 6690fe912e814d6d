"""Media that are not what they were when an adapter was opened, or cannot be opened at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from faults.disk import COUNT, LOADED, MEDIA, STORED, FaultyDisk, RunningAdapter, loop_device, run
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import ResourceError
from lmcache.l2.adapters import raw_device
from support.raw_devices import META_BYTES, SLOT_BYTES, make_device

BY_NAME = {medium.name: medium for medium in MEDIA}
LEFT = 3  # objects in what remains of a device

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")


@as_root
@pytest.mark.parametrize("name", ["raw_loop", "raw_loop_uring"])
def test_a_block_device_whose_end_is_lost(tmp_path: Path, name: str) -> None:
    backing = make_device(tmp_path / "backing")
    with loop_device(backing) as device:

        async def test() -> None:
            async with RunningAdapter(BY_NAME[name].spec(device)) as running:
                assert await running.store(0) == [STORED] * COUNT
                os.truncate(backing, META_BYTES + LEFT * SLOT_BYTES + 6000)
                found = await running.load(0)
                assert found[:LEFT] == [LOADED] * LEFT and LOADED not in found[LEFT:]
            async with RunningAdapter(BY_NAME[name].spec(device)) as running:
                found = await running.load(0)
                assert found[:LEFT] == [LOADED] * LEFT and LOADED not in found[LEFT:]

        run(test)


@as_root
@pytest.mark.parametrize("name", ["raw_loop", "raw_file", "dax"])
def test_what_may_not_be_written_to_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_device, "RELEASE_SECONDS", 0.05)
    medium = BY_NAME[name]

    async def test() -> None:
        with pytest.raises(ResourceError) as caught:
            async with RunningAdapter(spec):
                pass
        assert "\n" not in str(caught.value)
        assert any(reason in str(caught.value) for reason in ("Read-only file system", "Operation not permitted"))

    if medium.is_device:
        with loop_device(make_device(tmp_path / "device"), "--read-only") as path:
            spec = medium.spec(path)
            run(test)
        return
    with medium.at(tmp_path / "medium") as spec:
        folder = str(tmp_path / "medium")
        if subprocess.run(["mount", "--bind", folder, folder], check=False).returncode:
            pytest.skip("folders cannot be mounted here")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
            run(test)
        finally:
            subprocess.run(["umount", folder], check=True)


def test_a_folder_that_cannot_be_searched_is_served_by_name(disk: FaultyDisk, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with RunningAdapter(spec) as running:
            assert await running.store(0) == [STORED] * COUNT
        disk.tell(readdir={"error": "EIO", "skip": 2})  # once from start to end: whether it may be listed
        async with RunningAdapter(spec) as running:
            assert running.runner.status()["objects"] == 0
            assert await running.load(0) == [LOADED] * COUNT
            assert await running.store(1) == [STORED] * COUNT
            assert disk.tell()[0] > 0
        async with RunningAdapter(spec) as running:
            assert running.runner.status()["objects"] == 2 * COUNT

    with BY_NAME["fs"].at(disk.path / "medium") as spec:
        run(test)
    assert "could not be searched" in caplog.text


def test_a_failed_write_that_cannot_be_cleaned_up_is_never_seen(disk: FaultyDisk) -> None:
    async def test() -> None:
        async with RunningAdapter(spec) as running:
            disk.tell(write={"error": "EIO"}, unlink={"error": "EIO"})
            assert STORED not in await running.store(0)
            assert disk.tell()[0] > 0
            assert list(Path(spec["base_path"]).rglob("*.tmp"))
            assert await running.load(0) == [LoadOutcome.MISSING] * COUNT
            await running.recover(0)
        async with RunningAdapter(spec) as running:
            assert await running.load(0) == [LOADED] * COUNT
        assert not list(Path(spec["base_path"]).rglob("*.tmp"))

    with BY_NAME["fs"].at(disk.path / "medium") as spec:
        run(test)
