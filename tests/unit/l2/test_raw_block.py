"""raw_block on files: what it refuses, keeps, loses and never gets wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache import _native
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_types import check, parse_adapter
from lmcache.l2.adapters import raw_device, raw_format
from lmcache.testing.frames import FrameMemory, keys, namespace
from support.raw_devices import META_BYTES, SLOT_BYTES, RawServer, build_raw_block, make_device

STORED, FULL, ALREADY_THERE = StoreOutcome.STORED, StoreOutcome.FULL, StoreOutcome.ALREADY_THERE
LOADED, MISSING, CORRUPT = LoadOutcome.LOADED, LoadOutcome.MISSING, LoadOutcome.CORRUPT

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")


@pytest.fixture(autouse=True)
def soon_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device in use is waited for; nobody gives it up here."""
    monkeypatch.setattr(raw_device, "RELEASE_SECONDS", 0.05)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(whole())


async def fill(path: Path, count: int = 8, **settings: object) -> None:
    async with RawServer(path, **settings) as server:
        assert await server.store(keys(count)) == [STORED] * count


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return make_device(tmp_path / "device")


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def slot_offset(slot: int) -> int:
    return META_BYTES + slot * SLOT_BYTES


def table_offset() -> int:
    return raw_format.Geometry.plan(SLOT_BYTES, 4096, META_BYTES).table_offset


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"persist_enabled": False}, '"persist_enabled" must be true'),
        ({"slot_bytes": 16384 + 512}, '"slot_bytes" must be a multiple of block_align'),
        ({"block_align": 3000}, '"block_align" must be a power of two'),
        ({"header_bytes": 16384}, '"header_bytes" must be less than slot_bytes'),
        ({"meta_total_bytes": 65536 + 512}, '"meta_total_bytes" must be a multiple of 4096'),
        ({"meta_magic": "short"}, '"meta_magic" must be 8 printable'),
        ({"io_engine": "uring"}, "did you mean io_uring"),
        ({"iouring_queue_depth": 0}, '"iouring_queue_depth" must be a whole number'),
    ],
)
def test_keys_that_do_not_fit_are_refused(device: Path, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_raw_block(device, **settings)


def test_the_documented_commands_are_accepted() -> None:
    for extra in (
        {"block_align": 4096, "header_bytes": 4096, "meta_total_bytes": 268435456, "use_odirect": True}
        | {"num_store_workers": 2, "num_lookup_workers": 1, "num_load_workers": 4},
        {"io_engine": "io_uring", "iouring_queue_depth": 256, "use_odirect": True},
        {
            "load_checkpoint_on_init": False,
            "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1},
        },
    ):
        spec = {"type": "raw_block", "device_path": "/dev/nvme0n1", "slot_bytes": 1048576, **extra}
        config: Any = parse_adapter(spec, 0)
        assert config.meta_checkpoint_interval_sec == 60


@pytest.mark.parametrize(
    ("offset", "content", "name"),
    [
        (0x438, b"\x53\xef", "an ext file system"),
        (512, b"EFI PART", "a GPT partition table"),
        (0, b"XFSB", "an XFS file system"),
        (0x10040, b"_BHRfS_M", "a Btrfs file system"),
        (510, b"\x55\xaa", "an MBR partition table"),
        (70_000, b"something", "data of an unknown kind"),
        (META_BYTES + 64 * SLOT_BYTES - 9, b"at the end", "data of an unknown kind"),
        (0, b"LMCRAW01 but not quite", "a damaged cache"),
    ],
)
def test_a_device_of_somebody_else_is_refused(device: Path, offset: int, content: bytes, name: str) -> None:
    overwrite(device, offset, content)
    before = device.read_bytes()

    async def test() -> None:
        with pytest.raises(ResourceError, match=f'holds {name}.*nothing was changed.*"reformat"'):
            await build_raw_block(device).open(RawServer(device).inventory)
        assert device.read_bytes() == before
        await fill(device, reformat=True)
        async with RawServer(device) as server:  # ours from now on, also without the flag
            assert await server.load(keys(8)) == [LOADED] * 8

    run(test)


def test_a_real_file_system_is_refused(device: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", "-F", str(device)], check=True)

    async def test() -> None:
        with pytest.raises(ResourceError, match="an ext file system"):
            await build_raw_block(device).open(RawServer(device).inventory)

    run(test)


def test_one_server_at_a_time(device: Path) -> None:
    async def test() -> None:
        async with RawServer(device) as server:
            with pytest.raises(ResourceError, match="in use by another server"):
                await build_raw_block(device).open(RawServer(device).inventory)
            assert await server.store(keys(2)) == [STORED] * 2
        async with RawServer(device) as server:
            assert await server.load(keys(2)) == [LOADED] * 2

    run(test)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"slot_bytes": 32768}, "a cache with slot_bytes 16384"),
        ({"block_align": 8192}, "a cache with block_align 4096"),
        ({"meta_total_bytes": 131072}, "a cache with meta_total_bytes 65536"),
        ({"meta_magic": "OTHERMAG"}, "a cache with meta_magic 'LMCIDX01'"),
    ],
)
def test_another_configuration_is_refused(device: Path, settings: dict[str, object], sentence: str) -> None:
    async def test() -> None:
        await fill(device)
        with pytest.raises(ResourceError, match=sentence):
            await build_raw_block(device, **settings).open(RawServer(device).inventory)
        async with RawServer(device) as server:
            assert await server.load(keys(8)) == [LOADED] * 8
        async with RawServer(device, reformat=True, **settings) as server:
            assert await server.adapter.probe(keys(8)) == [None] * 8
            assert await server.store(keys(8)) == [STORED] * 8

    run(test)


