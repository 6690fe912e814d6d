"""A NIXL pool whose directory fails, whose folder has what somebody else put there, or whose backend is slow."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters.dax_format import ENTRY_BYTES
from lmcache.l2.adapters.nixl_agent import Agent
from lmcache.l2.adapters.nixl_config import NixlStoreConfig
from lmcache.l2.adapters.nixl_file_pool import FilePool
from lmcache.l2.adapters.nixl_object_pool import ObjectPool
from lmcache.l2.adapters.nixl_store import NixlStoreAdapter
from lmcache.testing.adapter_contract import RecordingInventory
from lmcache.testing.frames import FrameMemory, keys, namespace
from services import nixl

STORED, THERE = StoreOutcome.STORED, StoreOutcome.ALREADY_THERE
LOADED, CORRUPT = LoadOutcome.LOADED, LoadOutcome.CORRUPT
SLOTS = 8
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _installed() -> None:
    nixl.need()


def config_of(folder: Path, **others: Any) -> NixlStoreConfig:
    params = {"file_path": str(folder), "use_direct_io": "false"}
    spec = {"type": "nixl_store", "backend": "POSIX", "pool_size": SLOTS, "backend_params": params, **others}
    config = parse_adapter(spec, 0)
    assert isinstance(config, NixlStoreConfig)
    return config


class ShakyPool(FilePool):
    """Of files; fails on command."""

    erases_fail = False
    headers_fail = False

    def __init__(self, config: NixlStoreConfig) -> None:
        super().__init__(config, SYSTEM)
        self.gates: list[threading.Event] = []  # of the writes to come

    def write(self, agent: Agent, slots: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        if self.gates:
            assert self.gates.pop(0).wait(SECONDS)
        return super().write(agent, slots, buffers)

    def record(self, agent: Agent, slots: Sequence[int], entries: bytes) -> None:
        if self.erases_fail and not any(entries):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().record(agent, slots, entries)

    def read_header(self, agent: Agent, slot: int) -> bytes:
        if self.headers_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_header(agent, slot)


Test = Callable[[NixlStoreAdapter, RecordingInventory], Awaitable[object]]


def live(folder: Path, test: Test, pool: ShakyPool | None = None, **others: Any) -> None:
    """One life of the pool."""

    async def whole() -> None:
        config, inventory = config_of(folder, **others), RecordingInventory()
        adapter = NixlStoreAdapter(config, SYSTEM, pool)
        await adapter.open(inventory)
        try:
            await inventory.completed.wait()
            await test(adapter, inventory)
        finally:
            await adapter.close()

    asyncio.run(asyncio.wait_for(whole(), SECONDS))


async def store(adapter: NixlStoreAdapter, wanted: Sequence[ObjectKey]) -> list[StoreOutcome]:
    memory = FrameMemory(len(wanted))
    return await adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])


async def load(adapter: NixlStoreAdapter, wanted: Sequence[ObjectKey]) -> list[LoadOutcome]:
    """LOADED only where every byte is right."""
    target = FrameMemory(len(wanted))
    outcomes = await adapter.load(wanted, target.buffers)
    assert [outcome is LOADED for outcome in outcomes] == [target.holds(at, key) for at, key in enumerate(wanted)]
    return outcomes


@contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """By this process, to no file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- a directory that cannot be written ------------------------------------------------------------------------------
def test_what_is_there_is_loaded_while_nothing_can_be_written(tmp_path: Path) -> None:
    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        wanted = keys(4)
        assert await store(adapter, wanted) == [STORED] * 4
        with nothing_can_be_written():
            assert await load(adapter, wanted) == [LOADED] * 4
        os.truncate(tmp_path / "nixl_pool_v1" / "slot-00000000", 0)
        with nothing_can_be_written():
            assert await load(adapter, wanted) == [CORRUPT] + [LOADED] * 3
        assert await load(adapter, wanted[1:]) == [LOADED] * 3

    live(tmp_path, test)


def test_no_slot_is_lost_when_entries_cannot_be_erased(tmp_path: Path) -> None:
    pool = ShakyPool(config_of(tmp_path))

    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        pool.erases_fail = True
        outcomes = await asyncio.gather(store(adapter, keys(2)), store(adapter, keys(2)))
        assert sorted(outcomes, key=str) == [[THERE] * 2, [STORED] * 2]
        assert adapter.status()["free_slots"] == SLOTS - 2
        assert await load(adapter, keys(2)) == [LOADED] * 2

    live(tmp_path, test, pool)


