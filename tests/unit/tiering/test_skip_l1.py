"""Objects that are to leave L1 once they are stored: what no adapter takes stays there while there is room, reaches an
adapter later, and is counted when it is lost after all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import StoreOutcome
from lmcache.errors import AdapterError
from lmcache.testing.frames import namespace
from lmcache.tiering.leases import QueuedObject
from lmcache.tiering.unstored import Unstored
from manual_clock import ManualClock
from polling import until
from support.faults import FaultyAdapter
from unit.tiering.support import ENGINE, FOREVER, FRAME_BYTES, MOCK, Rig, batch, faulty, keys, open_rig

FAULTS: list[StoreOutcome | Exception] = [
    StoreOutcome.FAILED,
    StoreOutcome.FULL,
    AdapterError("no connection"),
    OSError("broken"),
]


class Skipping:
    """A storage loop that empties L1 into adapters which fail and recover on command."""

    def __init__(self, rig: Rig, adapters: Sequence[FaultyAdapter], clock: ManualClock) -> None:
        self.it = rig
        self.adapters = adapters
        self.clock = clock

    def fail(self, fault: StoreOutcome | Exception = StoreOutcome.FAILED) -> None:
        for adapter in self.adapters:
            if isinstance(fault, Exception):
                adapter.raises = fault
            else:
                adapter.store_outcome = fault

    def live(self) -> None:
        for adapter in self.adapters:
            adapter.raises = adapter.store_outcome = None
        self.clock.advance(limits.L2_BREAKER_MAX_OPEN_SECONDS + 1)

    def put(self, chunks: Sequence[ObjectKey]) -> None:
        """Until every adapter has dealt with them."""
        assert self.it.put(chunks) == len(chunks)
        assert self.it.storage.responsive(20) and self.it.storage.flush(20)

    @property
    def lost(self) -> float:
        return self.it.sample("l2_store_lost_chunks_total")

    @property
    def unstored(self) -> int:
        unstored = self.it.storage.status()["store"]["unstored_objects"]
        assert isinstance(unstored, int)
        return unstored

    @property
    def l1_objects(self) -> int:
        return int(self.it.l1.core.stats()["objects"])


@contextmanager
def skipping(slots: int = 256, *, adapters: int = 2, l1_policy: str = "noop", **options: Any) -> Iterator[Skipping]:
    made = [faulty({**MOCK, "timeout_seconds": 20}, index) for index in range(adapters)]
    clock = ManualClock()
    configured = [entry for entry, _ in made]
    with open_rig(configured, slots=slots, l1_policy=l1_policy, store_policy="skip_l1", clock=clock, **options) as rig:
        yield Skipping(rig, [adapter for _, adapter in made], clock)


def test_what_one_of_two_took_leaves_l1() -> None:
    with skipping() as rig:
        rig.adapters[0].store_outcome = StoreOutcome.FAILED
        rig.put(keys(40))
        until(lambda: rig.l1_objects == 0)
        assert (rig.lost, rig.unstored) == (0, 0)
        assert rig.it.fetch(keys(40)).chunks == 40


FOR_FP8 = replace(namespace(), layout=f"{namespace().layout}~fp8")  # which no adapter here makes


@pytest.mark.parametrize("l1_policy", ["LRU", "noop"])
def test_what_no_adapter_may_have_stays_in_l1_and_is_never_offered(
    l1_policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers: list[int] = []
    to_offer = Unstored.to_offer

    def counted(self: Unstored) -> list[QueuedObject]:
        offers.append(len(to_offer(self)))
        return to_offer(self)

    monkeypatch.setattr(Unstored, "to_offer", counted)
    with skipping(slots=64, l1_policy=l1_policy) as rig:
        for seed in range(3):
            rig.put(keys(10, seed, of=FOR_FP8))
        assert rig.l1_objects == 30 and rig.lost == 0
        assert rig.it.sample("l2_store_dropped_total", reason="not_served") == 30
        assert rig.it.sample("l2_store_dropped_total", reason="not_stored") == 0
        assert rig.unstored == (30 if l1_policy == "noop" else 0)
        rig.put(keys(4))
        until(lambda: rig.l1_objects == 30)
        assert not any(offers)
    said = [record.message for record in caplog.records if "stay in L1" in record.message]
    assert len(said) == 1 and 'accept the lossy serde "fp8"' in said[0]


@pytest.mark.parametrize("l1_policy", ["LRU", "noop"])
def test_what_no_adapter_may_have_makes_room(l1_policy: str) -> None:
    with skipping(slots=64, l1_policy=l1_policy, eviction_watermark=0.5, eviction_ratio=0.2) as rig:
        for seed in range(6):
            rig.put(keys(20, seed, of=FOR_FP8))
            until(lambda: rig.l1_objects <= 32)
        rig.put(keys(20))
        until(lambda: rig.it.storage.status()["adapters"][0]["objects"] == 20)
        assert rig.it.fetch(keys(20)).chunks == 20


def test_what_one_takes_again_does_not_wait_for_a_slower_one() -> None:
    with skipping() as rig:
        rig.fail()
        rig.put(keys(200))
        assert rig.unstored == 200
        slow_one, fast_one = rig.adapters
        rig.it.storage.call_soon(slow_one.gate.clear)
        rig.live()
        until(lambda: len(fast_one.inner.objects) == 200, tell=rig.it.storage.status)
        assert not slow_one.inner.objects
        rig.it.storage.call_soon(slow_one.gate.set)
        until(lambda: rig.unstored == rig.l1_objects == 0)
        assert rig.lost == 0


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_nobody_took_is_a_hit_in_l1_and_reaches_l2_later(
    fault: StoreOutcome | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with skipping() as rig:
        rig.fail(fault)
        rig.put(keys(40))
        assert rig.it.resident(keys(40)) == 40
        assert (rig.unstored, rig.lost) == (40, 0)
        until(lambda: rig.it.sample("l2_store_unstored") == 40)
        rig.live()
        until(lambda: rig.l1_objects == 0, tell=lambda: rig.it.storage.status())
        until(lambda: rig.unstored == 0)
        assert rig.lost == 0
        result = rig.it.fetch(keys(40))
        assert result.chunks == 40 and rig.it.holds(result, keys(40))
    said = sum("stay in L1 because no adapter took them" in record.message for record in caplog.records)
    assert 1 <= said <= 2  # the clock went on by more than a minute


def test_a_recovery_that_a_store_of_an_engine_finds_brings_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its turn comes after many failures, but at once."""
    monkeypatch.setattr("lmcache.tiering.write_back.MOST_PERIODS_BETWEEN_OFFERS", 1 << 30)
    with skipping(adapters=1) as rig:
        rig.fail()
        rig.put(keys(40))
        for _ in range(12):  # offers that fail, each after twice as long as the one before
            rig.clock.advance(limits.L2_BREAKER_MAX_OPEN_SECONDS + 1)
            calls = rig.adapters[0].calls["store"]
            if not until_or_not(lambda calls=calls: rig.adapters[0].calls["store"] > calls):
                break
        rig.live()
        rig.clock.advance(limits.L2_BREAKER_MAX_OPEN_SECONDS + 1)  # an offer may have failed just now
        rig.put(keys(1, seed=7))
        until(lambda: rig.l1_objects == 0)
        assert rig.it.fetch(keys(40)).chunks == 40


