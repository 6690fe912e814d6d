"""What every L2 adapter must do. Subclass, say how to build one, and run it with pytest:

    class TestMine(AdapterContract):
        def build(self) -> Adapter:
            return MyAdapter(...)

Every test works on an empty backend: `build` is called once a test, and again only by the test of restarts,
which need the same backend. Coroutines run by asyncio.run; no pytest plugin is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter
from lmcache.testing.frames import FrameMemory, keys, namespace

T = TypeVar("T")


class RecordingInventory:
    """Remembers what the adapter tells."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, int] = {}
        self.order: list[ObjectKey] = []
        self.completed = asyncio.Event()

    def found(self, objects: Sequence[tuple[ObjectKey, int]]) -> None:
        self.order += [key for key, _ in objects if key not in self.objects]
        self.objects.update(objects)

    def known(self) -> list[ObjectKey]:
        return list(self.objects)

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def complete(self) -> None:
        self.completed.set()


class AdapterContract:
    persists = False  # whether objects outlive close()

    def build(self) -> Adapter:
        raise NotImplementedError

    def run(self, test: Callable[[Adapter, RecordingInventory], Awaitable[T]]) -> T:
        async def whole() -> T:
            adapter, inventory = self.build(), RecordingInventory()
            await adapter.open(inventory)
            try:
                await asyncio.wait_for(inventory.completed.wait(), 20)
                return await asyncio.wait_for(test(adapter, inventory), 60)
            finally:
                await adapter.close()

        return asyncio.run(whole())

    def test_what_was_stored_is_loaded(self) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(40)
            memory, target = FrameMemory(40), FrameMemory(40)
            stored = await adapter.store(wanted, [memory.fill(i, key) for i, key in enumerate(wanted)])
            assert stored == [StoreOutcome.STORED] * 40
            assert await adapter.probe(wanted) == [memory.slot_bytes] * 40
            assert await adapter.load(wanted[::-1], target.buffers) == [LoadOutcome.LOADED] * 40
            assert all(target.holds(i, key) for i, key in enumerate(wanted[::-1]))

        self.run(test)

    def test_absent_objects_are_missing(self) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            there, absent = keys(2, seed=1), keys(2, seed=2)
            memory = FrameMemory(2)
            await adapter.store(there, [memory.fill(i, key) for i, key in enumerate(there)])
            mixed = [there[0], absent[0], there[1], absent[1]]
            sizes = await adapter.probe(mixed)
            assert [size is not None for size in sizes] == [True, False, True, False]
            outcomes = await adapter.load(mixed, FrameMemory(4).buffers)
            assert outcomes == [LoadOutcome.LOADED, LoadOutcome.MISSING] * 2

        self.run(test)

    def test_namespaces_are_apart(self) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            mine, other = keys(1, of=namespace(salt="a"))[0], keys(1, of=namespace(salt="b"))[0]
            memory = FrameMemory(1)
            await adapter.store([mine], [memory.fill(0, mine)])
            assert (await adapter.probe([mine, other]))[1] is None
            assert await adapter.load([other], memory.buffers) == [LoadOutcome.MISSING]

        self.run(test)

    def test_storing_again_keeps_the_object(self) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            key = keys(1)[0]
            memory, target = FrameMemory(1), FrameMemory(1)
            memory.fill(0, key)
            good = {StoreOutcome.STORED, StoreOutcome.ALREADY_THERE}
            assert set(await adapter.store([key], memory.buffers)) <= good
            assert set(await adapter.store([key], memory.buffers)) <= good
            await adapter.load([key], target.buffers)
            assert target.holds(0, key)

        self.run(test)

    def test_deleted_objects_are_gone(self) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(4)
            memory = FrameMemory(4)
            await adapter.store(wanted, [memory.fill(i, key) for i, key in enumerate(wanted)])
            assert await adapter.delete(wanted[2:]) == [True, True]
            assert await adapter.delete([wanted[1]], corrupt=True) == [True]
            assert [size is not None for size in await adapter.probe(wanted)] == [True, False, False, False]
            assert await adapter.delete(keys(1, seed=9)) == [True]
            assert await adapter.clear() == (1, memory.slot_bytes)
            assert await adapter.probe(wanted) == [None] * 4

        self.run(test)

    def test_operations_run_at_once(self) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            batches = [keys(16, seed=seed) for seed in range(6)]
            memories = [FrameMemory(16) for _ in batches]
            for memory, batch in zip(memories, batches, strict=True):
                for slot, key in enumerate(batch):
                    memory.fill(slot, key)
            await asyncio.gather(
                *(adapter.store(batch, memory.buffers) for batch, memory in zip(batches, memories, strict=True))
            )
            targets = [FrameMemory(16) for _ in batches]
            await asyncio.gather(
                *(adapter.load(batch, target.buffers) for batch, target in zip(batches, targets, strict=True)),
                *(adapter.probe(batch) for batch in batches),
            )
            for target, batch in zip(targets, batches, strict=True):
                assert all(target.holds(slot, key) for slot, key in enumerate(batch))

        self.run(test)

    def test_restart(self) -> None:
        """Everything is found again, youngest first, or nothing is left."""

        async def store(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(6)
            memory = FrameMemory(6)
            await adapter.store(wanted[:3], [memory.fill(i, key) for i, key in enumerate(wanted[:3])])
            await asyncio.sleep(0.01)
            await adapter.store(wanted[3:], [memory.fill(i, key) for i, key in enumerate(wanted[3:], 3)])
            await asyncio.sleep(0.01)
            await adapter.load([wanted[1]], memory.buffers[:1])

        async def look(adapter: Adapter, inventory: RecordingInventory) -> None:
            wanted = keys(6)
            target = FrameMemory(6)
            if self.persists:
                assert inventory.order == [wanted[i] for i in (1, 3, 4, 5, 0, 2)]
                assert set(inventory.objects.values()) == {target.slot_bytes}
                assert await adapter.load(wanted, target.buffers) == [LoadOutcome.LOADED] * 6
                assert all(target.holds(i, key) for i, key in enumerate(wanted))
            else:
                assert await adapter.probe(wanted) == [None] * 6

        self.run(store)
        self.run(look)
