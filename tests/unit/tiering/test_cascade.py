"""Several adapters in a row: each gives what it has, and one that is slow or dead costs its deadline once."""

from __future__ import annotations

import pytest

from lmcache.core import limits
from lmcache.core.limits import L2_BREAKER_OPEN_SECONDS
from lmcache.errors import AdapterError
from manual_clock import ManualClock
from polling import until
from support.faults import FaultyAdapter
from unit.tiering.support import ENGINE, FRAME_BYTES, Rig, faulty, keys, open_rig

TIMEOUT_SECONDS = 0.3  # of the first adapter once it is dead; the requests have 20


def stored_in_both(rig: Rig, count: int = 20) -> None:
    rig.put(keys(count))
    assert rig.storage.flush(20)
    rig.storage.clear("l1")


def kill(rig: Rig, adapter: FaultyAdapter) -> None:
    """From now on the first adapter does not answer."""
    rig.storage.call_soon(adapter.gate.clear)
    assert rig.storage.responsive(20)
    rig.be_impatient(TIMEOUT_SECONDS)


def revive(rig: Rig, adapter: FaultyAdapter) -> None:
    rig.be_impatient(30)
    rig.storage.call_soon(adapter.gate.set)


def suspended(rig: Rig, index: int = 0) -> bool:
    return bool(rig.storage.status()["adapters"][index]["loads_suspended"])


def test_a_prefix_may_come_from_several() -> None:
    wanted = keys(60)
    (first, front), (second, middle), (third, back) = faulty(), faulty(index=1), faulty(index=2)
    with open_rig([first, second, third]) as rig:
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        for number, adapter in enumerate((front, middle, back)):
            for chunk, key in enumerate(wanted):
                if chunk // 5 % 3 != number:
                    del adapter.inner.objects[key]  # nobody knows
        result = rig.fetch(wanted)
        assert result.chunks == 60 and rig.holds(result, wanted)


@pytest.mark.parametrize("dies_at", ["load", "probe"])
def test_a_dead_adapter_costs_its_deadline_once(dies_at: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    (first, dead), (second, alive) = faulty(), faulty(index=1)
    with open_rig([first, second], clock=clock) as rig:
        stored_in_both(rig, 100)
        if dies_at == "probe":
            runner = rig.storage.runners[0]
            rig.storage.call_soon(lambda: runner.lost(keys(100)))  # as after a restart: it has to be asked
            dead.stalls.add("probe")
        kill(rig, dead)
        result = rig.fetch(keys(100))
        assert result.chunks == 100 and rig.holds(result, keys(100))
        assert suspended(rig) and dead.stalled > 0
        asked = dict(dead.calls)
        for _ in range(3):
            rig.l1.core.release(result.lease)
            result = rig.fetch(keys(100))
            assert result.chunks == 100 and rig.holds(result, keys(100))
        assert dead.calls == asked
        # Time for a trial: it happens behind the back of the request, which does not wait for it.
        clock.advance(L2_BREAKER_OPEN_SECONDS + 0.1)
        stalled = dead.stalled
        rig.l1.core.release(result.lease)
        result = rig.fetch(keys(100))
        assert result.chunks == 100
        until(lambda: dead.stalled == stalled + 1)
        assert dead.stalled == stalled + 1
        # The trial fails: left alone for twice as long.
        until(lambda: rig.storage.status()["adapters"][0]["abandoned"] == dead.stalled)
        clock.advance(L2_BREAKER_OPEN_SECONDS + 0.1)
        rig.l1.core.release(result.lease)
        assert rig.fetch(keys(100)).chunks == 100
        assert dead.stalled == stalled + 1
        rig.l1.core.drop_owner(ENGINE)
        # It works again.
        clock.advance(L2_BREAKER_OPEN_SECONDS + 0.1)
        dead.stalls.discard("probe")
        revive(rig, dead)
        until(rig.idle)
        rig.fetch(keys(100))
        until(lambda: not suspended(rig))
        rig.l1.core.drop_owner(ENGINE)
        loads = dead.calls["load"], alive.calls["load"]
        assert rig.fetch(keys(100)).chunks == 100
        assert dead.calls["load"] > loads[0] and alive.calls["load"] == loads[1]
    assert sum("loads are suspended" in record.message for record in caplog.records) == 1
    assert sum("loads go on" in record.message for record in caplog.records) <= 1


def test_loads_that_were_given_up_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead adapter may still write into is bounded by its operations, and no other adapter waits for it."""
    monkeypatch.setattr(limits, "MAX_L2_PREFETCH_BYTES_IN_FLIGHT", 20 * FRAME_BYTES)
    monkeypatch.setattr(limits, "L2_LOAD_BATCH_BYTES", 4 * FRAME_BYTES)
    (first, dead), (second, _) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        stored_in_both(rig, 60)
        kill(rig, dead)
        result = rig.fetch(keys(60), deadline_seconds=5)
        assert result.chunks == 60 and rig.holds(result, keys(60))
        figures = rig.storage.status()["prefetch"]
        assert figures["bytes_in_flight"] == 0
        assert 0 < figures["abandoned_bytes"] <= limits.L2_MAX_READS_IN_FLIGHT * 4 * FRAME_BYTES
        revive(rig, dead)
        until(lambda: rig.storage.status()["prefetch"]["abandoned_bytes"] == 0)


def test_what_a_late_load_was_for_can_be_stored_and_loaded_elsewhere() -> None:
    """An operation that never ends keeps its memory, not its keys."""
    (first, dead), (second, _) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        stored_in_both(rig)
        kill(rig, dead)
        assert rig.fetch(keys(20)).chunks == 20
        assert rig.l1.core.stats()["quarantined_bytes"] == 20 * 8192
        rig.l1.core.drop_owner(ENGINE)
        assert rig.put(keys(20)) == 20
        assert rig.resident(keys(20)) == 20
        revive(rig, dead)
        until(lambda: rig.l1.core.stats()["quarantined_bytes"] == 0)
        result = rig.fetch(keys(20))
        assert result.chunks == 20 and rig.holds(result, keys(20))


def test_a_failing_adapter_is_left_alone_and_the_next_one_serves() -> None:
    (first, bad), (second, _) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        stored_in_both(rig)
        bad.raises = AdapterError("input/output error")
        for _ in range(8):
            result = rig.fetch(keys(20))
            assert result.chunks == 20 and rig.holds(result, keys(20))
            rig.l1.core.release(result.lease)
        assert suspended(rig)
        asked = bad.calls["load"]
        assert rig.fetch(keys(20)).chunks == 20
        assert bad.calls["load"] == asked


def test_a_slow_store_holds_up_neither_the_other_adapter_nor_loads() -> None:
    (first, slow), (second, _) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        kill(rig, slow)
        for seed in range(6):
            rig.put(keys(20, seed))
        until(lambda: rig.storage.status()["adapters"][1]["objects"] == 120)
        revive(rig, slow)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        result = rig.fetch(keys(20, 5))
        assert result.chunks == 20 and rig.holds(result, keys(20, 5))
