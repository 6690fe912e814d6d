"""What a power failure leaves: what was flushed is there, of everything later any part may be there or not, block by
block and in any order. Nothing of it is wrong, and what was flushed and not deleted since is not lost.

TEST_POWER_CUTS says how many failures are tried, TEST_SEED from where.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from faults.disk import COUNT, LOADED, MEDIA, STORED, Medium, RunningAdapter, run
from lmcache.l2.native_device import NativeDevice
from lmcache.testing.frames import keys
from seeds import SEED

CUTS = int(os.environ.get("TEST_POWER_CUTS", "10"))
DELETED = COUNT // 2
SEEDS = range(4)

BY_NAME = {medium.name: medium for medium in MEDIA}
DEVICES = [("raw_file", 4096), ("raw_file", 512), ("raw_file_uring", 512), ("dax", 4096), ("dax", 64)]


@pytest.mark.parametrize("clears", [False, True], ids=["deletes", "clears"])
@pytest.mark.parametrize(("name", "block_bytes"), DEVICES)
def test_a_device_after_a_power_failure(
    tmp_path: Path, name: str, block_bytes: int, clears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is as it was at some moment between a flush and the next, in which the failure comes."""
    print(f"TEST_SEED={SEED} TEST_POWER_CUTS={CUTS}")
    chance = random.Random(SEED)
    with BY_NAME[name].at(tmp_path / "medium") as spec:
        device = tmp_path / "medium" / "device"
        moments: list[list[bytes]] = []  # images of the device, from flush to flush
        flush = NativeDevice.sync

        async def sync(self: NativeDevice) -> int:
            moments[-1].append(device.read_bytes())
            moments.append(moments[-1][-1:])
            return await flush(self)

        async def live() -> None:
            async with RunningAdapter(spec) as running:
                assert await running.store(0) == [STORED] * COUNT
                assert await running.store(1) == [STORED] * COUNT
            moments.append([device.read_bytes()])  # closing flushes
            monkeypatch.setattr(NativeDevice, "sync", sync)
            async with RunningAdapter(spec) as running:
                adapter = running.runner.adapter
                if clears:
                    await adapter.clear()
                else:
                    await adapter.delete(keys(COUNT, 0)[DELETED:])
                moments[-1].append(device.read_bytes())
                for seed in (2, 3):  # where the deleted ones were
                    assert set(await adapter.store(*running.frames(seed))) == {STORED}
                    moments[-1].append(device.read_bytes())

        async def look() -> None:
            async with RunningAdapter(spec) as running:
                found = [await running.load(seed) for seed in SEEDS]
                if not clears:
                    assert found[0][:DELETED] == [LOADED] * DELETED
                    assert found[1] == [LOADED] * COUNT
                await running.recover(4)

        run(live)
        monkeypatch.undo()
        for _ in range(CUTS):
            images = chance.choice(moments)
            with device.open("r+b") as file:
                for at in range(0, len(images[0]), block_bytes):
                    file.write(chance.choice(images)[at : at + block_bytes])
            run(look)


@pytest.mark.parametrize("name", ["fs", "fs_native"])
def test_a_folder_after_a_power_failure(tmp_path: Path, name: str) -> None:
    """A file that was not flushed is there or not, of any length, with zeros where its blocks did not arrive."""
    print(f"TEST_SEED={SEED} TEST_POWER_CUTS={CUTS}")
    chance = random.Random(SEED)
    for number in range(CUTS):
        cut_a_folder(tmp_path / str(number), BY_NAME[name], chance)


def cut_a_folder(folder: Path, medium: Medium, chance: random.Random) -> None:
    flushed: set[Path] = set()

    async def live() -> None:
        async with RunningAdapter(spec) as running:
            assert await running.store(0) == [STORED] * COUNT
        flushed.update(folder.rglob("*.data"))
        async with RunningAdapter(spec) as running:
            assert await running.store(1) == [STORED] * COUNT

    async def look() -> None:
        async with RunningAdapter(spec) as running:
            assert await running.load(0) == [LOADED] * COUNT
            await running.load(1)
            await running.recover(1)
        assert not list(folder.rglob("*.tmp"))

    with medium.at(folder) as spec:
        run(live)
        for path in set(folder.rglob("*.data")) - flushed:
            lose_a_part(path, chance)
        run(look)


def lose_a_part(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    fate = chance.random()
    if fate < 0.2:
        path.unlink()
        return
    if fate < 0.4:  # it had not been renamed
        path = path.rename(path.with_name(f".{path.stem}.0123456789abcdef.1.tmp"))
    blocks = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    arrived = b"".join(block if chance.random() < 0.7 else bytes(len(block)) for block in blocks)
    path.write_bytes(arrived[: chance.choice([0, 4096, chance.randrange(len(content)), len(content)])])
