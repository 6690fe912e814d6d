"""What a storage loop remembers ends with what it is about, however that ends."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, LMCacheError
from lmcache.l2.registry import ConfiguredAdapter
from lmcache.testing.faults import FaultyAdapter
from lmcache.tiering.storage import Storage
from polling import until
from unit.tiering.support import ENGINE, MOCK, Rig, faulty, keys, rig

ROUNDS = 1_000
SIZED = (dict, set, deque, list)
PARTS = ("lmcache.tiering", "lmcache.l2.", "lmcache.eviction")


def sizes(part: object, path: str = "", seen: set[int] | None = None) -> dict[str, int]:
    """How much every collection holds that can be reached from here through objects of the storage side."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, FaultyAdapter):
        return {}
    seen.add(id(part))
    found: dict[str, int] = {}
    if isinstance(part, SIZED):
        found[path] = len(part)
        for index, item in enumerate(part.values() if isinstance(part, dict) else part):
            found.update(sizes(item, f"{path}[{index}]", seen))
    elif type(part).__module__.startswith(PARTS):
        for name, value in _attributes(part).items():
            found.update(sizes(value, f"{path}.{name}", seen))
    return found


def _attributes(part: object) -> dict[str, Any]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(part, "__dict__", {}), **{name: getattr(part, name) for name in slots if hasattr(part, name)}}


def held(storage: Storage) -> dict[str, int]:
    """Without what S3FIFO remembers of what has gone: no more than there was."""
    return {path: size for path, size in sizes(storage).items() if size and not path.endswith("._ghosts")}


def one_round(it: Rig, number: int, dice: random.Random, adapters: Sequence[FaultyAdapter]) -> None:
    """Stores, and before or after that has ended: a fetch that is given up, a store that is, faults, a clear."""
    for adapter in adapters:
        adapter.store_outcome = dice.choice([None] * 6 + [StoreOutcome.FAILED, StoreOutcome.FULL])
        adapter.load_outcome = dice.choice([None] * 6 + [LoadOutcome.FAILED, LoadOutcome.MISSING])
        adapter.raises = dice.choice([None] * 20 + [AdapterError("fault")])
    stalls = dice.random() < 0.3
    if stalls:
        it.storage.call_soon(adapters[0].gate.clear)
    for part in range(dice.randrange(1, 6)):  # more than are written at once: the rest is queued
        chunks = keys(3, seed=5 * number + part)
        if dice.random() < 0.1:
            it.l1.core.abort(it.reserve(chunks)[0])
        it.put(chunks)
    if dice.random() < 0.4:
        wanted = keys(3, seed=5 * dice.randrange(number + 1))
        answers, cancel = it.begin_fetch(wanted, deadline_seconds=dice.choice([0.001, 20.0]))
        cancel()
        it.l1.core.release(answers.get(timeout=30).lease)
    if stalls:
        loop = it.storage._loop
        it.storage.call_soon(lambda: loop.call_later(0.005, adapters[0].gate.set) and None)
    it.storage.clear(dice.choice(["l1", "l2", "all"]))


@pytest.mark.parametrize(("store_policy", "policy"), [("default", "S3FIFO"), ("skip_l1", "IsolatedLRU")])
def test_a_thousand_rounds_leave_nothing_behind(
    store_policy: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "L2_RETRY_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(limits, "L2_BREAKER_OPEN_SECONDS", 0.01)
    monkeypatch.setattr(limits, "L2_BREAKER_MAX_OPEN_SECONDS", 0.01)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    adapters = []
    configured = []
    for index in range(2):
        built, adapter = faulty({**MOCK, "eviction": {"eviction_policy": policy}}, index)
        configured.append(built)
        adapters.append(adapter)
    with rig(configured, slots=64, store_policy=store_policy) as it:
        at_first = held(it.storage)
        for number in range(ROUNDS):
            try:
                one_round(it, number, dice, adapters)
            except LMCacheError:
                pass
        for adapter in adapters:
            adapter.store_outcome = adapter.load_outcome = adapter.raises = None
        it.l1.core.drop_owner(ENGINE)

        def as_at_first() -> bool:
            it.storage.clear("all")
            found: list[dict[str, int]] = []
            it.storage.call_soon(lambda: found.append(held(it.storage)))
            assert it.storage.responsive(20)
            return found == [at_first]

        until(as_at_first, tell=lambda: {**held(it.storage), "at first": at_first})


class Keeps(FaultyAdapter):
    """What an adapter from outside may do: an export of a buffer outlives the call, here for ever."""

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        self.kept = [pickle.PickleBuffer(buffer) for buffer in buffers]
        return await super().store(keys, buffers)


@pytest.mark.parametrize("fault", [None, AdapterError("fault")])
def test_an_adapter_that_keeps_a_buffer_does_not_keep_its_lease(fault: AdapterError | None) -> None:
    configured, faulted = faulty()
    keeping = Keeps(faulted.inner)
    keeping.raises = fault
    with rig([ConfiguredAdapter(configured.config, keeping)]) as it:
        assert it.put(keys(8)) == 8
        assert it.storage.flush(20)
        until(it.idle)
        for buffer in keeping.kept:
            buffer.release()  # the collector of Python 3.11 does not survive one in a cycle
