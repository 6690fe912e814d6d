"""Every local adapter on a disk that fails: what it gives out is exact, or it is a miss; it never hangs; and once the
disk is well again it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from faults.disk import COUNT, LOADED, MEDIA, STORED, FaultyDisk, Medium, RunningAdapter, run, until
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ResourceError
from lmcache.l2.adapters import raw_table
from support.raw_devices import SLOT_BYTES

_numbers = itertools.count()

# name: (operation, fault, whether it claims to have gone well)
FAULTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "read EIO": ("read", {"error": "EIO"}, False),
    "read short": ("read", {"short": True}, True),  # to the kernel that is the end of the file
    "read torn": ("read", {"torn": True}, True),
    "read misdirected": ("read", {"shift": SLOT_BYTES}, True),
    "read flipped": ("read", {"flip": True}, True),
    "write EIO": ("write", {"error": "EIO"}, False),
    "write ENOSPC": ("write", {"error": "ENOSPC"}, False),
    "write EROFS": ("write", {"error": "EROFS"}, False),
    "write short": ("write", {"short": True}, False),
    "write torn": ("write", {"torn": True}, True),
    "write misdirected": ("write", {"shift": SLOT_BYTES}, True),
    "write flipped": ("write", {"flip": True}, True),
    "second write EIO": ("write", {"error": "EIO", "skip": 1}, False),
}
FILE_FAULTS = {
    f"{operation} {error}": (operation, {"error": error}, False)
    for operation, error in (
        ("create", "ENOSPC"),
        ("create", "EROFS"),
        ("mkdir", "EIO"),
        ("rename", "EIO"),
        ("open", "EIO"),
        ("lookup", "EIO"),
        ("setattr", "EIO"),
    )
}
# What `make test` leaves to `make nightly`: others have the same code, another engine or another kind of file under it.
SLOW_MEDIA = ("fs_native", "raw_file", "raw_loop_uring", "nixl_files")


def media(kinds: str = "") -> pytest.MarkDecorator:
    """Every medium whose name begins like that, as the parameter of a test."""
    chosen = [
        pytest.param(medium, id=medium.name, marks=[pytest.mark.slow] if medium.name in SLOW_MEDIA else [])
        for medium in MEDIA
        if medium.name.startswith(kinds)
    ]
    return pytest.mark.parametrize("medium", chosen)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(tmp_path_factory.mktemp("faulty"))
    yield disk
    disk.close()


@pytest.fixture(autouse=True)
def tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_table, "RETRY_SECONDS", 0.02)


@pytest.mark.parametrize("fault", FAULTS)
@media()
def test_a_medium_that_fails(disk: FaultyDisk, medium: Medium, fault: str) -> None:
    check(disk, medium, *FAULTS[fault])


@media("raw")
def test_a_device_that_cannot_be_flushed(disk: FaultyDisk, medium: Medium) -> None:
    check(disk, medium, "fsync", {"error": "EIO"}, lies=False)


@pytest.mark.parametrize("fault", FILE_FAULTS)
@media("fs")
def test_a_file_system_that_fails(disk: FaultyDisk, medium: Medium, fault: str) -> None:
    check(disk, medium, *FILE_FAULTS[fault])


def check(disk: FaultyDisk, medium: Medium, operation: str, fault: dict[str, Any], lies: bool) -> None:
    # Mapped memory cannot say that it was not written, and the kernel's loop device does not.
    lies |= operation == "write" and (medium.name == "dax" or (medium.is_device and "short" in fault))
    # SQLite believes what it reads: the plugin's file may be beyond repair then.
    ends_well = not (lies and medium.name == "plugin")
    # What dax has written reaches this medium when it is closed, and raw_block flushes it then at the latest.
    until_closed = medium.name == "dax" or operation == "fsync"

    async def test(spec: dict[str, Any]) -> None:
        async with RunningAdapter(spec) as running:
            assert await running.store(0) == [STORED] * COUNT
            assert await running.load(0) == [LOADED] * COUNT
        async with RunningAdapter(spec) as running:
            disk.tell(**{operation: fault})
            said = await running.store(1)
            for seed in range(2):
                await running.load(seed)
            if not until_closed:
                assert disk.tell()[0] > 0
                if ends_well:
                    await running.recover(2)
                    assert lies or holds(said, await running.load(1))
        assert disk.tell()[0] > 0 or not until_closed
        try:
            async with RunningAdapter(spec) as running:
                found = [await running.load(seed) for seed in range(2)]
                if ends_well:
                    await running.recover(3)
        except ResourceError:
            assert not ends_well
        else:
            if not lies:
                assert holds(said, found[1])
                assert operation == "read" or found[0] == [LOADED] * COUNT

    with medium.at(disk.path / str(next(_numbers))) as spec:
        try:
            run(lambda: test(spec))
        finally:
            disk.tell()


def holds(said: list[StoreOutcome], found: list[LoadOutcome]) -> bool:
    """Whether all is there that was said to be stored."""
    return all(there is LOADED for there, outcome in zip(found, said, strict=True) if outcome is STORED)


@pytest.mark.parametrize("operation", ["store", "load"])
@media()
def test_a_medium_that_stands_still(disk: FaultyDisk, medium: Medium, operation: str) -> None:
    """It costs one deadline; what is lent to it stays lent; whenever it goes on, nothing is wrong."""

    async def test(spec: dict[str, Any]) -> None:
        async with RunningAdapter(spec) as running:
            assert await running.store(0) == [STORED] * COUNT
        async with RunningAdapter(spec) as running:
            running.be_quick()
            stalls = "read" if operation == "load" or medium.name == "dax" else "write"
            disk.tell(**{stalls: {"stall": True}})
            outcomes = await (running.store(1) if operation == "store" else running.load(0))
            assert {outcome.name for outcome in outcomes} <= {"FAILED", "MISSING"}
            assert (running.released, running.runner.status()["abandoned"]) == (0, 1)
            suspended = running.runner.status()[f"{operation}s_suspended"]
            assert suspended and {
                o.name for o in await (running.store(2) if operation == "store" else running.load(0))
            } == {"FAILED"}
            assert running.runner.status()["abandoned"] == 1  # nobody else is sent after it
            assert disk.tell()[1] > 0  # now it goes on
            await until(lambda: settled(running))
        async with RunningAdapter(spec) as running:
            assert await running.load(0) == [LOADED] * COUNT
            await running.load(1)
            await running.recover(1)

    async def settled(running: RunningAdapter) -> bool:
        return running.runner.status()["abandoned"] == 0 and running.released == 2

    with medium.at(disk.path / str(next(_numbers))) as spec:
        try:
            run(lambda: test(spec))
        finally:
            disk.tell()
