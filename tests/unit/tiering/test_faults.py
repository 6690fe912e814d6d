"""What goes wrong below L1 ends as a miss: never as a wrong byte, a hang or something that stays taken."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from lmcache.clock import ManualClock
from lmcache.core import limits
from lmcache.core.outcome import MissReason
from lmcache.errors import AdapterError, LMCacheError, ResourceError
from lmcache.l2.registry import build, parse_adapter
from lmcache.tiering.prefetch import PrefetchRequest
from polling import until
from unit.tiering.support import ENGINE, FOREVER, FRAME_BYTES, MOCK, Rig, faulty, keys, rig


def stored_and_forgotten(it: Rig, count: int = 20, seed: int = 0) -> None:
    """Puts objects into L2 only."""
    it.put(keys(count, seed))
    assert it.storage.flush(20)
    it.storage.clear("l1")


@pytest.mark.parametrize("at", [0, 9, 60, 500, 4095, 4096, 5000, FRAME_BYTES - 1])
def test_a_flipped_byte_on_disk_is_a_miss(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    wanted = keys(20)
    with rig([build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path)}, 0))]) as it:
        stored_and_forgotten(it)
        path = next(tmp_path.rglob(f"{wanted[7].chunk_hash.hex()}.data"))
        content = bytearray(path.read_bytes())
        content[at] ^= 0x10
        path.write_bytes(content)
        result = it.fetch(wanted)
        assert (result.chunks, result.miss_reason) == (7, MissReason.CORRUPT)
        assert it.holds(result, wanted)
        assert it.sample("corrupt_frames_total", tier="l2") == 1
        assert len(list((tmp_path / "quarantine").iterdir())) == 1 and not path.exists()
        it.l1.core.drop_owner(ENGINE)
        assert it.fetch(wanted).miss_reason is MissReason.NOT_STORED
        # The engine computes the rest and stores it again: whole once more.
        it.put(wanted)
        assert it.storage.flush(20)
        it.l1.core.drop_owner(ENGINE)
        it.storage.clear("l1")
        assert it.fetch(wanted).chunks == 20
    assert sum("corrupt" in record.message for record in caplog.records) == 1


def test_a_file_under_the_name_of_another_key_is_a_miss(tmp_path: Path) -> None:
    wanted = keys(4)
    with rig([build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path)}, 0))]) as it:
        stored_and_forgotten(it, 4)
        files = [next(tmp_path.rglob(f"{key.chunk_hash.hex()}.data")) for key in wanted]
        files[1].write_bytes(files[2].read_bytes())
        result = it.fetch(wanted)
        assert (result.chunks, result.miss_reason) == (1, MissReason.CORRUPT) and it.holds(result, wanted)


def test_the_next_adapter_helps_out_with_what_was_corrupt() -> None:
    (first, one), (second, _) = faulty(), faulty(index=1)
    with rig([first, second]) as it:
        stored_and_forgotten(it)
        one.flip = 3
        result = it.fetch(keys(20))
        assert result.chunks == 20 and it.holds(result, keys(20))


def test_a_stalled_load_is_a_miss_at_the_deadline_and_keeps_its_slots() -> None:
    configured, adapter = faulty()
    clock = ManualClock()
    with rig([configured], clock=clock) as it:
        stored_and_forgotten(it)
        adapter.gate.clear()
        it.be_impatient()
        result = it.fetch(keys(20))
        assert (result.chunks, result.miss_reason) == (0, MissReason.L2_DEADLINE)
        stats = it.l1.core.stats()
        assert (stats["quarantined_bytes"], stats["reservations"]) == (20 * FRAME_BYTES, 1)  # it may still write there
        assert it.resident(keys(20)) == 0
        it.be_impatient(30)
        it.storage.call_soon(adapter.gate.set)
        until(it.idle)
        assert it.storage.status()["prefetch"]["bytes_in_flight"] == 0
        clock.advance(limits.L2_BREAKER_OPEN_SECONDS + 1)
        it.fetch(keys(20))  # begins a trial, for which it does not wait
        until(lambda: not it.storage.status()["adapters"][0]["loads_suspended"])
        assert it.fetch(keys(20)).chunks == 20


def test_the_deadline_of_a_request_does_not_wait_for_that_of_the_adapter() -> None:
    configured, adapter = faulty()
    with rig([configured]) as it:
        stored_and_forgotten(it)
        adapter.gate.clear()
        started = time.monotonic()
        result = it.fetch(keys(20), deadline_seconds=0.1)
        assert (result.chunks, result.miss_reason) == (0, MissReason.L2_DEADLINE)
        assert time.monotonic() - started < 5
        it.storage.call_soon(adapter.gate.set)
        until(it.idle)


def test_a_cancelled_request_answers_once_and_holds_nothing() -> None:
    configured, adapter = faulty()
    with rig([configured]) as it:
        stored_and_forgotten(it)
        adapter.gate.clear()
        answers, cancel = it.begin_fetch(keys(20))
        until(lambda: adapter.stalled == 1)
        cancel()
        assert answers.get(timeout=20).lease == 0
        cancel()
        it.storage.call_soon(adapter.gate.set)
        until(it.idle)
        assert answers.empty() and it.resident(keys(20)) == 0


def test_a_stalled_store_keeps_its_lease_and_holds_nobody_up() -> None:
    (slow, stuck), (quick, _) = faulty(), faulty(index=1)
    with rig([slow, quick]) as it:
        stuck.gate.clear()
        it.be_impatient()
        it.put(keys(20))
        until(lambda: it.storage.status()["adapters"][1]["objects"] == 20)
        until(lambda: it.storage.status()["adapters"][0]["abandoned"] == 1)
        assert it.l1.core.stats()["leased_objects"] == 20
        assert it.l1.core.evict(1 << 30)[0] == 0
        it.storage.call_soon(stuck.gate.set)
        until(it.idle)
        assert it.sample("l2_store_dropped_total", reason="not_stored") == 20


def test_an_engine_that_is_answered_nothing_does_not_keep_a_lease() -> None:
    """The receiver of the answer fails."""
    with rig([faulty()[0]]) as it:
        stored_and_forgotten(it)

        def receive(result: object) -> None:
            raise ZeroDivisionError

        hashes = b"".join(key.chunk_hash for key in keys(20))
        request = PrefetchRequest(ENGINE, FOREVER, [keys(1)[0].namespace], [FRAME_BYTES], hashes, 20)
        it.storage.prefetch(request, receive)
        until(lambda: it.sample("l2_prefetch_load_completed_chunks_total") == 20)
        until(it.idle)


@pytest.mark.parametrize("fault", [ZeroDivisionError("defect"), AdapterError("away", retryable=True)])
def test_faults_of_an_adapter_end_as_misses(fault: Exception) -> None:
    configured, adapter = faulty()
    with rig([configured]) as it:
        stored_and_forgotten(it)
        adapter.raises = fault
        for _ in range(10):
            result = it.fetch(keys(20))
            assert (result.chunks, result.miss_reason) == (0, MissReason.L2_FAILED)
        assert it.fetch(keys(5, seed=9)).chunks == 0
        it.put(keys(10, seed=3))
        assert it.storage.flush(20)
        assert it.storage.status()["adapters"][0]["loads_suspended"]
        assert it.sample("l2_prefetch_failure_chunks_total", reason="l2_failed") >= 20


def test_l1_without_room_gives_the_prefix_that_fits() -> None:
    with rig([faulty()[0]], slots=64) as it:
        stored_and_forgotten(it, 50, seed=1)
        stored_and_forgotten(it, 60, seed=2)
        held = it.fetch(keys(50, seed=1))
        assert held.chunks == 50
        result = it.fetch(keys(60, seed=2))
        assert (result.chunks, result.miss_reason) == (14, MissReason.NO_ROOM)
        assert it.holds(result, keys(60, seed=2)) and it.holds(held, keys(50, seed=1))


def test_room_for_a_prefetch_is_made_by_eviction() -> None:
    with rig([faulty()[0]], slots=64) as it:
        stored_and_forgotten(it, 60, seed=2)
        it.put(keys(60, seed=1))
        assert it.storage.flush(20)
        result = it.fetch(keys(60, seed=2))
        assert result.chunks == 60 and it.holds(result, keys(60, seed=2))


def test_the_store_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 100)
    configured, adapter = faulty()
    with rig([configured]) as it:
        adapter.gate.clear()
        for seed in range(5):
            it.put(keys(80, seed))
        until(lambda: it.storage.status()["store"]["dropped_objects"] > 0 or adapter.stalled == 2)
        until(lambda: it.sample("l2_store_dropped_total", reason="queue_full") > 0)
        assert it.storage.status()["store"]["queued_objects"] <= 100
        assert it.resident(keys(80, 4)) == 80  # in L1 all the same
        it.storage.call_soon(adapter.gate.set)
        assert it.storage.flush(20)


def test_requests_beyond_the_limit_wait_their_turn() -> None:
    configured, adapter = faulty()
    with rig([configured], prefetch_max_in_flight=2) as it:
        for seed in range(6):
            stored_and_forgotten(it, 5, seed)
        adapter.gate.clear()
        answers = [it.begin_fetch(keys(5, seed))[0] for seed in range(6)]
        until(lambda: it.storage.status()["prefetch"]["waiting"] == 4)
        assert it.storage.status()["prefetch"]["in_flight"] == 2
        it.storage.call_soon(adapter.gate.set)
        assert [answer.get(timeout=20).chunks for answer in answers] == [5] * 6


def test_loads_are_admitted_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_PREFETCH_BYTES_IN_FLIGHT", 10 * FRAME_BYTES)
    monkeypatch.setattr(limits, "L2_LOAD_BATCH_BYTES", 4 * FRAME_BYTES)
    configured, adapter = faulty()
    with rig([configured]) as it:
        stored_and_forgotten(it, 30)
        adapter.gate.clear()
        answers, _ = it.begin_fetch(keys(30))
        until(lambda: adapter.stalled == 2)
        assert it.storage.responsive(5) and adapter.stalled == 2
        assert it.storage.status()["prefetch"]["bytes_in_flight"] == 8 * FRAME_BYTES
        it.storage.call_soon(adapter.gate.set)
        result = answers.get(timeout=20)
        assert result.chunks == 30 and it.holds(result, keys(30))


def test_the_l1_watermark() -> None:
    with rig([faulty()[0]], slots=100, eviction_watermark=0.5, eviction_ratio=0.5) as it:
        it.put(keys(40, 1))
        assert it.storage.flush(20)
        it.put(keys(40, 2))
        until(lambda: it.l1.core.stats()["objects"] == 40)
        assert it.resident(keys(40, 2)) == 40


def test_the_documented_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lmcache.tiering")
    with rig([faulty()[0]]) as it:
        stored_and_forgotten(it)
        it.fetch(keys(20))
    lines = [record.message for record in caplog.records]
    assert any(line.startswith("Submitted store task 1") for line in lines)
    assert any(line.startswith("L2 store task 1 completed") for line in lines)
    assert "Prefetch request submitted: 20 total keys, 0 L1 prefix hits, 20 remaining for L2" in lines


# ---- life ----------------------------------------------------------------------------------------------------------
def test_stop_writes_what_is_queued() -> None:
    configured, adapter = faulty()
    with rig([configured]) as it:
        for seed in range(5):
            it.put(keys(80, seed))
        assert it.storage.stop(20)
        assert len(adapter.inner.objects) == 400  # type: ignore[attr-defined]
        assert not it.storage.responsive(0.05)
        assert it.fetch(keys(5)).miss_reason is MissReason.L2_FAILED
        it.storage.objects_committed([keys(1)[0].namespace], bytes(32), bytes(32))
        with pytest.raises(LMCacheError, match="has ended"):
            it.storage.clear("l1")


def test_stop_does_not_wait_for_a_backend_that_never_answers() -> None:
    configured, adapter = faulty()
    with rig([configured]) as it:
        stored_and_forgotten(it)
        adapter.gate.clear()
        answers, _ = it.begin_fetch(keys(20))
        until(lambda: adapter.stalled == 1)
        started = time.monotonic()
        assert not it.storage.stop(0.2)
        assert time.monotonic() - started < 10
        assert answers.get(timeout=5).chunks == 0
        assert it.storage.stop(0.2)
        it.l1.core.drop_owner(-1)


def test_an_adapter_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = build(parse_adapter({"type": "fs_native", "base_path": str(tmp_path / "file")}, 1))
    with pytest.raises(ResourceError, match="--l2-adapter 2"), rig([build(parse_adapter(MOCK, 0)), bad]):
        raise AssertionError("started")


def test_without_adapters_everything_is_a_miss() -> None:
    with rig() as it:
        it.put(keys(5))
        assert it.fetch(keys(5, seed=1)).miss_reason is MissReason.NOT_STORED
        assert it.storage.responsive(5)
        assert it.storage.clear("all") == (5, 5 * FRAME_BYTES)


def test_clear_goes_on_behind_an_adapter_that_fails_and_says_so() -> None:
    (first, one), (second, two) = faulty(), faulty(index=1)
    with rig([first, second]) as it:
        it.put(keys(20))
        assert it.storage.flush(20)
        one.clear_raises = AdapterError("no right to delete")
        with pytest.raises(LMCacheError, match="Not everything could be cleared: no right to delete"):
            it.storage.clear("all")
        assert (it.l1.core.stats()["objects"], len(two.inner.objects)) == (0, 0)  # type: ignore[attr-defined]
        assert it.fetch(keys(20)).chunks == 20


def test_a_fault_of_what_the_loop_calls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with rig([]) as it:
        it.storage.call_soon([].pop)
        until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.name == "lmcache.tiering" and record.exc_info is not None and record.exc_info[0] is IndexError


def test_clear_names_its_tiers() -> None:
    with rig() as it, pytest.raises(LMCacheError, match="l1, l2 or all; got 'l3'"):
        it.storage.clear("l3")