def test_devices_that_are_none_or_too_small(tmp_path: Path) -> None:
    async def test() -> None:
        small = make_device(tmp_path / "small", 0)
        for path, error, sentence in (
            (tmp_path / "absent", ResourceError, "fallocate"),
            (tmp_path, ConfigError, "must be a block device or a file"),
            (small, ConfigError, "use a larger device"),
        ):
            with pytest.raises(error, match=sentence):
                await build_raw_block(path).open(RawServer(small).inventory)

    run(test)


# ---- what is kept ----------------------------------------------------------------------------------------------------
def test_renaming_the_device_keeps_the_cache(device: Path) -> None:
    async def test() -> None:
        await fill(device)
        moved = device.rename(device.with_name("elsewhere"))
        async with RawServer(moved) as server:
            assert await server.load(keys(8)) == [LOADED] * 8

    run(test)


def test_engines_and_o_direct_may_change(device: Path) -> None:
    async def test() -> None:
        await fill(device, io_engine="io_uring")
        async with RawServer(device, use_odirect=False, enable_zero_copy=False) as server:
            assert await server.load(keys(8)) == [LOADED] * 8
            assert await server.store(keys(8, seed=1)) == [STORED] * 8
        async with RawServer(device) as server:
            assert await server.load(keys(8) + keys(8, seed=1)) == [LOADED] * 16

    run(test)


def test_io_uring_that_is_refused_becomes_threads(
    device: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_native, "io_uring_refusal", lambda: errno.EPERM)

    async def test() -> None:
        async with RawServer(device, io_engine="io_uring") as server:
            assert server.adapter.status()["io_uring"] == 0
            assert await server.store(keys(2)) == [STORED] * 2

    run(test)
    assert "io_uring is refused (Operation not permitted); threads do the I/O" in caplog.text


@pytest.mark.parametrize("settings", [{"load_checkpoint_on_init": False}, {"meta_version": 2}])
def test_starting_empty(device: Path, settings: dict[str, object]) -> None:
    async def test() -> None:
        await fill(device)
        async with RawServer(device, **settings) as server:
            assert await server.adapter.probe(keys(8)) == [None] * 8
            assert await server.store(keys(2, seed=1)) == [STORED] * 2
        settings.pop("load_checkpoint_on_init", None)
        async with RawServer(device, **settings) as server:  # what was forgotten does not come back
            assert set(server.inventory.objects) == set(keys(2, seed=1))

    run(test)


def test_recency_survives(device: Path) -> None:
    """Loads count at the next checkpoint, which waits for a quiet device."""

    async def test() -> None:
        await fill(device, 4)
        async with RawServer(device, meta_checkpoint_interval_sec=0.01, meta_idle_quiet_ms=1) as server:
            assert await server.load(keys(4)[2:3]) == [LOADED]
            before = device.read_bytes()[:META_BYTES]
            while device.read_bytes()[:META_BYTES] == before:
                await asyncio.sleep(0.005)
            copy = device.with_name("copy")
            copy.write_bytes(device.read_bytes())
        async with RawServer(copy) as server:
            assert server.inventory.order == [keys(4)[i] for i in (2, 0, 1, 3)]

    run(test)


