"""raw_block: what was deleted does not come back when a page of the table is damaged later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapters.raw_format import Geometry
from lmcache.testing.frames import keys
from support.raw_devices import META_BYTES, SLOT_BYTES, RawServer, make_device

DELETED = slice(2, 5)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_await(test), 90))


async def _await(test: Callable[[], Awaitable[None]]) -> None:
    await test()


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return make_device(tmp_path / "device")


async def store_and_delete(server: RawServer) -> None:
    assert await server.store(keys(8)) == [StoreOutcome.STORED] * 8
    await server.adapter.delete(keys(8)[DELETED])


def headers_of_deleted(device: Path) -> list[bytes]:
    content = device.read_bytes()
    return [content[META_BYTES + slot * SLOT_BYTES :][:8] for slot in range(*DELETED.indices(8))]


async def check_without_table(device: Path) -> None:
    """What is left when the page of the table is damaged."""
    with device.open("r+b") as file:
        file.seek(Geometry.plan(SLOT_BYTES, 4096, META_BYTES).table_offset + 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    async with RawServer(device) as server:
        left = [key for key in keys(8) if key not in keys(8)[DELETED]]
        assert set(server.inventory.objects) == set(left)
        assert server.adapter.status()["scanned_slots"] == 64
        assert await server.load(left) == [LoadOutcome.LOADED] * 5


def test_after_an_orderly_end(device: Path) -> None:
    async def test() -> None:
        async with RawServer(device) as server:
            await store_and_delete(server)
        assert headers_of_deleted(device) == [bytes(8)] * 3
        await check_without_table(device)

    run(test)


def test_after_a_checkpoint(device: Path) -> None:
    async def test() -> None:
        async with RawServer(device, meta_checkpoint_interval_sec=0.01, meta_idle_quiet_ms=1) as server:
            await store_and_delete(server)
            while headers_of_deleted(device) != [bytes(8)] * 3:
                await asyncio.sleep(0.005)
            copy = device.with_name("copy")
            copy.write_bytes(device.read_bytes())
            assert await server.store(keys(4, seed=1)) == [StoreOutcome.STORED] * 4
            assert await server.load(keys(4, seed=1)) == [LoadOutcome.LOADED] * 4
        await check_without_table(copy)

    run(test)


def test_after_a_crash_and_another_start(device: Path) -> None:
    async def test() -> None:
        async with RawServer(device) as server:
            await store_and_delete(server)
            copy = device.with_name("copy")
            copy.write_bytes(device.read_bytes())
        assert headers_of_deleted(copy) == [b"LMCSLOT1"] * 3
        async with RawServer(copy) as server:
            assert len(server.inventory.objects) == 5
            while headers_of_deleted(copy) != [bytes(8)] * 3:
                await asyncio.sleep(0.005)
        await check_without_table(copy)

    run(test)
