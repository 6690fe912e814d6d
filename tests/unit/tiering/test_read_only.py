"""An adapter over what belongs to others is asked and loaded from, and nothing else happens to it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence

import pytest

from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, MissReason, StoreOutcome
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.tiering.prefetch import FIRST_WINDOW_CHUNKS, PrefetchRequest, PrefetchResult
from manual_clock import ManualClock
from polling import until
from unit.tiering.support import ENGINE, FOREVER, MOCK, Rig, batch, faulty, keys, open_rig


class Others(Adapter):
    """Has what the test puts there, and fails the test when anything else is asked of it."""

    is_read_only = True
    most_calls = limits.MAX_PEER_CALLS

    def __init__(self) -> None:
        self.frames: dict[ObjectKey, bytes] = {}
        self.hints: list[Hint | None] = []
        self.gate: asyncio.Event | None = None  # until it is set, who waits by a hint waits
        self.silent = ""  # or only who waits for that place

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            buffer[:] = self.frames.get(key, bytes(buffer.nbytes))
        return [LoadOutcome.LOADED if key in self.frames else LoadOutcome.MISSING for key in keys]

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await self.probe_hinted(keys, None)

    async def probe_hinted(self, keys: Sequence[ObjectKey], hint: Hint | None) -> list[int | None]:
        self.hints.append(hint)
        is_late = hint is not None and hint.wait_seconds and self.silent in ("", hint.address)
        if is_late and self.gate is not None:
            await self.gate.wait()
        return [len(self.frames[key]) if key in self.frames else None for key in keys]

    def waits_at(self, hint: Hint) -> str | None:
        return hint.address if hint.wait_seconds else None

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        raise AssertionError("stored")

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        raise AssertionError("deleted")

    async def clear(self) -> tuple[int, int]:
        raise AssertionError("cleared")

    async def close(self) -> None:
        pass

    def take_from(self, rig: Rig, wanted: Sequence[ObjectKey]) -> None:
        """Frames that a rig has in L1, where they then are no more."""
        slots = rig.l1.core.acquire_each(
            ENGINE,
            b"".join(key.namespace.digest for key in wanted),
            b"".join(key.chunk_hash for key in wanted),
            FOREVER,
        )
        for key, slot in zip(wanted, memoryview(slots.slots).cast("Q"), strict=True):
            self.frames[key] = bytes(rig.l1.memory.view(slot, 8192))
        rig.l1.core.release(slots.lease)
        rig.l1.core.clear()


def others(index: int) -> tuple[ConfiguredAdapter, Others]:
    adapter = Others()
    return ConfiguredAdapter(build(parse_adapter(MOCK, index)).config, adapter), adapter


@pytest.mark.parametrize("store_policy", ["default", "skip_l1"])
def test_it_is_loaded_from_and_never_stored_to(store_policy: str) -> None:
    own, _ = faulty()
    configured, adapter = others(1)
    wanted = keys(12)
    with open_rig([own, configured], store_policy=store_policy) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        result = rig.fetch(wanted)
        assert result.chunks == 12 and rig.holds(result, wanted)
        rig.l1.core.drop_owner(ENGINE)
        mine = keys(12, seed=1)
        rig.put(mine)
        assert rig.storage.flush(20)
        until(lambda: rig.storage.runners[0].status()["objects"] == 12)
        assert rig.storage.unwritten() == {}
        assert rig.storage.runners[1].status()["objects"] == 0
        assert rig.storage.clear("all")[0] >= 12
        assert rig.fetch(wanted).chunks == 12  # which are the others' own


def test_alone_it_makes_no_write_back() -> None:
    configured, _ = others(0)
    with open_rig([configured]) as rig:
        rig.put(keys(8))
        assert rig.storage.status()["store"]["queued_objects"] == 0
        assert rig.storage.clear("l2") == (0, 0)


def test_what_it_had_is_not_believed_later() -> None:
    configured, adapter = others(0)
    wanted = keys(8)
    with open_rig([configured]) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        assert rig.fetch(wanted).chunks == 8
        rig.l1.core.drop_owner(ENGINE)
        rig.l1.core.clear()
        adapter.frames.clear()
        assert rig.fetch(wanted).miss_reason is MissReason.NOT_STORED


def test_a_hint_puts_it_first_and_reaches_it() -> None:
    own, _ = faulty()
    configured, adapter = others(1)
    wanted, hint = keys(8), Hint("127.0.0.1:9500", b"e" * 16, 0.5)
    with open_rig([own, configured]) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        answers: list[PrefetchResult] = []
        request = PrefetchRequest(ENGINE, FOREVER, batch(wanted), 0, 20.0, hint)
        rig.storage.prefetch(request, answers.append)
        until(lambda: answers)
        assert answers[0].chunks == 8 and adapter.hints == [hint]


def test_the_questions_of_one_request_wait_together_as_long_as_its_hint_says(monkeypatch: pytest.MonkeyPatch) -> None:
    configured, adapter = others(0)
    wanted, clock = keys(2 * FIRST_WINDOW_CHUNKS), ManualClock()
    probe_hinted = adapter.probe_hinted

    async def takes_time(keys: Sequence[ObjectKey], hint: Hint | None) -> list[int | None]:
        clock.advance(4.0)
        return await probe_hinted(keys, hint)

    monkeypatch.setattr(adapter, "probe_hinted", takes_time)
    with open_rig([configured], clock=clock) as rig:
        rig.put(wanted[:FIRST_WINDOW_CHUNKS], tell=False)
        adapter.take_from(rig, wanted[:FIRST_WINDOW_CHUNKS])
        answers: list[PrefetchResult] = []
        hint = Hint("127.0.0.1:9500", b"e" * 16, 10.0)
        rig.storage.prefetch(PrefetchRequest(ENGINE, FOREVER, batch(wanted), 0, 60.0, hint), answers.append)
        until(lambda: answers)
        assert [asked.wait_seconds for asked in adapter.hints if asked is not None] == [10.0, 6.0]
        assert answers[0].chunks == FIRST_WINDOW_CHUNKS


def test_who_waits_by_a_hint_holds_up_nobody_else() -> None:
    """More than there are places: neither these nor the patience of others are theirs."""
    configured, adapter = others(0)
    wanted, coming, hint = keys(8), keys(8, seed=1), Hint("127.0.0.1:9500", b"e" * 16, 60.0)
    with open_rig([configured], prefetch_max_in_flight=1) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        adapter.gate = asyncio.Event()
        answers: queue.Queue[PrefetchResult] = queue.Queue()
        for _ in range(limits.L2_MAX_PROBES_IN_FLIGHT + 1):
            request = PrefetchRequest(ENGINE, FOREVER, batch(coming), 0, 60.0, hint)
            rig.storage.prefetch(request, answers.put)
        until(lambda: adapter.hints.count(hint) == limits.L2_MAX_PROBES_IN_FLIGHT + 1)
        assert rig.fetch(wanted).chunks == 8
        assert answers.empty()
        rig.storage.call_soon(adapter.gate.set)
        for _ in range(limits.L2_MAX_PROBES_IN_FLIGHT + 1):
            assert answers.get(timeout=60).chunks == 0


def test_who_waits_at_one_place_takes_no_place_of_another() -> None:
    configured, adapter = others(0)
    wanted, coming = keys(8), keys(8, seed=1)
    frozen, healthy = (Hint(f"127.0.0.1:{port}", b"e" * 16, 60.0) for port in (9500, 9501))
    with open_rig([configured], prefetch_max_in_flight=1) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        adapter.gate, adapter.silent = asyncio.Event(), frozen.address
        answers: queue.Queue[PrefetchResult] = queue.Queue()
        for _ in range(2 * limits.L2_MAX_WAITS_IN_FLIGHT):
            rig.storage.prefetch(PrefetchRequest(ENGINE, FOREVER, batch(coming), 0, 60.0, frozen), answers.put)
        until(lambda: adapter.hints.count(frozen) == limits.L2_MAX_WAITS_IN_FLIGHT)
        found: queue.Queue[PrefetchResult] = queue.Queue()
        rig.storage.prefetch(PrefetchRequest(ENGINE, FOREVER, batch(wanted), 0, 60.0, healthy), found.put)
        assert found.get(timeout=30).chunks == 8
        assert answers.empty()
        rig.storage.call_soon(adapter.gate.set)
        for _ in range(2 * limits.L2_MAX_WAITS_IN_FLIGHT):
            assert answers.get(timeout=60).chunks == 0
        assert adapter.hints.count(frozen) == 2 * limits.L2_MAX_WAITS_IN_FLIGHT


def test_nobody_waits_longer_for_an_adapter_that_follows_no_hint() -> None:
    """What is there already is not held back for the time that the other one may take."""
    own, mute = faulty(timeout_seconds=8)
    configured, adapter = others(1)
    wanted, more = keys(8), keys(12)
    with open_rig([own, configured]) as rig:
        rig.put(wanted, tell=False)
        adapter.take_from(rig, wanted)
        mute.stalls.add("probe")
        rig.storage.call_soon(mute.gate.clear)
        assert rig.storage.responsive(20)
        answers: queue.Queue[PrefetchResult] = queue.Queue()
        hint = Hint("127.0.0.1:9500", b"e" * 16, 600.0)
        rig.storage.prefetch(PrefetchRequest(ENGINE, FOREVER, batch(more), 0, 8.0, hint), answers.put)
        result = answers.get(timeout=60)
        assert (result.chunks, result.miss_reason) == (8, MissReason.L2_DEADLINE)
        assert not rig.sample("timeouts_total")
        rig.storage.call_soon(mute.gate.set)
