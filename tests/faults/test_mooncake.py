"""`mooncake_store` when the master or a machine that holds objects fails: exact bytes or a miss, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError, ResourceError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import build, check, parse_adapter
from lmcache.l2.adapters import mooncake_client
from lmcache.l2.adapters.remote_names import RemoteNames
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys
from lmcache.testing.processes import LOOPBACK, free_port
from polling import until
from services import mooncake
from services.mooncake import Master, Peer

LOADED, MISSING = LoadOutcome.LOADED, LoadOutcome.MISSING
STORED = StoreOutcome.STORED


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path) as master:
        master.wait_ready()
        yield master


def adapter_of(spec: dict[str, Any]) -> Adapter:
    return build(parse_adapter({"type": "mooncake_store", **spec}, 0)).adapter


async def stored(adapter: Adapter, wanted: Sequence[ObjectKey], payload_bytes: int = 12_288) -> list[StoreOutcome]:
    memory = FrameMemory(len(wanted), payload_bytes)
    try:
        return await adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])
    except AdapterError:
        return [StoreOutcome.FAILED] * len(wanted)


async def loaded(adapter: Adapter, wanted: Sequence[ObjectKey]) -> list[LoadOutcome]:
    """LOADED only where every byte is right."""
    memory = FrameMemory(len(wanted))
    try:
        outcomes = await adapter.load(wanted, memory.buffers)
    except AdapterError:
        return [LoadOutcome.FAILED] * len(wanted)
    assert all(memory.holds(slot, wanted[slot]) for slot, outcome in enumerate(outcomes) if outcome is LOADED)
    return outcomes


async def eventually(act: Callable[[], Any], wanted: object, seconds: float = 40.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while (seen := await act()) != wanted:
        assert asyncio.get_running_loop().time() < end, seen
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def opened(adapter: Adapter) -> Any:
    try:
        await adapter.open(RecordingInventory())
        yield adapter
    finally:
        await adapter.close()


def test_two_servers_share_what_a_third_machine_holds(master: Master, tmp_path: Path) -> None:
    async def test() -> None:
        spec, wanted = mooncake.setup_keys(master, 0), keys(8)
        async with opened(adapter_of(spec)) as first, opened(adapter_of(spec)) as second:
            assert await stored(first, wanted) == [STORED] * 8
            assert await stored(second, wanted) == [StoreOutcome.ALREADY_THERE] * 8
            assert await loaded(second, wanted) == [LOADED] * 8
            assert await second.delete(wanted[4:]) == [True] * 4
            assert await loaded(first, wanted) == [LOADED] * 4 + [MISSING] * 4

    with Peer(tmp_path, master) as peer:
        peer.wait_ready()
        asyncio.run(test())


@pytest.mark.slow  # Mooncake's client looks for it every few seconds
@pytest.mark.parametrize("has_metadata_server", [False, True])
def test_a_master_that_is_gone_costs_misses_until_it_is_back(tmp_path: Path, has_metadata_server: bool) -> None:
    async def test(master: Master) -> None:
        wanted = keys(4)
        async with opened(adapter_of(mooncake.setup_keys(master))) as adapter:
            assert await stored(adapter, wanted) == [STORED] * 4
            master.kill()
            assert LOADED not in await loaded(adapter, wanted)
            with pytest.raises(AdapterError, match="the master does not answer"):
                await adapter.probe(wanted)
            assert STORED not in await stored(adapter, keys(1, seed=5))
            with master.restarted() as again:
                again.wait_ready()
                others = keys(2, seed=9)  # the names of the first ones are lost with the master
                await eventually(lambda: stored(adapter, others), [STORED] * 2)
                assert await loaded(adapter, others) == [LOADED] * 2
                assert await loaded(adapter, wanted) == [MISSING] * 4

    with Master(tmp_path, metadata_port=free_port() if has_metadata_server else 0) as master:
        master.wait_ready()
        asyncio.run(test(master))


@pytest.mark.slow  # as long as Mooncake waits for its master
def test_a_master_that_stands_still_is_waited_for_some_seconds(master: Master, tmp_path: Path) -> None:
    """Also at the end, in which no other thread of the process runs."""

    async def test() -> None:
        loop, adapter = asyncio.get_running_loop(), adapter_of(mooncake.setup_keys(master))
        async with opened(adapter):
            assert await stored(adapter, keys(2)) == [STORED] * 2
            master.pause()
            started = loop.time()
            with pytest.raises(AdapterError, match="the master does not answer in time"):
                await adapter.probe(keys(2))
            assert loop.time() - started < 10
            started = loop.time()
        assert loop.time() - started < 30

    try:
        asyncio.run(test())
    finally:
        master.resume()


def test_a_machine_that_dies_costs_its_objects(master: Master, tmp_path: Path) -> None:
    async def test(first: Peer) -> None:
        wanted = keys(4)
        async with opened(adapter_of(mooncake.setup_keys(master, 0))) as adapter:
            assert await stored(adapter, wanted) == [STORED] * 4
            first.kill()
            assert LOADED not in await loaded(adapter, wanted)
            await eventually(lambda: loaded(adapter, wanted), [MISSING] * 4)
            (tmp_path / "second").mkdir()
            with Peer(tmp_path / "second", master) as second:
                second.wait_ready()
                await eventually(lambda: stored(adapter, wanted), [STORED] * 4)
                assert await loaded(adapter, wanted) == [LOADED] * 4

    with Peer(tmp_path, master) as peer:
        peer.wait_ready()
        asyncio.run(test(peer))


def test_a_store_without_room_is_full(master: Master) -> None:
    async def test() -> None:
        async with opened(adapter_of(mooncake.setup_keys(master))) as adapter:
            outcomes = await stored(adapter, keys(24), 4 << 20)
            assert outcomes[0] is STORED and set(outcomes[16:]) == {StoreOutcome.FULL}

    asyncio.run(test())


def test_objects_of_another_size_are_never_taken_for_whole(master: Master) -> None:
    """What somebody else wrote under our names."""

    async def test() -> None:
        truncated, oversized, good = keys(3)
        names = RemoteNames().names([truncated, oversized, good])
        memory = FrameMemory(1)
        frame = bytes(memory.fill(0, truncated))
        async with opened(adapter_of(mooncake.setup_keys(master, 0))) as adapter:
            from mooncake.store import MooncakeDistributedStore

            other = MooncakeDistributedStore()
            assert other.setup(mooncake.setup_keys(master)) == 0  # the memory is its own
            try:
                assert other.put(names[0], frame[:8192]) == 0
                assert other.put(names[1], frame + frame) == 0
                assert await stored(adapter, [good]) == [STORED]
                target = FrameMemory(3)
                outcomes = await adapter.load([truncated, oversized, good], target.buffers)
                assert outcomes == [LoadOutcome.CORRUPT, LoadOutcome.CORRUPT, LOADED] and target.holds(2, good)
                assert await adapter.probe([truncated, oversized]) == [None, None]
                assert other.put(names[0], frame[:8192]) == 0
                assert await stored(adapter, [truncated]) == [STORED]  # in the place of what is no frame
                assert await loaded(adapter, [truncated]) == [LOADED]
            finally:
                other.close()

    asyncio.run(test())


@pytest.mark.slow  # objects get to a disk after a while
def test_objects_that_are_on_a_disk_only_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")
    (tmp_path / "disk").mkdir()
    wanted, payload_bytes = keys(40), (1 << 20) - 4096
    size_bytes = payload_bytes + 4096

    async def whole(master: Master) -> None:
        spec = mooncake.setup_keys(master, 16 << 20)
        spec |= {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path / "disk")}
        async with opened(adapter_of(spec)) as adapter:
            for start in range(0, len(wanted), 8):
                part = wanted[start : start + 8]
                await eventually(lambda part=part: _are_stored(adapter, part, payload_bytes), True)
                await eventually(lambda: _files(tmp_path / "disk"), start + len(part))
            assert await adapter.probe(wanted) == [size_bytes] * len(wanted)
            memory = FrameMemory(len(wanted), payload_bytes)
            assert await adapter.load(wanted, memory.buffers) == [LOADED] * len(wanted)
            assert all(memory.holds(slot, key) for slot, key in enumerate(wanted))

    with Master(tmp_path, enable_offload="true", default_kv_lease_ttl=500) as master:
        master.wait_ready()
        asyncio.run(whole(master))


async def _are_stored(adapter: Adapter, wanted: Sequence[ObjectKey], payload_bytes: int) -> bool:
    return set(await stored(adapter, wanted, payload_bytes)) <= {STORED, StoreOutcome.ALREADY_THERE}


async def _files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.parametrize("key", ["master_server_addr", "metadata_server"])
def test_a_service_that_is_not_there_is_one_sentence(master: Master, key: str) -> None:
    address = f"{LOOPBACK}:{free_port()}"
    spec = {
        **mooncake.setup_keys(master),
        key: address if key == "master_server_addr" else f"http://{address}/metadata",
    }
    adapter = adapter_of(spec)
    with pytest.raises(ResourceError, match=f"nothing answers at {key} {address}"):
        asyncio.run(adapter.open(RecordingInventory()))
    asyncio.run(adapter.close())


def test_rdma_without_memory_or_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_addr": "b:1", "protocol": "rdma"}
    with pytest.raises(ConfigError, match="needs L1 as one range of memory"):
        asyncio.run(adapter_of(spec).open(RecordingInventory()))
    monkeypatch.setattr(mooncake_client, "RDMA_DEVICES", "/nowhere")
    with pytest.raises(ResourceError, match="needs an RDMA device"):
        check(parse_adapter({"type": "mooncake_store", **spec}, 0))


LONGEST_PAUSE = """
import asyncio, json, sys, threading, time
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.testing.contract_run import RecordingInventory

pauses = []

def tick():
    last = time.monotonic()
    while True:
        time.sleep(0.01)
        now = time.monotonic()
        pauses.append(now - last)
        last = now

async def main():
    adapter = build(parse_adapter(json.loads(sys.argv[1]), 0)).adapter
    await adapter.open(RecordingInventory())
    threading.Thread(target=tick, daemon=True).start()
    began = time.monotonic()
    await adapter.close()
    took = time.monotonic() - began
    await asyncio.sleep(0.05)
    print(json.dumps([took, max(pauses)]))

asyncio.run(main())
"""


def test_the_end_of_a_server_stops_none_of_its_threads(master: Master, tmp_path: Path) -> None:
    """In a process of its own: Mooncake can do it once in each."""
    spec = {"type": "mooncake_store", **mooncake.setup_keys(master)}
    program = [sys.executable, "-c", LONGEST_PAUSE, json.dumps(spec)]

    def lets_threads_run() -> bool:
        """Mooncake's own close() lets none run all the while; the machine may stand still once."""
        ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
        took_seconds, longest_seconds = json.loads(ended.stdout.splitlines()[-1])
        assert took_seconds > 0.5
        return bool(longest_seconds < took_seconds / 2)

    until(lets_threads_run)