def test_a_quiet_device_is_left_alone_without_periodic_checkpoints(device: Path) -> None:
    async def test() -> None:
        await fill(device, 4)
        settings = {"meta_checkpoint_interval_sec": 0.001, "meta_enable_periodic": False}
        async with RawServer(device, **settings) as server:
            before = device.read_bytes()
            await server.load(keys(4)[2:3])
            await asyncio.sleep(0.05)
            assert device.read_bytes() == before
        async with RawServer(device) as server:
            assert server.inventory.order[0] == keys(4)[2]

    run(test)


# ---- capacity --------------------------------------------------------------------------------------------------------
def test_capacity_is_a_hard_cap(device: Path) -> None:
    cap = META_BYTES + 10 * SLOT_BYTES + 5000
    sentinel = b"not ours" * 100
    size = META_BYTES + 64 * SLOT_BYTES

    async def test() -> None:
        async with RawServer(device, capacity_bytes=cap) as server:
            overwrite(device, cap, sentinel)
            assert server.adapter.capacity.limit_bytes == 10 * SLOT_BYTES
            assert await server.store(keys(12)) == [STORED] * 10 + [FULL] * 2
            assert await server.adapter.delete(keys(12)[3:6]) == [True] * 3
            assert await server.store(keys(4, seed=1)) == [STORED] * 3 + [FULL]
            assert server.adapter.status()["free_slots"] == 0
        content = device.read_bytes()
        assert len(content) == size and content[cap:].rstrip(b"\0") == sentinel
        async with RawServer(device, max_capacity_gb=(META_BYTES + 5 * SLOT_BYTES) / (1 << 30)) as server:
            assert len(server.inventory.objects) == 5

    run(test)


@pytest.mark.parametrize(("slots", "notes"), [(20, 0), (21, 1), (1 << 20, 1)])
def test_a_capacity_that_the_device_does_not_have_is_said(tmp_path: Path, slots: int, notes: int) -> None:
    path = make_device(tmp_path / "device", 20)
    device_bytes = path.stat().st_size
    wanted_bytes = device_bytes + (slots - 20) * SLOT_BYTES
    sizes = {"slot_bytes": SLOT_BYTES, "meta_total_bytes": META_BYTES, "capacity_bytes": wanted_bytes}
    said = check(parse_adapter({"type": "raw_block", "device_path": str(path), **sizes}, 0))
    assert len(said) == notes
    assert all(f"capacity_bytes {wanted_bytes} is more than the {device_bytes} bytes of" in note for note in said)


def test_metadata_bounds_the_slots(tmp_path: Path) -> None:
    path = make_device(tmp_path / "device", 2000, meta_bytes=16384)
    spec = {"type": "raw_block", "device_path": str(path), "slot_bytes": SLOT_BYTES, "meta_total_bytes": 16384}
    (note,) = check(parse_adapter(spec, 0))
    assert "has room for 72 of 2000 slots" in note

    async def test() -> None:
        async with RawServer(path, meta_total_bytes=16384) as server:
            assert server.adapter.status()["slots"] == 72

    run(test)


def test_objects_that_do_not_fit_a_slot(device: Path) -> None:
    async def test() -> None:
        memory, wanted = FrameMemory(1, 20_000), keys(1)
        async with RawServer(device, header_bytes=8192) as server:
            assert server.adapter.capacity.largest_object_bytes == SLOT_BYTES - 4096
            assert await server.adapter.store(wanted, [memory.fill(0, wanted[0])]) == [StoreOutcome.TOO_LARGE]

    run(test)


def test_more_namespaces_than_the_table_can_name(device: Path) -> None:
    async def test() -> None:
        wanted = [keys(1, of=namespace(salt=str(number)))[0] for number in range(20)]
        async with RawServer(device) as server:
            assert await server.store(wanted) == [STORED] * 20
        async with RawServer(device) as server:
            assert await server.load(wanted) == [LOADED] * 20
            assert server.adapter.status()["scanned_slots"] == 18

    run(test)


@as_root
def test_a_full_disk_under_a_sparse_file(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], check=True)
    try:
        path = make_device(folder / "device")

        async def test() -> None:
            async with RawServer(path) as server:
                outcomes = await server.store(keys(30))
                stored = outcomes.count(STORED)
                assert 5 < stored < 16 and set(outcomes) == {STORED, FULL}
                stored_keys = [key for key, outcome in zip(keys(30), outcomes, strict=True) if outcome is STORED]
                assert await server.load(stored_keys) == [LOADED] * stored

        run(test)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# ---- damage ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["header", "payload", "torn", "foreign slot", "older generation"])
