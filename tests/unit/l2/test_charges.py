"""What an adapter is charged is what its backend holds, whoever stored it. TEST_CHARGE_STEPS mixed operations."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.limits import GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapters import fs_native
from lmcache.testing.frames import FrameMemory, keys, namespace
from seeds import SEED
from unit.l2.support import OneServer, eviction_order, run

STEPS = int(os.environ.get("TEST_CHARGE_STEPS", "1000"))
PAYLOADS = (4096, 12_288, 40_960)
MOCK = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}


def test_what_another_server_stored_is_charged_its_own_size() -> None:
    async def test() -> None:
        async with OneServer(MOCK) as server:
            objects: dict[ObjectKey, bytes] = server.runner.adapter.objects  # type: ignore[attr-defined]
            objects.update({key: bytes(4096) for key in keys(4)})  # smaller than the frames here
            assert await server.store(8) == [StoreOutcome.ALREADY_THERE] * 4 + [StoreOutcome.STORED] * 4
            assert server.runner.ledger.used_bytes == sum(map(len, objects.values()))

    run(test)


def test_what_is_gone_again_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with OneServer(MOCK) as server:
            adapter: Any = server.runner.adapter
            adapter.objects.update({key: bytes(4096) for key in keys(4)})
            probe = adapter.probe

            async def evicted(wanted: list[ObjectKey]) -> list[int | None]:
                """Another server is faster."""
                monkeypatch.setattr(adapter, "probe", probe)
                adapter.objects.pop(keys(1)[0])
                return await probe(wanted)

            monkeypatch.setattr(adapter, "probe", evicted)
            assert await server.store(4) == [StoreOutcome.STORED] + [StoreOutcome.ALREADY_THERE] * 3
            assert server.runner.ledger.used_bytes == sum(map(len, adapter.objects.values()))
            assert await server.load(1) == [LoadOutcome.LOADED]

    run(test)


def test_a_backend_without_a_capacity_is_not_remembered_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a bucket with a rule that deletes what is old."""
    monkeypatch.setattr(limits, "MAX_L2_KNOWN_OBJECTS", 20)

    async def test() -> None:
        async with OneServer({"type": "fs", "base_path": str(tmp_path)}) as server:
            ledger = server.runner.ledger
            for seed in range(8):
                assert await server.store(8, seed) == [StoreOutcome.STORED] * 8
                assert len(ledger) == min(20, 8 * (seed + 1))
            assert server.runner.knows(keys(8, 7)) == [True] * 8
            forgotten = keys(8, 0)
            assert server.runner.knows(forgotten) == [False] * 8
            assert await server.runner.probe(forgotten) == [True] * 8 and len(ledger) == 20
            assert await server.load(8, 0) == [LoadOutcome.LOADED] * 8

    run(test)


def is_object(folder: str, name: str) -> bool:
    return name.endswith(".data") and "quarantine" not in folder


