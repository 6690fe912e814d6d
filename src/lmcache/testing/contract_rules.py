"""The rules of the adapter contract (l2/adapter.py), one test each."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError
from lmcache.l2.adapter import Adapter
from lmcache.testing.contract_run import ContractRun, RecordingInventory
from lmcache.testing.frames import FrameMemory, keys, namespace

LOADED, MISSING = LoadOutcome.LOADED, LoadOutcome.MISSING
GONE_WITHIN_SECONDS = 10.0  # threads end some time after close()

ODD_NAMES = (
    "",
    " ",
    ".",
    "..",
    "../../etc/passwd",
    "/absolute",
    "C:\\windows",
    "a/b/c@d%2F:e?f#g*|<>\"'`$(x);&",
    "new\nline\ttab\x00zero\x7f",
    "\u540d\u524d \U0001f600 e\u0301 \u00e9 \u202e",
    "x" * 400,
)


async def _stored(adapter: Adapter, wanted: Sequence[ObjectKey], payload_bytes: int = 12_288) -> FrameMemory:
    memory = FrameMemory(len(wanted), payload_bytes)
    outcomes = await adapter.store(wanted, [memory.fill(slot, key) for slot, key in enumerate(wanted)])
    assert outcomes == [StoreOutcome.STORED] * len(wanted)
    return memory


async def _loads(adapter: Adapter, wanted: Sequence[ObjectKey], payload_bytes: int = 12_288) -> bool:
    """Whether every byte of every object comes back."""
    target = FrameMemory(len(wanted), payload_bytes)
    outcomes = await adapter.load(wanted, target.buffers)
    return outcomes == [LOADED] * len(wanted) and all(target.holds(slot, key) for slot, key in enumerate(wanted))


class ObjectRules(ContractRun):
    def test_what_was_stored_is_probed_and_loaded(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(40)
            memory = await _stored(adapter, wanted)
            assert await adapter.probe(wanted) == [memory.slot_bytes] * 40
            assert await _loads(adapter, wanted) and await _loads(adapter, wanted[::-1])
            assert await _loads(adapter, wanted[7:8])

        self.run(tmp_path, test)

    def test_absent_objects_are_missing(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            stored, absent = keys(2, seed=1), keys(2, seed=2)
            assert await adapter.probe(absent) == [None, None]
            await _stored(adapter, stored)
            mixed = [stored[0], absent[0], stored[1], absent[1]]
            assert [size is not None for size in await adapter.probe(mixed)] == [True, False, True, False]
            target = FrameMemory(4)
            assert await adapter.load(mixed, target.buffers) == [LOADED, MISSING, LOADED, MISSING]
            assert target.holds(0, stored[0]) and target.holds(2, stored[1])

        self.run(tmp_path, test)

    def test_nothing_asked_is_nothing_answered(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            assert await adapter.store([], []) == [] == await adapter.load([], [])
            assert await adapter.probe([]) == [] == await adapter.delete([])

        self.run(tmp_path, test)

    def test_large_batches(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted, absent = keys(64, seed=3), keys(4032, seed=4)
            await _stored(adapter, wanted, payload_bytes=4096)
            sizes = await adapter.probe(wanted + absent)
            assert [size is not None for size in sizes] == [True] * 64 + [False] * 4032

        self.run(tmp_path, test)

    def test_storing_again_keeps_the_object(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(3)
            memory = await _stored(adapter, wanted)
            for _again in range(2):
                outcomes = await adapter.store(wanted, memory.buffers)
                assert set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.ALREADY_THERE}
                assert await _loads(adapter, wanted)

        self.run(tmp_path, test)

    def test_stores_of_one_object_at_once(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(4)
            memory = FrameMemory(4)
            buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
            answers = await asyncio.gather(*(adapter.store(wanted, buffers) for _ in range(4)))
            assert {outcome for outcomes in answers for outcome in outcomes} <= {
                StoreOutcome.STORED,
                StoreOutcome.ALREADY_THERE,
            }
            assert await _loads(adapter, wanted)
            if self.can_delete:
                assert await adapter.clear() == (4, 4 * memory.slot_bytes)

        self.run(tmp_path, test)

    def test_deleted_objects_are_gone(self, tmp_path: Path) -> None:
        self._needs_delete()

        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(5)
            await _stored(adapter, wanted)
            assert await adapter.delete(wanted[3:]) == [True, True]
            assert [size is not None for size in await adapter.probe(wanted)] == [True] * 3 + [False] * 2
            assert await adapter.load(wanted[3:], FrameMemory(2).buffers) == [MISSING, MISSING]
            assert await adapter.delete(wanted[3:]) == [True, True]  # gone is gone
            assert await adapter.delete(keys(1, seed=9)) == [True]
            assert await _loads(adapter, wanted[:3])
            await _stored(adapter, wanted[3:])
            assert await _loads(adapter, wanted)

        self.run(tmp_path, test)

    def test_stored_again_after_deletion_is_the_new_one(self, tmp_path: Path) -> None:
        self._needs_delete()

        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            key, memory = keys(1)[0], FrameMemory(1)
            for content in (b"1", b"2"):
                await adapter.store([key], [memory.fill(0, key, content * memory.payload_bytes)])
                memory.buffers[0][:] = bytes(memory.slot_bytes)
                assert await adapter.load([key], memory.buffers) == [LOADED]
                assert memory.buffers[0][4096:] == content * memory.payload_bytes
                assert await adapter.delete([key]) == [True]

        self.run(tmp_path, test)

    def test_corrupt_objects_are_never_met_again(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(3)
            await _stored(adapter, wanted)
            gone = await adapter.delete([wanted[1]], corrupt=True)
            assert gone == [self.can_delete]
            assert [size is not None for size in await adapter.probe(wanted)] == [True, False, True]
            assert await adapter.delete(keys(1, seed=9), corrupt=True) == [True]  # it never was
            outcomes = await adapter.store([wanted[1]], [FrameMemory(1).fill(0, wanted[1])])
            if self.can_delete:
                assert outcomes == [StoreOutcome.STORED] and await _loads(adapter, wanted)

        self.run(tmp_path, test)

    def test_clear_leaves_nothing(self, tmp_path: Path) -> None:
        self._needs_delete()

        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            first, second = keys(3), keys(2, of=namespace("other"))
            memory = await _stored(adapter, first)
            await _stored(adapter, second)
            assert await adapter.clear() == (5, 5 * memory.slot_bytes)
            assert await adapter.probe(first + second) == [None] * 5
            assert await adapter.clear() == (0, 0)
            await _stored(adapter, first)
            assert await _loads(adapter, first)

        self.run(tmp_path, test)

    def _needs_delete(self) -> None:
        if not self.can_delete:
            pytest.skip("this adapter cannot delete")


class KeyRules(ContractRun):
    def test_every_part_of_a_key_counts(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            base = namespace(salt="a")
            others = [
                replace(base, model_name="another"),
                replace(base, world_size=4),
                replace(base, rank=1),
                replace(base, object_group=1),
                replace(base, layout="f" * 32),
                replace(base, cache_salt="b"),
                replace(base, cache_salt=""),
            ]
            mine = keys(1, of=base)[0]
            same_hash = [ObjectKey(other, mine.chunk_hash) for other in others]
            near_hash = [ObjectKey(base, mine.chunk_hash[:31] + bytes([mine.chunk_hash[31] ^ 1]))]
            await _stored(adapter, [mine])
            for absent in (same_hash, near_hash):
                assert await adapter.probe(absent) == [None] * len(absent)
                assert await adapter.load(absent, FrameMemory(len(absent)).buffers) == [MISSING] * len(absent)
            await _stored(adapter, same_hash)
            assert await _loads(adapter, [mine, *same_hash])

        self.run(tmp_path, test)

    def test_equal_keys_name_one_object(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            await _stored(adapter, keys(2))
            again = [ObjectKey(replace(key.namespace), bytes(bytearray(key.chunk_hash))) for key in keys(2)]
            assert await _loads(adapter, again)

        self.run(tmp_path, test)

    def test_names_may_hold_anything(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = [key for name in ODD_NAMES for key in keys(1, of=namespace(name, salt=name[::-1]))]
            wanted += [key for name in ODD_NAMES for key in keys(1, of=namespace("model", salt=name))]
            wanted += [ObjectKey(namespace(), bytes(32)), ObjectKey(namespace(), b"\xff" * 32)]
            await _stored(adapter, wanted)
            assert await _loads(adapter, wanted)

        self.run(tmp_path, test)


class BufferRules(ContractRun):
    def test_stored_memory_is_only_read_and_only_until_the_return(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted, memory = keys(8), FrameMemory(8)
            before = [bytes(memory.fill(slot, key)) for slot, key in enumerate(wanted)]
            await adapter.store(wanted, memory.buffers)
            assert [bytes(buffer) for buffer in memory.buffers] == before
            for buffer in memory.buffers:
                buffer[:] = b"\xaa" * buffer.nbytes
            assert await _loads(adapter, wanted)

        self.run(tmp_path, test)

    def test_loaded_memory_is_not_touched_after_the_return(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted, absent = keys(8), keys(8, seed=5)
            await _stored(adapter, wanted)
            target = FrameMemory(16)
            await adapter.load(wanted + absent, target.buffers)
            for buffer in target.buffers:
                buffer[:] = b"\xaa" * buffer.nbytes
            for _again in range(3):
                assert await _loads(adapter, wanted)
            assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers)

        self.run(tmp_path, test)

    def test_only_the_given_memory_is_written(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(3)
            await _stored(adapter, wanted)
            target = FrameMemory(7)
            for buffer in target.buffers:
                buffer[:] = b"\xaa" * buffer.nbytes
            assert await adapter.load(wanted, target.buffers[1:7:2]) == [LOADED] * 3
            assert all(target.holds(slot, key) for slot, key in zip((1, 3, 5), wanted, strict=True))
            assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers[::2])

        self.run(tmp_path, test)

    def test_sizes_are_mixed(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            sizes = (1, 4096, 4097, 65_536, 100_000)
            memories = [FrameMemory(1, size) for size in sizes]
            wanted = [keys(1, of=namespace(f"of {size}"))[0] for size in sizes]
            await adapter.store(wanted, [memory.fill(0, key) for memory, key in zip(memories, wanted, strict=True)])
            assert await adapter.probe(wanted) == [memory.slot_bytes for memory in memories]
            targets = [FrameMemory(1, size) for size in sizes]
            assert await adapter.load(wanted, [target.buffers[0] for target in targets]) == [LOADED] * len(sizes)
            assert all(target.holds(0, key) for target, key in zip(targets, wanted, strict=True))

        self.run(tmp_path, test)

    def test_a_frame_that_does_not_fit_is_never_taken_for_whole(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(1)
            await _stored(adapter, wanted)
            target = FrameMemory(3, 4096)  # too small
            for buffer in target.buffers:
                buffer[:] = b"\xaa" * buffer.nbytes
            outcomes = await adapter.load(wanted, [target.buffers[1]])
            assert outcomes != [LOADED] or target.verify(1, wanted[0])
            assert all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in target.buffers[::2])

        self.run(tmp_path, test)

    def test_a_frame_may_be_loaded_into_more_than_it_needs(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(1)
            await _stored(adapter, wanted)
            target = FrameMemory(1, align_bytes=65_536)
            assert await adapter.load(wanted, target.buffers) == [LOADED] and target.holds(0, wanted[0])

        self.run(tmp_path, test)

    def test_readers_see_whole_objects_or_none(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            size = 262_144
            wanted, memory, target = keys(16), FrameMemory(16, size), FrameMemory(16, size)
            buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
            storing = asyncio.ensure_future(adapter.store(wanted, buffers))
            while True:
                last = storing.done()
                outcomes = await adapter.load(wanted, target.buffers)
                assert set(outcomes) <= {LOADED, MISSING}
                seen = [slot for slot, outcome in enumerate(outcomes) if outcome is LOADED]
                assert all(target.verify(slot, wanted[slot]) == "" for slot in seen)
                if last:
                    break
                await asyncio.sleep(0)
            assert await storing == [StoreOutcome.STORED] * 16 and len(seen) == 16

        self.run(tmp_path, test)

    def test_a_batch_appears_in_prefix_order(self, tmp_path: Path) -> None:
        if not self.keeps_prefix_order:
            pytest.skip("this adapter does not promise it")

        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted, memory = keys(24), FrameMemory(24, 131_072)
            buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
            storing = asyncio.ensure_future(adapter.store(wanted, buffers))
            while not storing.done():
                seen = False
                for key in reversed(wanted):  # what was there for a later key is there for every earlier one
                    is_stored = (await adapter.probe([key]))[0] is not None
                    assert is_stored or not seen, "a hole in a batch under way"
                    seen = is_stored
                await asyncio.sleep(0)
            await storing

        self.run(tmp_path, test)

    def test_operations_run_at_once(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            batches = [keys(16, seed=seed) for seed in range(6)]
            await asyncio.gather(*(_stored(adapter, batch) for batch in batches))
            reads: list[Awaitable[object]] = [_loads(adapter, batch) for batch in batches]
            reads += [adapter.probe(batch) for batch in batches]
            results = await asyncio.gather(*reads)
            assert results[:6] == [True] * 6

        self.run(tmp_path, test)


class LifeRules(ContractRun):
    def test_capacity_and_status_are_figures(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            capacity, wanted = adapter.capacity, keys(8)
            sizes = (4096, 8192, 12_288, 1 << 21)
            assert all(capacity.charge(size) >= size for size in sizes), "at least what an object has"
            assert capacity.limit_bytes is None or capacity.limit_bytes > 0
            assert adapter.overhead_bytes() >= 0
            assert capacity.folder_bytes >= 0
            await _stored(adapter, wanted)
            assert adapter.capacity == capacity, "constant while it is open"
            status = adapter.status()
            assert all(isinstance(name, str) and isinstance(value, int) for name, value in status.items())

        self.run(tmp_path, test)

    def test_closing_is_idempotent(self, tmp_path: Path) -> None:
        async def never_opened() -> None:
            adapter = self.build(tmp_path)
            await adapter.close()
            await adapter.close()

        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            await adapter.close()
            await adapter.close()  # and a third time by the frame of the test

        asyncio.run(never_opened())
        self.run(tmp_path, test)

    def test_closing_gives_everything_back(self, tmp_path: Path) -> None:
        async def use(adapter: Adapter, _: RecordingInventory) -> None:
            await _stored(adapter, keys(2))
            assert await _loads(adapter, keys(2))
            if self.can_delete:
                await adapter.clear()

        async def settled(limit: tuple[int, int] | None = None) -> tuple[int, int]:
            """Descriptors and threads, as soon as they are within the limit or time is up."""
            loop = asyncio.get_running_loop()
            end = loop.time() + GONE_WITHIN_SECONDS
            while True:
                gc.collect()
                counts = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
                if limit is None or loop.time() > end or (counts[0] <= limit[0] and counts[1] <= limit[1]):
                    return counts
                await asyncio.sleep(0.02)

        self.run(tmp_path, use)  # what is made once in a process is made now
        before = asyncio.run(settled())
        for _ in range(3):
            self.run(tmp_path, use)
        after = asyncio.run(settled(before))
        assert after[0] <= before[0] and after[1] <= before[1], "descriptors and threads are left after close()"

    def test_closing_leaves_no_task(self, tmp_path: Path) -> None:
        async def whole() -> None:
            adapter, inventory = self.build(tmp_path), RecordingInventory()
            await adapter.open(inventory)
            await inventory.completed.wait()
            await _stored(adapter, keys(2))
            await adapter.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(whole())

    def test_restart(self, tmp_path: Path) -> None:
        """Everything is reported, youngest first, or found when it is asked for, or gone: as the adapter promises."""

        async def store(adapter: Adapter, _: RecordingInventory) -> None:
            wanted = keys(6)
            await _stored(adapter, wanted[:3])
            await asyncio.sleep(0.01)
            await _stored(adapter, wanted[3:])
            await asyncio.sleep(0.01)
            assert await _loads(adapter, [wanted[1]])

        async def look(adapter: Adapter, inventory: RecordingInventory) -> None:
            wanted = keys(6)
            if self.after_restart == "told":
                assert inventory.order == [wanted[i] for i in (1, 3, 4, 5, 0, 2)], "the youngest first"
            if self.after_restart in ("told", "listed"):
                assert inventory.objects == dict.fromkeys(wanted, FrameMemory(1).slot_bytes)
            else:
                assert not inventory.order
            if self.after_restart == "gone":
                assert await adapter.probe(wanted) == [None] * 6
            else:
                assert None not in await adapter.probe(wanted)
                assert await _loads(adapter, wanted)

        self.run(tmp_path, store)
        self.run(tmp_path, look)

    def test_faults_are_outcomes_or_adapter_errors(self, tmp_path: Path) -> None:
        async def test(adapter: Adapter, _: RecordingInventory) -> None:
            wanted, fresh = keys(4), keys(4, seed=7)
            memory = await _stored(adapter, wanted)
            if not self.break_backend(tmp_path):
                pytest.skip("this test does not know how to break the backend")
            for calls in range(2):
                operations: list[Callable[[], Awaitable[object]]] = [
                    partial(adapter.store, fresh, [memory.fill(slot, key) for slot, key in enumerate(fresh)]),
                    partial(adapter.load, wanted, FrameMemory(4).buffers),
                    partial(adapter.probe, wanted),
                    partial(adapter.delete, wanted),
                    partial(adapter.delete, wanted, corrupt=True),
                    adapter.clear,
                ]
                for operation in operations:
                    try:
                        result = await operation()
                    except AdapterError as error:
                        assert str(error), f"an empty message in round {calls}"
                    else:
                        assert result not in ([StoreOutcome.STORED] * 4, [LOADED] * 4)

        self.run(tmp_path, test)
