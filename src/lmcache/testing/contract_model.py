"""Random operations on an adapter beside a dictionary that says what must come of them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.core.rounding import div_ceil
from lmcache.l2.adapter import Adapter
from lmcache.testing.contract_run import ContractRun, RecordingInventory
from lmcache.testing.frames import FrameMemory, keys, namespace

PAYLOADS_BYTES = (100, 5000, 12_288)
KEYS_PER_SIZE = 16
VERSIONS = 3  # contents that one key has over time: deleted and stored again must be the new one
BATCH = 8


class Model:
    """`objects`: the version that is there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.objects: dict[ObjectKey, int] = {}
        self.frames: dict[ObjectKey, list[bytes]] = {}
        for payload_bytes in PAYLOADS_BYTES:
            memory = FrameMemory(1, payload_bytes)
            for key in keys(KEYS_PER_SIZE, seed, namespace(f"model {payload_bytes}")):
                self.frames[key] = [
                    bytes(memory.fill(0, key, self.random.randbytes(payload_bytes))) for _ in range(VERSIONS)
                ]
        self.keys = list(self.frames)
        self.next_version = dict.fromkeys(self.keys, 0)

    def frame_bytes(self, key: ObjectKey) -> int:
        return len(self.frames[key][0])

    def expected(self, key: ObjectKey) -> bytes:
        return self.frames[key][self.objects[key]]

    def forget(self, some: Sequence[ObjectKey]) -> None:
        for key in some:
            if self.objects.pop(key, None) is not None:
                self.next_version[key] = (self.next_version[key] + 1) % VERSIONS


class Player:
    """One adapter and the model of it. Operations that run together have disjoint keys."""

    def __init__(self, adapter: Adapter, model: Model, can_delete: bool) -> None:
        self.adapter = adapter
        self.model = model
        self.operations: list[tuple[int, Callable[[Sequence[ObjectKey]], Awaitable[None]]]] = [
            (30, self.store),
            (30, self.load),
            (20, self.probe),
        ]
        if can_delete:
            self.operations += [(12, self.delete), (2, self.delete_corrupt)]
        self._weights = [weight for weight, _ in self.operations]

    async def step(self) -> None:
        chance = self.model.random
        together = 3 if chance.random() < 0.05 else 1
        chosen = chance.sample(self.model.keys, together * chance.randint(1, BATCH))
        size = len(chosen) // together
        running = []
        for index in range(together):
            _, operation = chance.choices(self.operations, self._weights)[0]
            running.append(operation(chosen[index * size : (index + 1) * size]))
        if together == 1:
            await running[0]
        else:
            await asyncio.gather(*running)

    async def store(self, some: Sequence[ObjectKey]) -> None:
        model = self.model
        versions = [model.objects.get(key, model.next_version[key]) for key in some]
        memory = [FrameMemory.of(model.frames[key][version]) for key, version in zip(some, versions, strict=True)]
        outcomes = await self.adapter.store(some, memory)
        for key, version, outcome in zip(some, versions, outcomes, strict=True):
            allowed = {StoreOutcome.STORED} | ({StoreOutcome.ALREADY_THERE} if key in model.objects else set())
            assert outcome in allowed
            model.objects[key] = version

    async def load(self, some: Sequence[ObjectKey]) -> None:
        buffers = [FrameMemory(1, self.model.frame_bytes(key) - 4096).buffers[0] for key in some]
        outcomes = await self.adapter.load(some, buffers)
        for key, buffer, outcome in zip(some, buffers, outcomes, strict=True):
            if key in self.model.objects:
                assert outcome is LoadOutcome.LOADED
                assert bytes(buffer) == self.model.expected(key), "the bytes that were stored last"
            else:
                assert outcome is LoadOutcome.MISSING

    async def probe(self, some: Sequence[ObjectKey]) -> None:
        expected = [self.model.frame_bytes(key) if key in self.model.objects else None for key in some]
        assert await self.adapter.probe(some) == expected

    async def delete(self, some: Sequence[ObjectKey]) -> None:
        assert await self.adapter.delete(some) == [True] * len(some)
        self.model.forget(some)

    async def delete_corrupt(self, some: Sequence[ObjectKey]) -> None:
        assert await self.adapter.delete(some[:1], corrupt=True) == [True]
        self.model.forget(some[:1])

    async def clear(self) -> None:
        model = self.model
        expected = len(model.objects), sum(map(model.frame_bytes, model.objects))
        assert await self.adapter.clear() == expected
        model.forget(list(model.objects))


class ModelTest(ContractRun):
    steps = 10_000
    most_steps: int | None = None  # of those that LMCACHE_CONTRACT_STEPS asks for, where each takes milliseconds
    openings = 10  # the steps are spread over so many openings of one backend

    def test_behaves_like_a_dictionary(self, tmp_path: Path) -> None:
        seed = int(os.environ.get("LMCACHE_CONTRACT_SEED", "1"))
        steps = int(os.environ.get("LMCACHE_CONTRACT_STEPS", self.steps))
        steps = min(steps, self.most_steps or steps)
        print(f"LMCACHE_CONTRACT_SEED={seed} LMCACHE_CONTRACT_STEPS={steps}")
        model = Model(seed)
        openings = 1 if self.after_restart == "found" else self.openings  # sizes and contents are not reported again

        async def live(adapter: Adapter, inventory: RecordingInventory) -> None:
            if self.after_restart == "gone":
                model.forget(list(model.objects))
            assert inventory.objects == {key: model.frame_bytes(key) for key in model.objects}
            player = Player(adapter, model, self.can_delete)
            for _ in range(div_ceil(steps, openings)):
                await player.step()
                if self.can_delete and model.random.random() < 0.002:
                    await player.clear()

        for _ in range(openings):
            self.run(tmp_path, live)
