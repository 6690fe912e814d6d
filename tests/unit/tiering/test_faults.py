"""What goes wrong below L1 ends as a miss: never as a wrong byte, a hang or something that stays taken."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path

import pytest

from lmcache.core import limits
from lmcache.core.outcome import MissReason
from lmcache.errors import AdapterError, LMCacheError, ResourceError
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.tiering.prefetch import PrefetchRequest
from manual_clock import ManualClock
from polling import STALL_SECONDS, until
from unit.tiering.support import ENGINE, FOREVER, FRAME_BYTES, MOCK, Rig, batch, faulty, keys, open_rig


def stored_and_forgotten(rig: Rig, count: int = 20, seed: int = 0) -> None:
    """Puts objects into L2 only."""
    rig.put(keys(count, seed))
    assert rig.storage.flush(20)
    rig.storage.clear("l1")


@pytest.mark.parametrize("at", [0, 9, 60, 500, 4095, 4096, 5000, FRAME_BYTES - 1])
def test_a_flipped_byte_on_disk_is_a_miss(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    wanted = keys(20)
    with open_rig([build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path)}, 0))]) as rig:
        stored_and_forgotten(rig)
        path = next(tmp_path.rglob(f"{wanted[7].chunk_hash.hex()}.data"))
        content = bytearray(path.read_bytes())
        content[at] ^= 0x10
        path.write_bytes(content)
        result = rig.fetch(wanted)
        assert (result.chunks, result.miss_reason) == (7, MissReason.CORRUPT)
        assert rig.holds(result, wanted)
        assert rig.sample("corrupt_frames_total", tier="l2") == 1
        assert len(list((tmp_path / "quarantine").iterdir())) == 1 and not path.exists()
        rig.l1.core.drop_owner(ENGINE)
        assert rig.fetch(wanted).miss_reason is MissReason.NOT_STORED
        # The engine computes the rest and stores it again: whole once more.
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.l1.core.drop_owner(ENGINE)
        rig.storage.clear("l1")
        assert rig.fetch(wanted).chunks == 20
    assert sum("corrupt" in record.message for record in caplog.records) == 1


def test_a_file_under_the_name_of_another_key_is_a_miss(tmp_path: Path) -> None:
    wanted = keys(4)
    with open_rig([build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path)}, 0))]) as rig:
        stored_and_forgotten(rig, 4)
        files = [next(tmp_path.rglob(f"{key.chunk_hash.hex()}.data")) for key in wanted]
        files[1].write_bytes(files[2].read_bytes())
        result = rig.fetch(wanted)
        assert (result.chunks, result.miss_reason) == (1, MissReason.CORRUPT) and rig.holds(result, wanted)


def test_the_next_adapter_helps_out_with_what_was_corrupt() -> None:
    (first, front), (second, _) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        stored_and_forgotten(rig)
        front.flip = 3
        result = rig.fetch(keys(20))
        assert result.chunks == 20 and rig.holds(result, keys(20))


def test_a_stalled_load_is_a_miss_at_the_deadline_and_keeps_its_slots() -> None:
    configured, adapter = faulty()
    clock = ManualClock()
    with open_rig([configured], clock=clock) as rig:
        stored_and_forgotten(rig)
        adapter.gate.clear()
        rig.be_impatient()
        result = rig.fetch(keys(20))
        assert (result.chunks, result.miss_reason) == (0, MissReason.L2_DEADLINE)
        stats = rig.l1.core.stats()
        assert (stats["quarantined_bytes"], stats["reservations"]) == (20 * FRAME_BYTES, 1)  # it may still write there
        assert rig.resident(keys(20)) == 0
        rig.be_impatient(30)
        rig.storage.call_soon(adapter.gate.set)
        until(rig.idle)
        assert rig.storage.status()["prefetch"]["bytes_in_flight"] == 0
        clock.advance(limits.L2_BREAKER_OPEN_SECONDS + 1)
        rig.fetch(keys(20))  # begins a trial, for which it does not wait
        until(lambda: not rig.storage.status()["adapters"][0]["loads_suspended"])
        assert rig.fetch(keys(20)).chunks == 20


def test_the_deadline_of_a_request_does_not_wait_for_that_of_the_adapter() -> None:
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        stored_and_forgotten(rig)
        adapter.gate.clear()
        started = time.monotonic()
        result = rig.fetch(keys(20), deadline_seconds=0.1)
        assert (result.chunks, result.miss_reason) == (0, MissReason.L2_DEADLINE)
        assert time.monotonic() - started < 5 + STALL_SECONDS
        rig.storage.call_soon(adapter.gate.set)
        until(rig.idle)


def test_a_cancelled_request_answers_once_and_holds_nothing() -> None:
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        stored_and_forgotten(rig)
        adapter.gate.clear()
        answers, cancel = rig.begin_fetch(keys(20))
        until(lambda: adapter.stalled == 1)
        cancel()
        assert answers.get(timeout=20).lease == 0
        cancel()
        rig.storage.call_soon(adapter.gate.set)
        until(rig.idle)
        assert answers.empty() and rig.resident(keys(20)) == 0


def test_a_stalled_store_keeps_its_lease_and_holds_nobody_up() -> None:
    (slow, stuck), (quick, _) = faulty(), faulty(index=1)
    with open_rig([slow, quick]) as rig:
        stuck.gate.clear()
        rig.be_impatient()
        rig.put(keys(20))
        until(lambda: rig.storage.status()["adapters"][1]["objects"] == 20)
        until(lambda: rig.storage.status()["adapters"][0]["abandoned"] == 1)
        assert rig.l1.core.stats()["leased_objects"] == 20
        assert rig.l1.core.evict(1 << 30).objects == 0
        rig.storage.call_soon(stuck.gate.set)
        until(rig.idle)
        assert rig.sample("l2_store_dropped_total", reason="not_stored") == 20


def test_an_engine_that_is_answered_nothing_does_not_keep_a_lease() -> None:
    """The receiver of the answer fails."""
    with open_rig([faulty()[0]]) as rig:
        stored_and_forgotten(rig)

        def receive(result: object) -> None:
            raise ZeroDivisionError

        request = PrefetchRequest(ENGINE, FOREVER, batch(keys(20)), 0, 20)
        rig.storage.prefetch(request, receive)
        until(lambda: rig.sample("l2_prefetch_load_completed_chunks_total") == 20)
        until(rig.idle)


@pytest.mark.parametrize("fault", [ZeroDivisionError("defect"), AdapterError("away", retryable=True)])
def test_faults_of_an_adapter_end_as_misses(fault: Exception) -> None:
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        stored_and_forgotten(rig)
        adapter.raises = fault
        for _ in range(10):
            result = rig.fetch(keys(20))
            assert (result.chunks, result.miss_reason) == (0, MissReason.L2_FAILED)
        assert rig.fetch(keys(5, seed=9)).chunks == 0
        rig.put(keys(10, seed=3))
        assert rig.storage.flush(20)
        assert rig.storage.status()["adapters"][0]["loads_suspended"]
        assert rig.sample("l2_prefetch_failure_chunks_total", reason="l2_failed") >= 20


def test_what_spreads_retries_is_drawn_from_what_the_loop_is_given() -> None:
    source = random.Random(1)
    configured, adapter = faulty()
    with open_rig([configured], rng=source) as rig:
        adapter.raises = AdapterError("away", retryable=True)
        rig.put(keys(3))
        assert rig.storage.flush(20)
    assert adapter.calls["store"] > 1
    assert source.getstate() != random.Random(1).getstate()


def test_l1_without_room_gives_the_prefix_that_fits() -> None:
    with open_rig([faulty()[0]], slots=64) as rig:
        stored_and_forgotten(rig, 50, seed=1)
        stored_and_forgotten(rig, 60, seed=2)
        held = rig.fetch(keys(50, seed=1))
        assert held.chunks == 50
        result = rig.fetch(keys(60, seed=2))
        assert (result.chunks, result.miss_reason) == (14, MissReason.NO_ROOM)
        assert rig.holds(result, keys(60, seed=2)) and rig.holds(held, keys(50, seed=1))


def test_room_for_a_prefetch_is_made_by_eviction() -> None:
    with open_rig([faulty()[0]], slots=64) as rig:
        stored_and_forgotten(rig, 60, seed=2)
        rig.put(keys(60, seed=1))
        assert rig.storage.flush(20)
        result = rig.fetch(keys(60, seed=2))
        assert result.chunks == 60 and rig.holds(result, keys(60, seed=2))


def test_the_store_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 100)
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        adapter.gate.clear()
        for seed in range(5):
            rig.put(keys(80, seed))
        until(lambda: rig.storage.status()["store"]["dropped_objects"] > 0 or adapter.stalled == 2)
        until(lambda: rig.sample("l2_store_dropped_total", reason="queue_full") > 0)
        assert rig.storage.status()["store"]["queued_objects"] <= 100
        assert rig.resident(keys(80, 4)) == 80  # in L1 all the same
        rig.storage.call_soon(adapter.gate.set)
        assert rig.storage.flush(20)


def test_requests_beyond_the_limit_wait_their_turn() -> None:
    configured, adapter = faulty()
    with open_rig([configured], prefetch_max_in_flight=2) as rig:
        for seed in range(6):
            stored_and_forgotten(rig, 5, seed)
        adapter.gate.clear()
        answers = [rig.begin_fetch(keys(5, seed))[0] for seed in range(6)]
        until(lambda: rig.storage.status()["prefetch"]["waiting"] == 4)
        assert rig.storage.status()["prefetch"]["in_flight"] == 2
        rig.storage.call_soon(adapter.gate.set)
        assert [answer.get(timeout=20).chunks for answer in answers] == [5] * 6


def test_loads_are_admitted_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_PREFETCH_BYTES_IN_FLIGHT", 10 * FRAME_BYTES)
    monkeypatch.setattr(limits, "L2_LOAD_BATCH_BYTES", 4 * FRAME_BYTES)
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        stored_and_forgotten(rig, 30)
        adapter.gate.clear()
        answers, _ = rig.begin_fetch(keys(30))
        until(lambda: adapter.stalled == 2)
        assert rig.storage.responsive(5) and adapter.stalled == 2
        assert rig.storage.status()["prefetch"]["bytes_in_flight"] == 8 * FRAME_BYTES
        rig.storage.call_soon(adapter.gate.set)
        result = answers.get(timeout=20)
        assert result.chunks == 30 and rig.holds(result, keys(30))


def test_the_l1_watermark() -> None:
    with open_rig([faulty()[0]], slots=100, eviction_watermark=0.5, eviction_ratio=0.5) as rig:
        rig.put(keys(40, 1))
        assert rig.storage.flush(20)
        rig.put(keys(40, 2))
        until(lambda: rig.l1.core.stats()["objects"] == 40)
        assert rig.resident(keys(40, 2)) == 40


def test_the_documented_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lmcache.tiering")
    with open_rig([faulty()[0]]) as rig:
        stored_and_forgotten(rig)
        rig.fetch(keys(20))
    lines = [record.message for record in caplog.records]
    assert any(line.startswith("Submitted store task 1") for line in lines)
    assert any(line.startswith("L2 store task 1 completed") for line in lines)
    assert "Prefetch request submitted: 20 total keys, 0 L1 prefix hits, 20 remaining for L2" in lines


# ---- start and stop --------------------------------------------------------------------------------------------------
def test_stop_writes_what_is_queued() -> None:
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        for seed in range(5):
            rig.put(keys(80, seed))
        assert rig.storage.stop(20)
        assert len(adapter.inner.objects) == 400
        assert not rig.storage.responsive(0.05)
        assert rig.fetch(keys(5)).miss_reason is MissReason.L2_FAILED
        rig.put(keys(1))
        with pytest.raises(LMCacheError, match="has ended"):
            rig.storage.clear("l1")


def test_stop_does_not_wait_for_a_backend_that_never_answers() -> None:
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        stored_and_forgotten(rig)
        adapter.gate.clear()
        answers, _ = rig.begin_fetch(keys(20))
        until(lambda: adapter.stalled == 1)
        started = time.monotonic()
        assert not rig.storage.stop(0.2)
        assert time.monotonic() - started < 10
        assert answers.get(timeout=5).chunks == 0
        assert rig.storage.stop(0.2)
        rig.l1.core.drop_owner(-1)


def test_an_adapter_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path / "file")}, 1))
    with pytest.raises(ResourceError, match="--l2-adapter 2"), open_rig([build(parse_adapter(MOCK, 0)), bad]):
        raise AssertionError("started")


def test_without_adapters_everything_is_a_miss() -> None:
    with open_rig() as rig:
        rig.put(keys(5))
        assert rig.fetch(keys(5, seed=1)).miss_reason is MissReason.NOT_STORED
        assert rig.storage.responsive(5)
        assert rig.storage.clear("all") == (5, 5 * FRAME_BYTES)


def test_clear_goes_on_behind_an_adapter_that_fails_and_says_so() -> None:
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        rig.put(keys(20))
        assert rig.storage.flush(20)
        front.clear_raises = AdapterError("no right to delete")
        with pytest.raises(LMCacheError, match="Not everything could be cleared: no right to delete"):
            rig.storage.clear("all")
        assert (rig.l1.core.stats()["objects"], len(back.inner.objects)) == (0, 0)
        assert rig.fetch(keys(20)).chunks == 20


def test_a_fault_of_what_the_loop_calls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with open_rig([]) as rig:
        rig.storage.call_soon([].pop)
        until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.name == "lmcache.tiering" and record.exc_info is not None and record.exc_info[0] is IndexError


def test_clear_names_its_tiers() -> None:
    with open_rig() as rig, pytest.raises(LMCacheError, match="l1, l2 or all; got 'l3'"):
        rig.storage.clear("l3")
