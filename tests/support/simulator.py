"""Time that passes only when nothing else can happen, and a medium on which the dice decide what goes wrong."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache.core.key import ObjectKey
from lmcache.core.limits import MIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, CapacityError
from lmcache.l2.adapter import Capacity, Inventory

T = TypeVar("T")


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: where a real one would sleep, the loop's time jumps."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        self._inner = selectors.DefaultSelector()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the simulation stands still: nothing is due and nothing can happen")
            self._jump(max(0.0, timeout))
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop and clock in one. What runs on it must not use other threads."""

    def __init__(self) -> None:
        self._now_seconds = 1000.0
        super().__init__(_JumpingSelector(self._jump))

    def _jump(self, seconds: float) -> None:
        self._now_seconds += seconds

    def time(self) -> float:
        return self._now_seconds

    def monotonic(self) -> float:
        return self._now_seconds

    def wall(self) -> float:
        return self._now_seconds

    def sleep(self, seconds: float) -> None:
        self._jump(seconds)


class InlineExecutor(Executor):
    """Runs what it is given before `submit` returns."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # as an executor does
            future.set_exception(error)
        return future


@dataclass
class Faults:
    """How likely each is, for one object or one operation."""

    error: float = 0.02  # the operation raises
    failed: float = 0.02  # an object's I/O fails
    full: float = 0.01
    stall: float = 0.01  # an operation or a copy takes longer than any deadline, and then does what it was to do
    torn: float = 0.02  # a store keeps only its beginning
    misdirected: float = 0.02  # a store or load meets another object's place
    flipped: float = 0.02  # a bit of what is loaded
    forgotten: float = 0.02  # what was stored is gone


NO_FAULTS = Faults(*[0.0] * 8)


class SimulatedMedium:
    """An adapter over a dictionary, on which the faults happen."""

    def __init__(self, dice: random.Random, capacity_bytes: int | None, slowest_seconds: float) -> None:
        self.faults = NO_FAULTS
        self.objects: dict[ObjectKey, bytes] = {}
        self._dice = dice
        self._capacity = Capacity(limit_bytes=capacity_bytes, unit_bytes=4096)
        self._slowest_seconds = slowest_seconds

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def overhead_bytes(self) -> int:
        return 0

    def status(self) -> dict[str, int]:
        return {}

    async def open(self, inventory: Inventory) -> None:
        inventory.complete()

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        await self._begin()
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            await self._work(buffer.nbytes)
            if self._happens(self.faults.failed):
                outcomes.append(StoreOutcome.FAILED)
                continue
            if self._happens(self.faults.full):
                if self._happens(0.5):
                    raise CapacityError("no space left")
                outcomes.append(StoreOutcome.FULL)
                continue
            content = bytes(buffer)
            if self._happens(self.faults.torn):
                content = content[: self._dice.randrange(len(content))]
            place = self._dice.choice(list(keys)) if self._happens(self.faults.misdirected) else key
            self.objects[place] = content
            outcomes.append(StoreOutcome.STORED)
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        await self._begin()
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            await self._work(buffer.nbytes)
            if self._happens(self.faults.forgotten):
                self.objects.pop(key, None)
            place = self._dice.choice(list(self.objects) or [key]) if self._happens(self.faults.misdirected) else key
            content = self.objects.get(place)
            if content is None:
                outcomes.append(LoadOutcome.MISSING)
                continue
            # Half of it, a pause, the rest: somebody may look in between.
            half, end = len(content) // 2, min(len(content), buffer.nbytes)
            buffer[: min(half, end)] = content[: min(half, end)]
            await asyncio.sleep(self._dice.uniform(10, 200) if self._happens(self.faults.stall) else 0)
            buffer[min(half, end) : end] = content[min(half, end) : end]
            if self._happens(self.faults.flipped):
                buffer[self._dice.randrange(buffer.nbytes)] ^= 1 << self._dice.randrange(8)
            outcomes.append(LoadOutcome.FAILED if self._happens(self.faults.failed) else LoadOutcome.LOADED)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await self._begin()
        return [len(self.objects[key]) if key in self.objects else None for key in keys]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        await self._begin()
        gone = []
        for key in keys:
            if failed := self._happens(self.faults.failed):
                gone.append(not failed)
                continue
            self.objects.pop(key, None)
            gone.append(True)
        return gone

    async def clear(self) -> tuple[int, int]:
        count, size_bytes = len(self.objects), sum(map(len, self.objects.values()))
        self.objects.clear()
        return count, size_bytes

    async def close(self) -> None:
        pass

    async def _begin(self) -> None:
        await asyncio.sleep(self._dice.random() * self._slowest_seconds)
        if self._happens(self.faults.stall):
            await asyncio.sleep(self._dice.uniform(10, 200))
        if self._happens(self.faults.error):
            raise AdapterError("input/output error", retryable=self._happens(0.5))

    async def _work(self, size_bytes: int) -> None:
        await asyncio.sleep(size_bytes / (100 * MIB))

    def _happens(self, probability: float) -> bool:
        return self._dice.random() < probability