def test_what_nobody_can_load_keeps_no_slot_though_its_entry_cannot_be_erased(tmp_path: Path) -> None:
    """The server forgets it, so that nothing else would ever free the slot."""
    pool = ShakyPool(config_of(tmp_path))

    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        assert await store(adapter, keys(2)) == [STORED] * 2
        os.truncate(tmp_path / "nixl_pool_v1" / "slot-00000000", 0)
        pool.erases_fail = True
        assert await load(adapter, keys(2)) == [CORRUPT, LOADED]
        assert adapter.status()["free_slots"] == SLOTS - 1
        assert await store(adapter, keys(2)) == [STORED, THERE]
        assert await load(adapter, keys(2)) == [LOADED] * 2

    async def later(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        assert await load(adapter, keys(2)) == [LOADED] * 2

    live(tmp_path, test, pool)
    live(tmp_path, later)


def test_no_slot_is_lost_when_what_could_not_be_deleted_is_stored_anew(tmp_path: Path) -> None:
    pool = ShakyPool(config_of(tmp_path))

    async def test(adapter: NixlStoreAdapter, _: RecordingInventory) -> None:
        wanted, first, second = keys(1), threading.Event(), threading.Event()
        pool.gates = [first, second]
        pool.erases_fail = True
        stores = [asyncio.ensure_future(store(adapter, wanted)) for _ in range(2)]
        first.set()
        assert await stores[0] == [STORED]
        deleting = asyncio.ensure_future(adapter.delete(wanted))
        await asyncio.sleep(0)  # it has begun, behind the second store
        second.set()
        with pytest.raises(AdapterError, match="could not be deleted"):
            await deleting
        assert await stores[1] == [STORED]
        assert adapter.status()["free_slots"] == SLOTS - 1
        assert await load(adapter, wanted) == [LOADED]

    live(tmp_path, test, pool)


def test_a_pool_goes_on_when_useless_entries_cannot_be_erased(tmp_path: Path) -> None:
    good, useless = keys(2), keys(2, of=namespace("another"))
    live(tmp_path, lambda adapter, _: store(adapter, [*useless, *good]))
    for slot in range(2):
        os.truncate(tmp_path / "nixl_pool_v1" / f"slot-{slot:08}", 0)
    pool = ShakyPool(config_of(tmp_path))
    pool.erases_fail = True

    async def test(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert inventory.order == good
        assert adapter.status()["free_slots"] == SLOTS - 2
        assert await store(adapter, keys(SLOTS - 2, seed=1)) == [STORED] * (SLOTS - 2)

    live(tmp_path, test, pool)


@pytest.mark.parametrize("is_cleared", [False, True])
def test_what_could_not_be_read_at_one_start_is_there_at_the_next(tmp_path: Path, is_cleared: bool) -> None:
    wanted, other = keys(4), keys(SLOTS - 4, of=namespace("another"))
    live(tmp_path, lambda adapter, _: store(adapter, wanted))
    pool = ShakyPool(config_of(tmp_path))
    pool.headers_fail = True

    async def during(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert not inventory.order and adapter.status()["free_slots"] == SLOTS
        assert await store(adapter, other) == [STORED] * len(other)  # in slots that had nothing
        if is_cleared:
            assert (await adapter.clear())[0] == len(other)

    async def after(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert set(inventory.order) == (set() if is_cleared else {*wanted, *other})
        if not is_cleared:
            assert await load(adapter, [*wanted, *other]) == [LOADED] * SLOTS

    live(tmp_path, during, pool)
    live(tmp_path, after)


# ---- what somebody else put into the folder --------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["directory", "slot-00000003"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_of_a_pool_is_refused_and_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    path, victim = tmp_path / "nixl_pool_v1" / name, tmp_path / "precious"
    path.parent.mkdir()
    victim.write_text("precious")
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ResourceError) as caught:
        live(tmp_path, lambda adapter, _: store(adapter, keys(1)))
    assert f"{path} is no file of a pool; remove it or choose another file_path." in str(caught.value)
    assert victim.read_text() == "precious"


def test_a_pool_that_does_not_persist_removes_its_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "nixl_pool_v1").mkdir()
    (tmp_path / "nixl_pool_v1" / "notes").write_text("precious")
    live(tmp_path, lambda adapter, _: store(adapter, keys(3)), persist_enabled=False)
    assert os.listdir(tmp_path / "nixl_pool_v1") == ["notes"]


def test_a_directory_that_its_last_server_just_removed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, lock = tmp_path / "nixl_pool_v1" / "directory", fcntl.flock
    locked: list[int] = []

    def remove_and_lock(fd: int, operation: int) -> None:
        if not locked:
            directory.unlink()
        locked.append(fd)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    wanted = keys(2)
    live(tmp_path, lambda adapter, _: store(adapter, wanted))

    async def test(adapter: NixlStoreAdapter, inventory: RecordingInventory) -> None:
        assert inventory.order == wanted
        assert await load(adapter, wanted) == [LOADED] * 2

    assert len(locked) == 2
    live(tmp_path, test)


# ---- objects: a backend that is slow or away -------------------------------------------------------------------------
class StandInAgent:
    """Of a backend that takes nothing before it may, and gives nothing."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def transfer_objects(self, operation: str, ranges: Sequence[object], _: Sequence[int]) -> list[bool]:
        self.begun.set()
        assert operation == "READ" or self.may_end.wait(SECONDS)
        return [operation == "WRITE"] * len(ranges)

    def exist(self, _: Sequence[str]) -> list[bool]:
        raise OSError(errno.EIO, "it does not say")


@pytest.fixture
def objects() -> ObjectPool:
    spec = {"type": "nixl_store", "backend": "OBJ", "pool_size": SLOTS, "backend_params": {}}
    config = parse_adapter(spec, 0)
    assert isinstance(config, NixlStoreConfig)
    pool = ObjectPool(config, SYSTEM)
    pool.open()
    return pool


def test_loads_do_not_wait_for_the_directory_of_a_slow_backend(objects: ObjectPool) -> None:
    slow = StandInAgent()
    agent = cast(Agent, slow)
    recording = threading.Thread(target=objects.record, args=(agent, [0], bytes(ENTRY_BYTES)), daemon=True)
    recording.start()
    assert slow.begun.wait(SECONDS)
    marking = threading.Thread(target=objects.mark_used, args=(agent, [0], 5), daemon=True)
    marking.start()
    marking.join(SECONDS)
    has_waited = marking.is_alive()
    slow.may_end.set()
    recording.join(SECONDS)
    assert not has_waited and not recording.is_alive()


def test_a_header_that_was_not_read_is_not_taken_for_an_empty_one(objects: ObjectPool) -> None:
    with pytest.raises(OSError, match="slot-00000003") as caught:
        assert len(objects.read_header(cast(Agent, StandInAgent()), 3)) == FRAME_HEADER_BYTES
    assert caught.value.errno == errno.EIO