def test_what_waits_is_not_offered_to_full_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused, object by object and period by period, and counted as dropped each time."""
    may_offer = threading.Event()
    rounds: list[Any] = []

    async def count_evicted(self: Unstored) -> None:
        while not may_offer.is_set():
            await asyncio.sleep(0.001)
        rounds.append(None)

    monkeypatch.setattr("lmcache.tiering.write_back.MOST_PERIODS_BETWEEN_OFFERS", 1)
    monkeypatch.setattr(Unstored, "count_evicted", count_evicted)
    monkeypatch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 8)
    with skipping(adapters=1, period_seconds=0.001) as rig:
        rig.fail()
        rig.put(keys(8))
        assert rig.unstored == 8
        rig.it.storage.call_soon(rig.adapters[0].gate.clear)
        for seed in range(1, 1 + limits.L2_STORE_BATCHES_IN_FLIGHT):
            rig.it.put(keys(1, seed))
            until(lambda seed=seed: rig.it.storage.status()["store"]["batches_in_flight"] == seed)
        rig.it.put(keys(8, seed=9))
        until(lambda: rig.it.storage.status()["store"]["queued_objects"] == 8)
        dropped = rig.it.storage.status()["store"]["dropped_objects"]
        may_offer.set()
        until(lambda: len(rounds) > 20)
        assert rig.it.storage.status()["store"]["dropped_objects"] == dropped
        rig.live()
        rig.it.storage.call_soon(rig.adapters[0].gate.set)
        until(lambda: rig.l1_objects == 0)
        assert (rig.unstored, rig.lost) == (0, 0)


def test_what_nobody_can_remember_leaves_l1_when_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 4)
    with skipping() as rig:
        core, wanted = rig.it.l1.core, keys(8)
        of, hashes = wanted[0].namespace, b"".join(key.chunk_hash for key in wanted)
        reservation, _ = rig.it.reserve(wanted)
        committed = core.commit(reservation, bytes([1] * 8))
        acquired = core.acquire(ENGINE, of.digest, hashes[:96], FOREVER)  # another engine was fast
        assert acquired.chunks == 3
        rig.it.storage.objects_committed(batch(wanted), committed)
        until(lambda: rig.lost == 8)
        assert rig.l1_objects == 3
        core.release(acquired.lease)
        until(lambda: rig.l1_objects == 0)


def until_or_not(condition: Any, seconds: float = 1.0) -> bool:
    try:
        until(condition, seconds)
    except AssertionError:
        return False
    return True


def test_what_is_evicted_before_anybody_took_it_is_lost_once(caplog: pytest.LogCaptureFixture) -> None:
    with skipping(slots=64, l1_policy="LRU") as rig:
        rig.fail()
        for seed in range(3):
            rig.put(keys(40, seed))
        until(lambda: rig.lost == 3 * 40 - 64)
        assert rig.unstored == rig.l1_objects == 64
        rig.live()
        until(lambda: rig.l1_objects == 0)
        assert rig.lost == 3 * 40 - 64
        held = set(rig.adapters[0].inner.objects)
        assert len(held) == 64 and held >= set(keys(40, seed=2))
    assert sum("objects were lost" in record.message for record in caplog.records) == 1


def test_what_is_lost_and_computed_again_was_lost() -> None:
    with skipping(slots=64, l1_policy="LRU", adapters=1) as rig:
        rig.fail()
        rig.put(keys(4))

        def are_evicted() -> bool:  # not while they are being offered again
            rig.it.l1.core.evict(1 << 30)
            return rig.l1_objects == 0

        until(are_evicted)
        rig.put(keys(4))
        until(lambda: (rig.lost, rig.unstored, rig.l1_objects) == (4, 4, 4))


def test_without_eviction_those_that_waited_longest_make_room() -> None:
    with skipping(slots=64, eviction_watermark=0.5, eviction_ratio=0.2) as rig:
        rig.fail()
        rig.put(keys(40))
        until(lambda: (rig.lost, rig.unstored, rig.l1_objects) == (8, 32, 32))
        for seed in range(1, 4):
            rig.put(keys(20, seed))
            until(lambda: rig.l1_objects <= 32)
            assert rig.it.resident(keys(20, seed)) == 20
        until(lambda: rig.lost == 40 + 60 - rig.unstored)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_UNSTORED_OBJECTS", 10)
    with skipping() as rig:
        rig.fail()
        rig.put(keys(40))
        assert (rig.lost, rig.unstored, rig.l1_objects) == (30, 10, 10)


def test_a_full_queue_delays_objects() -> None:
    with pytest.MonkeyPatch.context() as patch, skipping(adapters=1) as rig:
        patch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 100)
        rig.it.storage.call_soon(rig.adapters[0].gate.clear)
        for seed in range(3):
            rig.it.put(keys(80, seed))
            assert rig.it.storage.responsive(20)
        assert rig.unstored > 0
        rig.it.storage.call_soon(rig.adapters[0].gate.set)
        until(lambda: rig.l1_objects == 0)
        assert rig.lost == 0
        assert [rig.it.fetch(keys(80, seed)).chunks for seed in range(3)] == [80] * 3


def test_a_loop_that_stands_still_keeps_no_memory_and_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that are too many to remember leave L1: without eviction they would be there for ever."""
    monkeypatch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 100)
    goes_on = threading.Event()
    with skipping(adapters=1) as rig:
        rig.it.storage.call_soon(lambda: goes_on.wait(20) and None)  # type: ignore[arg-type]
        for seed in range(3):
            rig.it.put(keys(80, seed))
        goes_on.set()
        until(lambda: rig.l1_objects == 0)
        assert rig.lost == 2 * 80
        assert rig.it.sample("l2_store_dropped_total", reason="queue_full") == 2 * 80