def test_damaged_slots_are_misses(device: Path, place: str) -> None:
    async def test() -> None:
        await fill(device)
        content = device.read_bytes()
        if place == "header":
            flip(device, slot_offset(2) + 2500)
        elif place == "payload":
            flip(device, slot_offset(2) + 9000)
        elif place == "torn":
            overwrite(device, slot_offset(2) + 8192, content[slot_offset(3) + 8192 : slot_offset(4)])
        elif place == "foreign slot":
            overwrite(device, slot_offset(2), content[slot_offset(3) : slot_offset(4)])
        else:
            previous = content[slot_offset(2) : slot_offset(2) + 4096]
            async with RawServer(device) as server:
                # A start erases what free slots hold; while that has hold of the slot, the object goes into another.
                while (header := device.read_bytes()[slot_offset(2) :][:4096]) == previous or not any(header):
                    await server.adapter.delete([keys(8)[2]])
                    await server.store([keys(8)[2]])
            overwrite(device, slot_offset(2), content[slot_offset(2) : slot_offset(3)])
        async with RawServer(device, meta_verify_on_load=False) as server:
            expected = [LOADED] * 2 + [CORRUPT] + [LOADED] * 5
            assert await server.load(keys(8)) == expected
            if place not in ("payload", "torn"):  # those only the payload's checksum can tell; the runner deletes them
                assert (await server.load(keys(8)))[2] is MISSING

    run(test)


def test_slots_are_verified_after_the_start(device: Path) -> None:
    async def test() -> None:
        await fill(device)
        overwrite(device, slot_offset(5), bytes(4096))
        async with RawServer(device) as server:
            while keys(8)[5] in server.inventory.objects:
                await asyncio.sleep(0.005)
            assert len(server.inventory.objects) == 7
            assert await server.load(keys(8)) == [LOADED] * 5 + [MISSING] + [LOADED] * 2

    run(test)


def test_a_damaged_table_is_read_from_the_slots(device: Path) -> None:
    async def test() -> None:
        await fill(device)
        flip(device, table_offset() + 1000)
        async with RawServer(device) as server:
            assert set(server.inventory.objects) == set(keys(8))
            assert server.adapter.status()["scanned_slots"] == 64
            assert await server.load(keys(8)) == [LOADED] * 8
        async with RawServer(device) as server:  # repaired
            assert server.adapter.status()["scanned_slots"] == 0
            assert len(server.inventory.objects) == 8

    run(test)


def test_cleared_objects_do_not_come_back_from_slots(device: Path) -> None:
    async def test() -> None:
        async with RawServer(device) as server:
            await server.store(keys(8))
            assert await server.adapter.clear() == (8, 8 * SLOT_BYTES)
            assert await server.store(keys(2, seed=1)) == [STORED] * 2
        flip(device, table_offset() + 1000)
        async with RawServer(device) as server:
            assert set(server.inventory.objects) == set(keys(2, seed=1))

    run(test)


def test_either_superblock_will_do(device: Path) -> None:
    async def test() -> None:
        await fill(device)
        for copy in (0, 4096):
            content = device.read_bytes()
            flip(device, copy + 100)
            async with RawServer(device) as server:
                assert len(server.inventory.objects) == 8
            overwrite(device, 0, content[:8192])

    run(test)


