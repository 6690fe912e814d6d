"""What a storage loop remembers ends with what it is about, however that ends:
TEST_TIERING_ROUNDS of it."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from collections.abc import Sequence

import pytest

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, LMCacheError
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.tiering.storage_loop import StorageLoop
from polling import until
from seeds import SEED
from support.faults import FaultyAdapter
from support.held_items import held_items
from unit.tiering.support import ENGINE, MOCK, Rig, faulty, keys, open_rig

ROUNDS = int(os.environ.get("TEST_TIERING_ROUNDS", "1000"))


def held(storage: StorageLoop) -> dict[str, int]:
    """Without what S3FIFO remembers of what has gone: no more than there was."""
    items = held_items(storage, "lmcache.tiering", "lmcache.l2.", without=(FaultyAdapter,))
    return {path: count for path, count in items.items() if not path.endswith("._ghosts")}


def open_later(adapter: FaultyAdapter) -> None:
    asyncio.get_running_loop().call_later(0.005, adapter.gate.set)


def one_round(rig: Rig, number: int, dice: random.Random, adapters: Sequence[FaultyAdapter]) -> None:
    """Stores, and before or after that has ended: a fetch that is given up, a store that is, faults, a clear."""
    for adapter in adapters:
        adapter.store_outcome = dice.choice([None] * 6 + [StoreOutcome.FAILED, StoreOutcome.FULL])
        adapter.load_outcome = dice.choice([None] * 6 + [LoadOutcome.FAILED, LoadOutcome.MISSING])
        adapter.raises = dice.choice([None] * 20 + [AdapterError("fault")])
    stalls = dice.random() < 0.3
    if stalls:
        rig.storage.call_soon(adapters[0].gate.clear)
    for part in range(dice.randrange(1, 6)):  # more than are written at once: the rest is queued
        chunks = keys(3, seed=5 * number + part)
        if dice.random() < 0.1:
            rig.l1.core.abort(rig.reserve(chunks)[0])
        rig.put(chunks)
    if dice.random() < 0.4:
        wanted = keys(3, seed=5 * dice.randrange(number + 1))
        answers, cancel = rig.begin_fetch(wanted, deadline_seconds=dice.choice([0.001, 20.0]))
        cancel()
        rig.l1.core.release(answers.get(timeout=30).lease)
    if stalls:
        rig.storage.call_soon(lambda: open_later(adapters[0]))
    rig.storage.clear(dice.choice(["l1", "l2", "all"]))


@pytest.mark.parametrize(("store_policy", "policy"), [("default", "S3FIFO"), ("skip_l1", "IsolatedLRU")])
def test_many_rounds_leave_nothing_behind(store_policy: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "L2_RETRY_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(limits, "L2_BREAKER_OPEN_SECONDS", 0.01)
    monkeypatch.setattr(limits, "L2_BREAKER_MAX_OPEN_SECONDS", 0.01)
    dice = random.Random(SEED)
    adapters = []
    configured = []
    for index in range(2):
        built, adapter = faulty({**MOCK, "eviction": {"eviction_policy": policy}}, index)
        configured.append(built)
        adapters.append(adapter)
    with open_rig(configured, slots=64, store_policy=store_policy) as rig:
        at_first = held(rig.storage)
        for number in range(ROUNDS):
            try:
                one_round(rig, number, dice, adapters)
            except LMCacheError:
                pass
        for adapter in adapters:
            adapter.store_outcome = adapter.load_outcome = adapter.raises = None
        rig.l1.core.drop_owner(ENGINE)

        def as_at_first() -> bool:
            rig.storage.clear("all")
            found: list[dict[str, int]] = []
            rig.storage.call_soon(lambda: found.append(held(rig.storage)))
            assert rig.storage.responsive(20)
            return found == [at_first]

        until(as_at_first, tell=lambda: {**held(rig.storage), "at first": at_first})


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
    with open_rig([ConfiguredAdapter(configured.config, keeping)]) as rig:
        assert rig.put(keys(8)) == 8
        assert rig.storage.flush(20)
        until(rig.idle)
        for buffer in keeping.kept:
            buffer.release()  # the collector of Python 3.11 does not survive one in a cycle
