"""The contract suite notices adapters that break a rule: each defect here fails the test that is named beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapters.mock import MockAdapter
from lmcache.testing.adapter_contract import AdapterContract


class Sound(MockAdapter):
    """Keeps its objects for the next one on the same folder, as a backend does."""

    backends: dict[Path, dict[ObjectKey, bytes]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(Capacity(), 1e12)
        self.objects = self.backends.setdefault(folder, self.objects)

    async def open(self, inventory: Inventory) -> None:
        inventory.found([(key, len(frame)) for key, frame in reversed(self.objects.items())])
        inventory.complete()


class ForgetsNothing(Sound):
    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        return [True] * len(keys)


class IgnoresSalts(Sound):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        return await super().store([_unsalted(key) for key in keys], buffers)

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        return await super().load([_unsalted(key) for key in keys], buffers)

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await super().probe([_unsalted(key) for key in keys])


class KeepsBuffers(Sound):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            self.objects[key] = buffer
        return [StoreOutcome.STORED] * len(keys)


class WritesLate(Sound):
    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = await super().load(keys, buffers)
        asyncio.get_running_loop().call_later(0, buffers[0].__setitem__, slice(0, 1), b"\0") if buffers else None
        return outcomes


class AnswersEarly(Sound):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        frames = [bytes(buffer) for buffer in buffers]
        asyncio.get_running_loop().call_later(0.01, self.objects.update, dict(zip(keys, frames, strict=True)))
        return [StoreOutcome.STORED] * len(keys)


class ShowsHalves(Sound):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            self.objects[key] = bytes(buffer[: buffer.nbytes // 2]) + bytes(buffer.nbytes // 2)
        for _ in range(3):
            await asyncio.sleep(0)
        self.objects.update((key, bytes(buffer)) for key, buffer in zip(keys, buffers, strict=True))
        return [StoreOutcome.STORED] * len(keys)


class StoresBackwards(Sound):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        for key, buffer in list(zip(keys, buffers, strict=True))[::-1]:
            self.objects[key] = bytes(buffer)
            for _ in range(2 * len(keys)):
                await asyncio.sleep(0)
        return [StoreOutcome.STORED] * len(keys)

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await asyncio.sleep(0)
        return await super().probe(keys)


class OverrunsBuffers(Sound):
    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = await super().load(keys, buffers)
        if buffers and buffers[0].nbytes < 3 * 4096:
            memoryview(buffers[0].obj)[: buffers[0].nbytes] = bytes(buffers[0].nbytes)
        return outcomes


class LeavesTasks(Sound):
    async def open(self, inventory: Inventory) -> None:
        await super().open(inventory)
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(3600))


class ClosesOnce(Sound):
    closed = False

    async def close(self) -> None:
        assert not self.closed
        self.closed = True


class TellsTheOldestFirst(Sound):
    async def open(self, inventory: Inventory) -> None:
        inventory.found([(key, len(frame)) for key, frame in self.objects.items()])
        inventory.complete()


class ChargesTooLittle(Sound):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.capacity = Capacity(object_overhead_bytes=-1)


class Resurrects(Sound):
    """What was deleted comes back with the next store of anything."""

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        self.graveyard = {key: self.objects[key] for key in keys if key in self.objects}
        return await super().delete(keys)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        self.objects.update(getattr(self, "graveyard", {}))
        return await super().store(keys, buffers)


def _unsalted(key: ObjectKey) -> ObjectKey:
    return ObjectKey(replace(key.namespace, cache_salt=""), key.chunk_hash)


@pytest.mark.parametrize(
    ("adapter", "test"),
    [
        (ForgetsNothing, "deleted_objects_are_gone"),
        (ForgetsNothing, "behaves_like_a_dictionary"),
        (IgnoresSalts, "every_part_of_a_key_counts"),
        (KeepsBuffers, "stored_memory_is_only_read_and_only_until_the_return"),
        (WritesLate, "loaded_memory_is_not_touched_after_the_return"),
        (AnswersEarly, "what_was_stored_is_probed_and_loaded"),
        (AnswersEarly, "behaves_like_a_dictionary"),
        (ShowsHalves, "readers_see_whole_objects_or_none"),
        (StoresBackwards, "a_batch_appears_in_prefix_order"),
        (OverrunsBuffers, "a_frame_that_does_not_fit_is_never_taken_for_whole"),
        (LeavesTasks, "closing_leaves_no_task"),
        (ClosesOnce, "closing_is_idempotent"),
        (TellsTheOldestFirst, "restart"),
        (ChargesTooLittle, "capacity_and_status_are_figures"),
        (Resurrects, "stored_again_after_deletion_is_the_new_one"),
        (Resurrects, "behaves_like_a_dictionary"),
    ],
)
def test_a_defect_is_noticed(adapter: Callable[[Path], Adapter], test: str, tmp_path: Path) -> None:
    class Contract(AdapterContract):
        after_restart = "told"
        steps = 300

        def build(self, folder: Path) -> Adapter:
            return adapter(folder)

    run: Any = getattr(Contract(), f"test_{test}")
    with pytest.raises(AssertionError):
        run(tmp_path)
