"""dax on files: recovery, what it refuses, capacity in slots, pages that are lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import dax, dax_format
from lmcache.l2.native_mapping import NativeMapping
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import PAYLOAD_BYTES, FrameMemory, keys, namespace
from manual_clock import ManualClock
from unit.l2.support import OneServer, eviction_order, run

SLOTS = 40
SIZE_GB = (8192 + SLOTS * 128 + 4096 + SLOTS * (PAYLOAD_BYTES + 4096)) / GIB
GEOMETRY = dax_format.Geometry.of(int(SIZE_GB * GIB), PAYLOAD_BYTES)
STORED, FULL, THERE = StoreOutcome.STORED, StoreOutcome.FULL, StoreOutcome.ALREADY_THERE
LOADED, MISSING = LoadOutcome.LOADED, LoadOutcome.MISSING


class Server(OneServer):
    def __init__(self, device: Path, **settings: Any) -> None:
        device.touch()
        spec = {"type": "dax", "device_path": str(device), "max_dax_size_gb": SIZE_GB, "slot_bytes": PAYLOAD_BYTES}
        super().__init__({**spec, **settings})


def refusal(kind: type[LMCacheError], device: Path, **settings: Any) -> str:
    async def test() -> None:
        async with Server(device, **settings):
            pass

    with pytest.raises(kind) as caught:
        asyncio.run(test())
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--l2-adapter 1 (dax)")
    return str(caught.value)


def test_content_recency_and_usage_survive_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        settings = {"eviction": {"eviction_policy": "LRU"}}
        async with Server(tmp_path / "d", **settings) as server:
            await server.store(4, seed=1)
            await server.store(4, seed=2)
            await server.load(2, seed=1)
            before = server.runner.status()
        async with Server(tmp_path / "d", **settings) as server:
            assert server.runner.status() == before and before["objects"] == 8
            first, second = keys(4, 1), keys(4, 2)
            assert eviction_order(server.runner.ledger) == [first[3], first[2], *second[::-1], first[1], first[0]]
            assert await server.load(4, seed=1) == [LOADED] * 4 and await server.load(4, seed=2) == [LOADED] * 4
            assert all(server.runner.ledger.known([*first, *second])) and len(server.runner.ledger) == 8
        async with Server(tmp_path / "d", persist_enabled=False):
            pass
        async with Server(tmp_path / "d") as server:
            assert server.runner.status()["objects"] == 0

    run(test)


def test_usage_is_counted_in_slots(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path / "d") as server:
            status = server.runner.status()
            assert status["slots"] == SLOTS and status["capacity_bytes"] == SLOTS * (PAYLOAD_BYTES + 4096)
            small, key = FrameMemory(1, 100), keys(1, 7)[0]
            assert await server.runner.store([key], [small.fill(0, key)], lambda: None) == [STORED]
            assert server.runner.status()["used_bytes"] == PAYLOAD_BYTES + 4096
            assert (await server.store(30, 1))[-1] is STORED
            outcomes = await server.store(30, 2)
            assert outcomes == [STORED] * 9 + [FULL] * 21  # a prefix
            assert server.runner.status()["free_slots"] == 0 and server.runner.status()["full"]

    run(test)


def test_eviction_makes_room_in_slots(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path / "d", eviction={"eviction_policy": "LRU"}) as server:
            for seed in range(6):
                assert await server.store(16, seed) == [STORED] * 16
            assert await server.load(16, 5) == [LOADED] * 16
            assert await server.load(16, 0) == [MISSING] * 16

    run(test)


def test_a_configured_cap_below_the_device_holds(tmp_path: Path) -> None:
    async def test() -> None:
        cap = 10 * (PAYLOAD_BYTES + 4096) / GIB
        async with Server(tmp_path / "d", max_capacity_gb=cap) as server:
            assert await server.store(16) == [STORED] * 10 + [FULL] * 6

    run(test)


def test_what_is_larger_than_a_slot_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Server(tmp_path / "d") as server:
            large, wanted = FrameMemory(2, PAYLOAD_BYTES + 1), keys(2, 9, namespace("large"))
            buffers = [large.fill(slot, key) for slot, key in enumerate(wanted)]
            for _ in range(9):
                assert await server.runner.store(wanted, buffers, lambda: None) == [StoreOutcome.TOO_LARGE] * 2
            assert await server.store() == [STORED] * 8
            assert not server.runner.status()["stores_suspended"]
        assert sum("are not stored" in record.message for record in caplog.records) == 1

    run(test)


def test_a_slot_that_is_read_is_not_written(tmp_path: Path) -> None:
    """Objects are deleted, and others stored in a full device, while they are loaded: what is loaded is right."""

    async def test() -> None:
        async with Server(tmp_path / "d", num_load_workers=2, num_store_workers=2) as server:
            adapter, sources, target = server.runner.adapter, FrameMemory(2 * SLOTS), FrameMemory(SLOTS)
            batches = [keys(SLOTS, 1), keys(SLOTS, 2)]
            for turn, batch in enumerate(batches):
                for slot, key in enumerate(batch):
                    sources.fill(turn * SLOTS + slot, key)
            await adapter.store(batches[0], sources.buffers[:SLOTS])
            for turn in range(1, 20):
                present, coming = batches[1 - turn % 2], batches[turn % 2]
                buffers = sources.buffers[SLOTS:] if turn % 2 else sources.buffers[:SLOTS]
                loading = asyncio.ensure_future(adapter.load(present, target.buffers))
                await asyncio.sleep(0)
                await adapter.delete(present)
                stored = await adapter.store(coming, buffers)
                assert await loading == [LOADED] * SLOTS
                assert all(target.verify(slot, key) == "" for slot, key in enumerate(present))
                missing = [at for at, outcome in enumerate(stored) if outcome is FULL]  # slots that were still read
                rest = await adapter.store([coming[at] for at in missing], [buffers[at] for at in missing])
                assert rest == [STORED] * len(missing)

    run(test)


def test_a_store_without_memory_gives_back_its_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the objects are written and the entries of those that nobody needs cannot be erased."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    async def test() -> None:
        async with Server(tmp_path / "d") as server:
            adapter, wanted = server.runner.adapter, keys(SLOTS)
            frames = [server.memory.fill(slot, key) for slot, key in enumerate(wanted)]
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(NativeMapping, "write", no_memory)
                await adapter.store(wanted, frames)
            assert adapter.status()["free_slots"] == SLOTS and adapter.status()["lost_slots"] == 0
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(NativeMapping, "write_records", no_memory)
                await asyncio.gather(adapter.store(wanted[:8], frames[:8]), adapter.store(wanted[:8], frames[:8]))
            assert adapter.status()["free_slots"] == SLOTS - 8
            await adapter.clear()
            assert await adapter.store(wanted, frames) == [STORED] * SLOTS

    run(test)


def test_a_store_that_is_cancelled_ends_with_its_copies(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path / "d") as server:
            adapter, wanted = server.runner.adapter, keys(SLOTS)
            frames = [server.memory.fill(slot, key) for slot, key in enumerate(wanted)]
            storing = asyncio.ensure_future(adapter.store(wanted, frames))
            await asyncio.sleep(0)
            storing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await storing
            assert adapter.status()["free_slots"] == SLOTS
            assert await adapter.store(wanted, frames) == [STORED] * SLOTS
            assert await server.load(SLOTS) == [LOADED] * SLOTS

    run(test)


# ---- content that is not what it should be ---------------------------------------------------------------------------
def entries(device: Path) -> list[int]:
    """Slots in use, by the directory."""
    data = device.read_bytes()
    used = []
    for slot in range(SLOTS):
        (frame_bytes,) = struct.unpack_from("<Q", data, 4096 + slot * 128 + 64)
        used += [slot] if frame_bytes else []
    return used


def change(device: Path, offset: int, data: bytes) -> None:
    with open(device, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_damaged_entries_are_free_slots(tmp_path: Path) -> None:
    device = tmp_path / "d"

    async def test() -> None:
        async with Server(device) as server:
            await server.store(8)
        slots = entries(device)
        assert len(slots) == 8
        place = dax_format.Geometry.of(int(SIZE_GB * GIB) // 4096 * 4096, PAYLOAD_BYTES).entry_place
        whole = device.read_bytes()
        change(device, place(slots[0]) + 3, b"\x00\xff")  # a torn one
        change(device, place(slots[1]), whole[place(slots[2]) : place(slots[2]) + 128])  # a misdirected one
        change(device, place(39), whole[place(slots[3]) : place(slots[3]) + 128])
        async with Server(device) as server:
            assert server.runner.status()["objects"] == 6
            assert server.runner.status()["free_slots"] == SLOTS - 6
            outcomes = await server.load(8)
            assert outcomes.count(LOADED) == 6 and outcomes.count(MISSING) == 2
            assert (await server.store(8)).count(STORED) == 2
            assert await server.load(8) == [LOADED] * 8

    run(test)


def test_a_frame_that_does_not_verify_is_erased(tmp_path: Path) -> None:
    device = tmp_path / "d"

    async def test() -> None:
        async with Server(device) as server:
            await server.store(8)
            change(device, GEOMETRY.slot_place(entries(device)[0]) + 5000, b"flipped")
            target, wanted = FrameMemory(8), keys(8)
            assert await server.runner.load(wanted, target.buffers, lambda: None) == [LOADED] * 8
            bad = [key for slot, key in enumerate(wanted) if target.verify(slot, key)]
            assert len(bad) == 1
            await server.runner.corrupted(bad, "payload checksum")
            assert (await server.load(8)).count(MISSING) == 1 and len(entries(device)) == 7

    run(test)


def test_other_sizes_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Server(tmp_path / "d") as server:
            await server.store(8)
        async with Server(tmp_path / "d", slot_bytes=PAYLOAD_BYTES * 2) as server:
            assert server.runner.status()["objects"] == 0
            assert await server.load(8) == [MISSING] * 8
            assert await server.store(8, seed=1) == [STORED] * 8
        assert "was made with other sizes" in caplog.text
        async with Server(tmp_path / "d") as server:
            assert server.runner.status()["objects"] == 0  # and back: older content is not met again
            assert await server.load(8) == [MISSING] * 8

    run(test)


def test_a_lost_page_costs_one_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = tmp_path / "d"

    async def test() -> None:
        async with Server(device) as server:
            await server.store(SLOTS)
            os.truncate(device, GEOMETRY.slot_place(SLOTS - 2))  # as if the medium had lost its last two slots
            outcomes = await server.load(SLOTS)
            assert outcomes.count(LOADED) == SLOTS - 2 and outcomes.count(LoadOutcome.CORRUPT) == 2
            assert await server.load(SLOTS) == [MISSING if o is LoadOutcome.CORRUPT else o for o in outcomes]
            assert server.runner.status()["lost_slots"] == 2
            assert len(entries(device)) == SLOTS - 2  # the next start does not count them
            await server.runner.clear()
            assert await server.store(SLOTS) == [STORED] * (SLOTS - 2) + [FULL] * 2
            assert await server.load(SLOTS - 2) == [LOADED] * (SLOTS - 2)
        assert "the medium fails in slot" in caplog.text

    run(test)


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_a_device_belongs_to_one_server(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path / "d"):
            other = Server(tmp_path / "d")
            with pytest.raises(ResourceError, match="is in use by another process"):
                await other.runner.open()
        async with Server(tmp_path / "d"):
            pass

    run(test)


def test_what_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"PRECIOUS" * 1000)
    assert "holds something that is not this cache's" in refusal(ResourceError, tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == b"PRECIOUS" * 1000


def test_paths_that_cannot_be_devices_are_refused(tmp_path: Path) -> None:
    missing = parse_adapter(
        {"type": "dax", "device_path": str(tmp_path / "no"), "max_dax_size_gb": SIZE_GB, "slot_bytes": 4096}, 0
    )

    async def test() -> None:
        with pytest.raises(ResourceError, match="does not exist"):
            await Runner(build(missing), Metrics().l2, ManualClock()).open()

    asyncio.run(test())
    assert "is neither a DAX device nor a file" in refusal(ConfigError, tmp_path)
    assert "is neither a DAX device nor a file" in refusal(ConfigError, Path("/dev/null"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_dax_size_gb": 0.0009, "slot_bytes": 1 << 20}, "has no room for a slot"),
        ({"max_dax_size_gb": 0}, '"max_dax_size_gb" must be a number above 0'),
        ({"slot_bytes": 0}, '"slot_bytes" must be a whole number'),
        ({"num_load_workers": 0}, '"num_load_workers"'),
        ({"num_workers": 1}, "did you mean num_"),
        ({"slots": 1}, 'unknown key "slots"'),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    assert words in refusal(ConfigError, tmp_path / "d", **settings)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_a_device_without_room_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], check=True)
    try:
        assert "left; lower it" in refusal(ResourceError, small / "d")
        assert os.statvfs(small).f_bfree > 0  # the attempt has not filled it
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_kill_in_the_middle_of_a_batch_leaves_a_prefix(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from lmcache.l2.adapter_types import build, parse_adapter
        from lmcache.testing.contract_run import RecordingInventory
        from lmcache.testing.frames import FrameMemory, keys

        async def main():
            spec = {"type": "dax", "device_path": sys.argv[1], "max_dax_size_gb": 0.02, "slot_bytes": 1 << 18}
            adapter = build(parse_adapter(spec, 0)).adapter
            await adapter.open(RecordingInventory())
            memory = FrameMemory(32, 1 << 18)
            wanted = keys(32)
            buffers = [memory.fill(i, key) for i, key in enumerate(wanted)]
            while True:
                await adapter.store(wanted, buffers)
                await adapter.clear()
                os.write(1, b".")

        asyncio.run(main())
        """
    )
    device = tmp_path / "d"
    device.touch()
    environment = {**os.environ, "PYTHONPATH": str(Path(dax.__file__).parents[3])}
    counts = []
    for rounds in range(1, 5):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(device)], stdout=subprocess.PIPE, env=environment
        ) as child:
            assert child.stdout is not None and child.stdout.read(rounds) == b"." * rounds
            child.send_signal(signal.SIGKILL)

        async def look() -> None:
            async with Server(device, max_dax_size_gb=0.02, slot_bytes=1 << 18) as server:
                known = {key for page in server.runner.known() for key in page}
                counts.append(len(known))
                wanted, target = keys(32)[: len(known)], FrameMemory(len(known), 1 << 18)
                assert known == set(wanted)
                outcomes = await server.runner.load(wanted, target.buffers, lambda: None)
                assert outcomes == [LOADED] * len(known)
                assert all(target.verify(slot, key) == "" for slot, key in enumerate(wanted))
                await server.runner.clear()

        run(look)


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/sys/vm/nr_hugepages").exists(), reason="needs huge pages")
def test_a_file_on_hugetlbfs(tmp_path: Path) -> None:
    pages = Path("/proc/sys/vm/nr_hugepages")
    before = int(pages.read_text())
    folder = tmp_path / "huge"
    folder.mkdir()
    mounted = False
    try:
        pages.write_text(str(before + 8))
        if int(pages.read_text()) < before + 8:
            pytest.skip("no 16 MiB of huge pages to be had")
        mounted = subprocess.run(["mount", "-t", "hugetlbfs", "none", str(folder)], check=False).returncode == 0
        if not mounted:
            pytest.skip("hugetlbfs cannot be mounted")

        async def test() -> None:
            for opening in range(2):
                async with Server(folder / "d", max_dax_size_gb=0.01) as server:
                    assert await server.store(8) == [THERE if opening else STORED] * 8
                    assert await server.load(8) == [LOADED] * 8

        run(test)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
        pages.write_text(str(before))
        shutil.rmtree(folder)