def test_a_truncated_file(device: Path) -> None:
    async def test() -> None:
        await fill(device)
        os.truncate(device, slot_offset(5) + 6000)
        async with RawServer(device) as server:
            assert await server.load(keys(8)) == [LOADED] * 5 + [MISSING] * 3
            os.truncate(device, slot_offset(3) + 6000)
            assert await server.load(keys(8)) == [LOADED] * 3 + [CORRUPT] * 2 + [MISSING] * 3

    run(test)


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    """Real alignment rules: a misaligned transfer is refused here, and done on a file."""
    backing = make_device(tmp_path / "backing")
    made = subprocess.run(
        ["losetup", "--direct-io=on", "--show", "-f", str(backing)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"loop devices cannot be made here: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    try:
        yield path
    finally:
        subprocess.run(["losetup", "-d", str(path)], check=True)


@as_root
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_a_block_device(loop_device: Path, engine: str) -> None:
    async def test() -> None:
        async with RawServer(loop_device, io_engine=engine) as server:
            assert await server.store(keys(64)) == [STORED] * 64
            assert await server.load(keys(64)) == [LOADED] * 64
            assert server.adapter.status()["buffered_fallbacks"] == 0
            with pytest.raises(ResourceError, match="in use"):
                await build_raw_block(loop_device).open(RawServer(loop_device).inventory)
            unaligned, wanted = memoryview(bytearray(SLOT_BYTES + 4097)), keys(1)
            start = -_native.buffer_address(unaligned) % 4096 + 1
            assert await server.adapter.load(wanted, [unaligned[start : start + SLOT_BYTES]]) == [LOADED]
            assert server.adapter.status()["copied_transfers"] >= 1
        async with RawServer(loop_device) as server:
            assert await server.load(keys(64)) == [LOADED] * 64

    run(test)


@as_root
def test_a_mounted_device_is_refused(tmp_path: Path) -> None:
    backing = make_device(tmp_path / "backing", 512)
    made = subprocess.run(["losetup", "--show", "-f", str(backing)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"loop devices cannot be made here: {made.stderr.strip()}")
    path, folder = made.stdout.strip(), tmp_path / "mounted"
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", path], check=True)
        subprocess.run(["mount", path, str(folder)], check=True)
        try:

            async def test() -> None:
                with pytest.raises(ResourceError, match="is in use"):
                    await build_raw_block(Path(path), reformat=True).open(RawServer(Path(path)).inventory)

            run(test)
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    finally:
        subprocess.run(["losetup", "-d", path], check=True)


def test_namespaces_without_objects_make_room_for_others(device: Path) -> None:
    """A salt a user, for months: the device names only so many of them, and memory is for those that have objects."""

    async def go() -> None:
        async with RawServer(device) as server:
            [kept] = keys(1, of=namespace(salt="kept"))
            assert await server.store([kept]) == [STORED]
            for user in range(100):
                [key] = keys(1, of=namespace(salt=f"user {user}"))
                assert await server.store([key]) == [STORED]
                assert await server.load([key, kept]) == [LOADED, LOADED]
                await server.adapter.delete([key])
                assert await server.load([key]) == [MISSING]
            assert await server.store(keys(1, of=namespace(salt="last"))) == [STORED]
            index = server.adapter.index
            assert index is not None
            index.core.check()
            assert len(index.spaces.names) == 2
        async with RawServer(device) as server:
            # The table names both, so no header had to be looked at.
            assert server.adapter.status()["scanned_slots"] == 0
            assert await server.load([kept, *keys(1, of=namespace(salt="last"))]) == [LOADED, LOADED]

    run(go)


def test_a_number_that_names_another_namespace_never_gives_its_objects(device: Path) -> None:
    """Random stores, deletions and restarts with many namespaces on a device that can name two."""

    async def go() -> None:
        dice = random.Random(7)
        known: set[ObjectKey] = set()
        for _ in range(12):
            server = RawServer(device)
            await server.adapter.open(server.inventory)
            await server.inventory.completed.wait()
            assert set(server.inventory.objects) == known
            assert await server.load(list(known)) == [LOADED] * len(known)
            for _ in range(60):
                [key] = keys(1, of=namespace(salt=f"user {dice.randrange(12)}"))
                if dice.random() < 0.5:
                    await server.store([key])
                    known.add(key)
                else:
                    await server.adapter.delete([key])
                    known.discard(key)
                assert server.adapter.index is not None
                server.adapter.index.core.check()
            await server.adapter.close()

    run(go)


@pytest.mark.parametrize("slots", [72, 80])  # a page of the table, and a little more
def test_a_number_given_to_another_while_fewer_slots_were_used(tmp_path: Path, slots: int) -> None:
    """Entries beyond the slots in use name a namespace that is gone meanwhile. Chunk hashes are those of the prompts,
    in every namespace."""
    device = make_device(tmp_path / "device", 150)

    async def go() -> None:
        previous, later = keys(150, of=namespace(salt="previous")), keys(150, of=namespace(salt="later"))
        async with RawServer(device) as server:
            assert await server.store(previous) == [STORED] * 150
            await server.adapter.delete(previous[72:80])
        async with RawServer(device, capacity_bytes=META_BYTES + slots * SLOT_BYTES) as server:
            await server.adapter.delete(list(server.inventory.objects))
            assert await server.store([later[120]]) == [STORED]
        async with RawServer(device) as server:
            assert set(server.inventory.objects) == {later[120]}
            assert await server.load([later[120], later[121]]) == [LOADED, MISSING]

    run(go)
