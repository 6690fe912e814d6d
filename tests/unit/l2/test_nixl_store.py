"""A NIXL pool of files over its lives: real ones, by the POSIX plugin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lmcache import _native
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_types import build, check, parse_adapter
from lmcache.l2.adapters import nixl_store
from lmcache.l2.adapters.nixl_config import NixlStoreConfig
from lmcache.l2.adapters.nixl_file_pool import refuse_too_few_descriptors
from lmcache.l2.adapters.nixl_store import NixlStoreAdapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.adapter_contract import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys
from manual_clock import ManualClock
from services import nixl

T = TypeVar("T")
Test = Callable[[NixlStoreAdapter, RecordingInventory], Awaitable[T]]

STORED, FULL = StoreOutcome.STORED, StoreOutcome.FULL
LOADED, CORRUPT, MISSING = LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.MISSING


@pytest.fixture(autouse=True)
def _installed() -> None:
    nixl.need()


def spec(folder: Path, slots: int = 8, **others: Any) -> dict[str, Any]:
    params = {"file_path": str(folder), "use_direct_io": "false"}
    return {"type": "nixl_store", "backend": "POSIX", "pool_size": slots, "backend_params": params, **others}


def adapter_of(specification: dict[str, Any]) -> NixlStoreAdapter:
    adapter = build(parse_adapter(specification, 0)).adapter
    assert isinstance(adapter, NixlStoreAdapter)
    return adapter


def live(specification: dict[str, Any], test: Test[T]) -> T:
    """One life of the pool."""

    async def whole() -> T:
        adapter, inventory = adapter_of(specification), RecordingInventory()
        await adapter.open(inventory)
        await inventory.completed.wait()
        try:
            return await test(adapter, inventory)
        finally:
            await adapter.close()

    return asyncio.run(whole())


async def store(adapter: NixlStoreAdapter, wanted: Sequence[ObjectKey]) -> list[StoreOutcome]:
    memory = FrameMemory(len(wanted))
    return await adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])


async def load(adapter: NixlStoreAdapter, wanted: Sequence[ObjectKey]) -> list[LoadOutcome]:
    """LOADED only where every byte is right."""
    target = FrameMemory(len(wanted))
    for buffer in target.buffers:
        buffer[:] = b"\xaa" * buffer.nbytes
    outcomes = await adapter.load(wanted, target.buffers)
    right = [target.holds(slot, key) for slot, key in enumerate(wanted)]
    assert [outcome is LOADED for outcome in outcomes] == right
    return outcomes


def slot_files(folder: Path) -> list[Path]:
    return sorted((folder / "nixl_pool_v1").glob("slot-*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pool_size": 0}, ['"pool_size" must be a whole number from 1 to 1048576']),
        ({"pool_size": None}, ['"pool_size"']),
        ({"backend": "S3"}, ["one of POSIX, GDS, GDS_MT, HF3FS, OBJ, AZURE_BLOB"]),
        ({"backend_params": {"file_path": "/x"}}, ['needs "use_direct_io"']),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_adapter({**spec(tmp_path), **change}, 0)
    assert all(word in str(caught.value) for word in words)


def test_a_pool_is_full_when_each_slot_has_an_object(tmp_path: Path) -> None:
    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        wanted = keys(10)
        assert await store(adapter, wanted) == [STORED] * 8 + [FULL] * 2
        assert await adapter.delete(wanted[:3]) == [True] * 3
        assert await store(adapter, wanted) == [STORED] * 3 + [StoreOutcome.ALREADY_THERE] * 5 + [FULL] * 2
        assert await load(adapter, wanted) == [LOADED] * 8 + [MISSING] * 2
        assert adapter.status() == {"slots": 8, "free_slots": 0, "buffered_fallbacks": 0}

    live(spec(tmp_path), test)


def test_eviction_counts_slots(tmp_path: Path) -> None:
    """As the documents say of their example: above the watermark of slots, a part of the objects goes."""

    async def whole() -> None:
        eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.5, "eviction_ratio": 0.5}
        configured = build(parse_adapter(spec(tmp_path, eviction=eviction), 0))
        runner = Runner(configured, Metrics().l2, ManualClock())
        await runner.open()
        wanted, memory = keys(12), FrameMemory(12)
        buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
        assert await runner.store(wanted[:4], buffers[:4], lambda: None) == [STORED] * 4
        assert runner.ledger.fraction == 0.5
        assert (await runner.layers.eviction.evict_above_watermark()).objects == 0
        assert await runner.store(wanted[4:8], buffers[4:8], lambda: None) == [STORED] * 4
        assert (await runner.layers.eviction.evict_above_watermark()).objects == 4
        assert await runner.store(wanted[8:], buffers[8:], lambda: None) == [STORED] * 4
        assert await runner.store(wanted[:2], buffers[:2], lambda: None) == [STORED] * 2  # room is made for them
        assert len(runner.ledger) <= 8
        runner.check_idle()
        assert await runner.drain(5) and await runner.close(5)

    asyncio.run(whole())


def test_what_was_there_is_there_in_the_next_life(tmp_path: Path) -> None:
    wanted = keys(6)
    live(spec(tmp_path), lambda adapter, _: store(adapter, wanted))

    async def larger(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert inventory.order == wanted
        assert await load(adapter, wanted) == [LOADED] * 6
        assert await store(adapter, keys(10, seed=1)) == [STORED] * 10

    async def smaller(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert len(slot_files(tmp_path)) == 4
        assert 0 < len(inventory.order) <= 4
        assert await load(adapter, inventory.order) == [LOADED] * len(inventory.order)
        assert LOADED not in await load(adapter, [key for key in wanted if key not in inventory.objects])

    live(spec(tmp_path, slots=16), larger)
    live(spec(tmp_path, slots=4), smaller)


def test_a_pool_belongs_to_one_server(tmp_path: Path) -> None:
    async def test(_: NixlStoreAdapter, __: RecordingInventory) -> None:
        other = adapter_of(spec(tmp_path))
        with pytest.raises(ResourceError, match="another server uses the pool"):
            await other.open(RecordingInventory())
        await other.close()

    live(spec(tmp_path), test)


def test_damaged_slots_are_misses_and_are_used_again(tmp_path: Path) -> None:
    wanted = keys(8)
    live(spec(tmp_path), lambda adapter, _: store(adapter, wanted))
    files = slot_files(tmp_path)
    os.truncate(files[0], 0)
    os.truncate(files[1], 8192)
    files[2].write_bytes(bytes(files[2].stat().st_size))
    third, fourth = files[3].read_bytes(), files[4].read_bytes()
    files[3].write_bytes(fourth)
    files[4].write_bytes(third)
    files[5].unlink()

    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        outcomes = await load(adapter, wanted)
        assert sorted(outcome.value for outcome in outcomes) == ["corrupt"] * 6 + ["loaded"] * 2
        lost = [key for key, outcome in zip(wanted, outcomes, strict=True) if outcome is CORRUPT]
        assert await adapter.probe(lost) == [None] * 6 and await load(adapter, lost) == [MISSING] * 6
        assert await store(adapter, lost) == [STORED] * 6
        assert await load(adapter, wanted) == [LOADED] * 8

    live(spec(tmp_path), test)


@pytest.mark.parametrize("damage", [b"", b"something else", bytes(100_000)])
def test_a_damaged_directory_starts_anew(tmp_path: Path, damage: bytes) -> None:
    wanted = keys(3)
    live(spec(tmp_path), lambda adapter, _: store(adapter, wanted))
    (tmp_path / "nixl_pool_v1" / "directory").write_bytes(damage)

    async def test(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert not inventory.order and await adapter.probe(wanted) == [None] * 3
        assert await store(adapter, wanted) == [STORED] * 3

    live(spec(tmp_path), test)


def test_an_entry_that_outlived_its_frame_is_a_miss(tmp_path: Path) -> None:
    """As after a kill between a frame and its entry, or a power failure that lost the one and not the other."""
    old, new = keys(1), keys(1, seed=1)
    directory = tmp_path / "nixl_pool_v1" / "directory"

    async def store_another(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        await adapter.delete(old)
        assert await store(adapter, new) == [STORED]

    live(spec(tmp_path, slots=1), lambda adapter, _: store(adapter, old))
    before = directory.read_bytes()
    live(spec(tmp_path, slots=1), store_another)
    directory.write_bytes(before)

    async def test(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert inventory.order == old
        assert await load(adapter, old) == [CORRUPT] and await load(adapter, old) == [MISSING]
        assert await store(adapter, old) == [STORED] and await load(adapter, old) == [LOADED]

    live(spec(tmp_path, slots=1), test)


def test_what_is_cleared_or_replaced_by_less_gives_its_room_back(tmp_path: Path) -> None:
    def used_bytes() -> int:
        return sum(path.stat().st_blocks * 512 for path in slot_files(tmp_path))

    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        large, small = FrameMemory(8, 1 << 20), FrameMemory(8)
        wanted, others = keys(8), keys(8, seed=1)
        assert await adapter.store(wanted, [large.fill(at, key) for at, key in enumerate(wanted)]) == [STORED] * 8
        await adapter.delete(wanted)
        assert used_bytes() >= 8 * large.slot_bytes  # for the next ones
        assert await adapter.store(others, [small.fill(at, key) for at, key in enumerate(others)]) == [STORED] * 8
        assert used_bytes() < large.slot_bytes
        assert await load(adapter, others) == [LOADED] * 8
        assert await adapter.clear() == (8, 8 * small.slot_bytes)
        assert used_bytes() == 0
        assert await store(adapter, wanted) == [STORED] * 8 and await load(adapter, wanted) == [LOADED] * 8

    live(spec(tmp_path), test)


def test_without_persistence_nothing_of_the_pool_stays(tmp_path: Path) -> None:
    live(spec(tmp_path, persist_enabled=False), lambda adapter, _: store(adapter, keys(3)))
    assert os.listdir(tmp_path) == []


def test_memory_that_was_lent_is_registered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = nixl.note_registrations(monkeypatch)
    monkeypatch.setattr(nixl_store, "READ_LANES", 1)  # each begins when it is needed, and registers then

    async def whole() -> None:
        adapter, inventory, memory = adapter_of(spec(tmp_path)), RecordingInventory(), FrameMemory(6)
        adapter.lend_memory(_native.buffer_address(memory.buffers[0]), 4 * memory.slot_bytes)  # and two outside
        await adapter.open(inventory)
        wanted = keys(6)
        assert await adapter.store(wanted, [memory.fill(at, key) for at, key in enumerate(wanted)]) == [STORED] * 6
        for buffer in memory.buffers:
            buffer[:] = bytes(buffer.nbytes)
        assert await adapter.load(wanted, memory.buffers) == [LOADED] * 6
        assert all(memory.holds(at, key) for at, key in enumerate(wanted))
        at_open = len(noted)
        for _ in range(3):
            assert await adapter.load(wanted[:4], memory.buffers[:4]) == [LOADED] * 4
            assert await adapter.delete(wanted[:4]) == [True] * 4
            assert await adapter.store(wanted[:4], memory.buffers[:4]) == [STORED] * 4
        assert len(noted) == at_open
        assert await adapter.load(wanted[4:5], memory.buffers[4:5]) == [LOADED]  # what lies outside is, each time
        assert len(noted) == at_open + 1
        await adapter.close()

    asyncio.run(whole())


def test_a_pool_of_more_files_than_may_be_open_is_refused(tmp_path: Path) -> None:
    config = parse_adapter(spec(tmp_path, slots=1000), 0)
    assert isinstance(config, NixlStoreConfig)
    refuse_too_few_descriptors(config, 4096)
    with pytest.raises(ResourceError, match=r'a "pool_size" of 1000 needs as many open files.*`ulimit -n`'):
        refuse_too_few_descriptors(config, 1024)


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResourceError, match=r"cannot use the folder .*choose another file_path\.$"):
            check(parse_adapter(spec(path), 0))
        with pytest.raises(ResourceError, match=r"cannot use the folder"):
            live(spec(path), lambda adapter, _: store(adapter, keys(1)))
