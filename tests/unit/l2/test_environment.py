"""Adapters take time and randomness from what they are given, and from nowhere else."""

from __future__ import annotations

import asyncio
import fcntl
import socketserver
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import Environment
from lmcache.errors import ResourceError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters import dax_format, raw_device, raw_format
from lmcache.l2.adapters.dax import DaxAdapter, DaxConfig
from lmcache.l2.adapters.folder_config import FsConfig
from lmcache.l2.adapters.fs_native import FsNativeAdapter
from lmcache.l2.adapters.raw_block import RawBlockAdapter
from lmcache.l2.adapters.raw_config import RawBlockConfig
from lmcache.l2.adapters.resp import RespAdapter
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import PAYLOAD_BYTES, FrameMemory, keys
from manual_clock import ManualClock
from support.raw_devices import META_BYTES, SLOT_BYTES, make_device

STARTED_SECONDS = 5000.0
NS, US = 10**9, 10**6  # in a second


def environment() -> tuple[Environment, ManualClock]:
    clock = ManualClock(STARTED_SECONDS)
    return Environment(clock, lambda count: b"\x07" * count), clock


def config_of(spec: dict[str, Any]) -> Any:
    return parse_adapter(spec, 0)


def store_and_load(adapter: Adapter, clock: ManualClock) -> None:
    """One object at STARTED_SECONDS, loaded 10 s later."""
    memory, target, wanted = FrameMemory(1), FrameMemory(1), keys(1)

    async def live() -> None:
        inventory = RecordingInventory()
        await adapter.open(inventory)
        await inventory.completed.wait()
        assert await adapter.store(wanted, [memory.fill(0, wanted[0])]) == [StoreOutcome.STORED]
        clock.advance(10.0)
        assert await adapter.load(wanted, target.buffers) == [LoadOutcome.LOADED]
        await adapter.close()

    asyncio.run(live())


class LoadingServer(socketserver.StreamRequestHandler):
    """A Redis that has not read its data yet."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2) for _ in range(int(line[1:]))]
            self.wfile.write(b"$9\r\nloading:1\r\n" if words[0] == b"INFO\r\n" else b"+OK\r\n")


def test_resp_waits_for_a_server_that_is_loading_by_its_clock() -> None:
    given, clock = environment()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), LoadingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = {"type": "resp", "host": "127.0.0.1", "port": server.server_address[1], "timeout_seconds": 60}
        adapter = RespAdapter(config_of(spec), given)
        with pytest.raises(ResourceError, match="still loading"):
            asyncio.run(adapter.open(RecordingInventory()))
        assert STARTED_SECONDS + 50 < clock.now_seconds < STARTED_SECONDS + 60
        server.shutdown()


def test_dax_draws_its_id_and_marks_times_of_use(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    size_gb = (1 << 20) / GIB
    spec = {"type": "dax", "device_path": str(device), "max_dax_size_gb": size_gb, "slot_bytes": PAYLOAD_BYTES}
    config: DaxConfig = config_of(spec)
    surroundings, clock = environment()
    store_and_load(DaxAdapter(config, surroundings), clock)
    content = device.read_bytes()
    found = dax_format.read_superblock(content[: dax_format.SUPERBLOCK_BYTES])
    assert found is not None and found[0] == b"\x07" * 16
    used_at = [
        struct.unpack_from("<Q", content, place)[0]
        for place in found[1].used_places(range(found[1].slots))
        if any(content[place : place + 8])
    ]
    assert used_at == [int((STARTED_SECONDS + 10.0) * NS)]


def test_raw_block_draws_its_id_and_marks_times_of_use(tmp_path: Path) -> None:
    device = make_device(tmp_path / "device")
    spec = {"type": "raw_block", "device_path": str(device), "slot_bytes": SLOT_BYTES, "meta_total_bytes": META_BYTES}
    config: RawBlockConfig = config_of(spec)
    surroundings, clock = environment()
    store_and_load(RawBlockAdapter(config, surroundings), clock)
    content = device.read_bytes()
    superblock = raw_format.decode_superblock(content[: raw_format.MIN_PAGE_BYTES])
    assert superblock is not None and superblock.device == b"\x07" * 16
    first_entry = superblock.geometry.table_page_offset(0) + raw_format.PAGE_HEADER_BYTES
    entries = range(first_entry, first_entry + 8 * raw_format.ENTRY_BYTES, raw_format.ENTRY_BYTES)
    used_at = [struct.unpack_from("<Q", content, entry + 48)[0] for entry in entries]  # docs/formats/raw_block.md
    assert [at_us for at_us in used_at if at_us] == [int((STARTED_SECONDS + 10.0) * US)]


def test_a_raw_device_in_use_is_waited_for_by_the_clock(tmp_path: Path) -> None:
    device, clock = make_device(tmp_path / "device"), ManualClock(STARTED_SECONDS)
    with device.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match="is in use by another server"):
            raw_device.open_device(str(device), "here", direct=False, block_align=4096, clock=clock)
    assert clock.monotonic() == pytest.approx(STARTED_SECONDS + raw_device.RELEASE_SECONDS, abs=0.1)
    raw_device.open_device(str(device), "here", direct=False, block_align=4096, clock=clock).close()


def test_a_folder_names_its_writer_and_what_it_moves_aside(tmp_path: Path) -> None:
    config: FsConfig = config_of({"type": "fs_native", "base_path": str(tmp_path), "io_engine": "posix"})
    surroundings, clock = environment()
    adapter, wanted, memory = FsNativeAdapter(config, surroundings), keys(1), FrameMemory(1)

    async def live() -> None:
        inventory = RecordingInventory()
        await adapter.open(inventory)
        await inventory.completed.wait()
        assert [path.name for path in (tmp_path / ".lmcache" / "writers").iterdir()] == ["07" * 8]
        for _ in range(2):  # of one name, at two times
            assert await adapter.store(wanted, [memory.fill(0, wanted[0])]) == [StoreOutcome.STORED]
            assert await adapter.delete(wanted, corrupt=True) == [True]
            clock.advance(1.0)
        await adapter.close()

    asyncio.run(live())
    times = sorted(int(path.stem.rpartition("_")[2]) for path in (tmp_path / "quarantine").iterdir())
    assert times == [int(STARTED_SECONDS * NS), int((STARTED_SECONDS + 1.0) * NS)]