@pytest.mark.parametrize("tier", ["l1", "l2", "all"])
def test_what_an_operator_clears_is_not_lost(tier: str) -> None:
    with skipping() as rig:
        rig.fail()
        rig.put(keys(40))
        rig.it.storage.clear(tier)
        assert (rig.unstored, rig.lost, rig.l1_objects) == (0, 0, 0)
        rig.live()
        rig.put(keys(4, seed=1))
        until(lambda: rig.l1_objects == 0)
        assert rig.it.fetch(keys(40)).chunks == 0


def test_what_is_queued_when_an_operator_clears_is_not_lost() -> None:
    with skipping(slots=1024, adapters=1) as rig:
        rig.it.storage.call_soon(rig.adapters[0].gate.clear)
        for seed in range(4):
            rig.it.put(keys(80, seed))
        until(lambda: rig.adapters[0].stalled == 2)
        rig.it.storage.call_soon(rig.adapters[0].gate.set)
        rig.it.storage.clear("all")
        assert (rig.unstored, rig.lost, rig.l1_objects) == (0, 0, 0)


def test_what_is_being_written_and_fails_when_an_operator_clears_does_not_come_back() -> None:
    with skipping(adapters=1) as rig:
        rig.it.storage.call_soon(rig.adapters[0].gate.clear)
        rig.it.put(keys(4))
        until(lambda: rig.adapters[0].stalled == 1)
        rig.fail()
        opener = threading.Timer(0.1, lambda: rig.it.storage.call_soon(rig.adapters[0].gate.set))
        opener.start()
        rig.it.storage.clear("l2")
        opener.join()
        assert (rig.unstored, rig.lost, rig.l1_objects) == (0, 0, 0)