class Mixed:
    """Stores, loads, deletions behind a server's back, corruption and evictions in a folder of files."""

    def __init__(self, folder: Path, server: OneServer, other: OneServer, dice: random.Random) -> None:
        self.folder = folder
        self.servers = (server, other)
        self.dice = dice
        self.memories = {payload: FrameMemory(16, payload) for payload in PAYLOADS}

    def files(self) -> list[Path]:
        found = os.walk(self.folder)  # passes over folders that are removed while it looks
        return [Path(folder, name) for folder, _, names in found for name in names if is_object(folder, name)]

    def some_keys(self) -> tuple[FrameMemory, list[ObjectKey]]:
        payload, first = self.dice.choice(PAYLOADS), self.dice.randrange(120)
        of = namespace(f"of {payload}", salt=self.dice.choice(("", "tenant")))
        return self.memories[payload], keys(136, of=of)[first : first + self.dice.randrange(1, 16)]

    async def step(self) -> None:
        runner = self.dice.choice((self.servers[0],) * 3 + (self.servers[1],)).runner
        memory, chosen = self.some_keys()
        match self.dice.randrange(20):
            case 0:
                for path in self.dice.sample(files := self.files(), min(3, len(files))):
                    path.unlink(missing_ok=True)
            case 1:
                for path in self.dice.sample(files := self.files(), min(2, len(files))):
                    frame = bytearray(path.read_bytes())
                    frame[self.dice.randrange(len(frame))] ^= 1
                    path.write_bytes(frame)
            case 2:
                await runner.layers.eviction.evict(self.dice.randrange(1, 200_000))
            case 3:
                await runner.layers.deletion.delete(runner.stored_keys(chosen))
            case 4 if self.dice.random() < 0.05:
                await runner.clear()
            case 4 | 5 | 6 | 7:
                await runner.probe(chosen)
            case 8 | 9 | 10 | 11 | 12:
                outcomes = await runner.load(chosen, memory.buffers[: len(chosen)], lambda: None)
                for slot, (key, outcome) in enumerate(zip(chosen, outcomes, strict=True)):
                    assert outcome is not LoadOutcome.LOADED or memory.holds(slot, key)
            case _:
                await runner.store(chosen, [memory.fill(slot, key) for slot, key in enumerate(chosen)], lambda: None)

    def differences(self) -> list[tuple[int, int, int]]:
        """Of each server what it charges and what the files are worth, in bytes, and its objects."""
        sizes = [path.stat().st_size for path in self.files()]  # nothing is being stored or deleted
        return [
            (ledger.used_bytes, sum(map(ledger.capacity.charge, sizes)), len(ledger) - len(sizes))
            for ledger in (server.runner.ledger for server in self.servers)
        ]


@pytest.mark.parametrize("steps", [STEPS, pytest.param(10_000, marks=pytest.mark.slow)])
def test_charges_are_true_after_mixed_operations(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_native, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(fs_native, "SCAN_SHARE", 1)
    spec: dict[str, Any] = {
        "type": "fs",
        "base_path": str(tmp_path),
        "max_capacity_gb": (12 << 20) / GIB,
        "eviction": {"eviction_policy": "LRU"},
    }

    async def test() -> None:
        async with OneServer(spec) as server, OneServer(spec) as other:
            mixed = Mixed(tmp_path, server, other, random.Random(SEED))
            for number in range(1, steps + 1):
                await mixed.step()
                if number % (steps // 4) == 0:
                    for _ in range(500):  # a search of each server finds what the other did
                        found = mixed.differences()
                        if all(charged == real and not objects for charged, real, objects in found):
                            break
                        await asyncio.sleep(0.02)
                    assert all(charged == real and not objects for charged, real, objects in found), found
                    server.runner.ledger.check()

    asyncio.run(asyncio.wait_for(test(), 600))


def test_what_others_stored_since_the_last_search_is_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_native, "WATCH_SECONDS", 0.02)
    spec = {
        "type": "fs_native",
        "base_path": str(tmp_path),
        "max_capacity_gb": 1,
        "eviction": {"eviction_policy": "LRU"},
    }

    async def test() -> None:
        async with OneServer(spec) as server, OneServer(spec) as other:
            await server.store(4, 0)
            while not all(other.runner.ledger.known(keys(4, 0))):
                await asyncio.sleep(0.01)
            await other.store(4, 1)
            while not all(server.runner.ledger.known(keys(4, 1))):
                await asyncio.sleep(0.01)
            order = eviction_order(server.runner.ledger)
            assert [key in keys(4, 1) for key in order] == [False] * 4 + [True] * 4

    run(test)


def test_an_object_that_somebody_replaced_is_charged_what_a_search_finds() -> None:
    async def test() -> None:
        async with OneServer(MOCK) as server:
            runner, ledger = server.runner, server.runner.ledger
            await server.store(4)
            frame_bytes = server.memory.slot_bytes
            runner.begin_scan()
            assert await server.store(2, seed=1) == [StoreOutcome.STORED] * 2  # behind the back of the search
            runner.found([(key, 3 * frame_bytes) for key in [*keys(2, seed=1), *keys(3), *keys(1)]])
            runner.found([(keys(1)[0], frame_bytes)])  # it was found already
            assert ledger.used_bytes == (3 * 3 + 1 + 2) * frame_bytes and len(ledger) == 6

    run(test)