def test_a_store_that_is_late_is_stored() -> None:
    """It hangs beyond its deadline: its lease lasts, and the object leaves L1 when it has ended after all."""
    with skipping(slots=64, adapters=1) as rig:
        rig.it.storage.call_soon(rig.adapters[0].gate.clear)
        rig.it.be_impatient()
        rig.put(keys(4))
        assert (rig.unstored, rig.lost) == (4, 0)
        assert rig.it.l1.core.stats()["leased_objects"] == 4
        rig.it.storage.call_soon(rig.adapters[0].gate.set)
        rig.live()
        until(lambda: rig.l1_objects == 0)
        assert rig.lost == 0
        assert rig.it.fetch(keys(4)).chunks == 4


def test_the_same_object_twice_in_the_queues_of_two_adapters() -> None:
    """It is evicted while it waits for a slow adapter, and computed again: stored all the same, and not lost."""
    with skipping(slots=1024, l1_policy="LRU") as rig:
        rig.it.storage.call_soon(rig.adapters[1].gate.clear)
        for seed in range(4):
            rig.it.put(keys(80, seed))
        until(lambda: rig.adapters[1].stalled == 2)
        until(lambda: len(rig.adapters[0].inner.objects) == 320)
        rig.it.l1.core.evict(1 << 30)
        rig.it.put(keys(80, 3))
        rig.it.storage.call_soon(rig.adapters[1].gate.set)
        assert rig.it.storage.flush(20)
        until(lambda: rig.l1_objects == 0)
        assert rig.lost == 0
        for adapter in rig.adapters:
            assert set(adapter.inner.objects) >= set(keys(80, 3))


def test_readers_are_waited_for() -> None:
    with skipping(adapters=1) as rig:
        rig.it.storage.call_soon(rig.adapters[0].gate.clear)
        assert rig.it.put(keys(10)) == 10
        digest = keys(1)[0].namespace.digest
        acquired = rig.it.l1.core.acquire(ENGINE, digest, b"".join(key.chunk_hash for key in keys(10)), FOREVER)
        assert acquired.chunks == 10
        rig.it.storage.call_soon(rig.adapters[0].gate.set)
        assert rig.it.storage.flush(20)
        assert rig.it.resident(keys(10)) == 10
        rig.it.l1.core.release(acquired.lease)
        until(lambda: rig.l1_objects == 0)


def test_an_object_that_no_adapter_can_hold_is_not_tried_all_the_time() -> None:
    with skipping(adapters=1) as rig:
        rig.fail(StoreOutcome.TOO_LARGE)
        rig.put(keys(4))
        assert rig.unstored == 4
        until(lambda: rig.adapters[0].calls["store"] >= 2)
        assert rig.unstored == 4 and rig.l1_objects == 4
        assert rig.it.l1.core.stats()["used_bytes"] == 4 * FRAME_BYTES
