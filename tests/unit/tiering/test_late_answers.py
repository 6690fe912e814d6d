"""An adapter that is late to say what it has costs a request nothing of what others have, and others nothing at all."""

from __future__ import annotations

import time

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import MissReason
from lmcache.errors import AdapterError
from lmcache.tiering import prefetch
from polling import until
from support.faults import FaultyAdapter
from unit.tiering.support import ENGINE, Rig, faulty, keys, namespace, open_rig

STORED = 20
DEADLINE_SECONDS = 20.0
LATE_FRACTION = prefetch.LATE_FRACTION


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late after half a second in place of two and a half."""
    monkeypatch.setattr(prefetch, "LATE_FRACTION", LATE_FRACTION / 5)


def silent(rig: Rig, adapter: FaultyAdapter) -> None:
    """From now on it does not say what it has."""
    adapter.stalls.add("probe")
    rig.storage.call_soon(adapter.gate.clear)
    assert rig.storage.responsive(20)


def only_in_first(rig: Rig, adapters: list[FaultyAdapter], chunks: list[ObjectKey]) -> None:
    rig.put(chunks)
    assert rig.storage.flush(20)
    for runner, adapter in zip(rig.storage.runners[1:], adapters[1:], strict=True):
        for key in chunks:
            del adapter.inner.objects[key]
        rig.storage.call_soon(lambda runner=runner: runner.lost(chunks))
    rig.storage.clear("l1")


def seconds_of(
    rig: Rig, stored: int, beyond: int = 5, seed: int = 0, deadline_seconds: float = DEADLINE_SECONDS
) -> float:
    """A prompt that goes on beyond what is stored: what is stored is a hit, with its bytes."""
    wanted = keys(stored + beyond, seed)
    started = time.monotonic()
    result = rig.fetch(wanted, deadline_seconds=deadline_seconds)
    seconds = time.monotonic() - started
    assert (result.chunks, result.miss_reason) == (stored, MissReason.L2_DEADLINE)
    assert rig.holds(result, wanted)
    rig.l1.core.release(result.lease)
    return seconds


@pytest.mark.parametrize("stored", [STORED, 32, 50, 200])
def test_what_a_fast_adapter_holds_is_a_hit_though_a_later_one_is_silent(stored: int) -> None:
    (first, fast), (second, mute) = faulty(), faulty(index=1, timeout_seconds=60)
    with open_rig([first, second]) as rig:
        only_in_first(rig, [fast, mute], keys(stored))
        silent(rig, mute)
        assert seconds_of(rig, stored) < DEADLINE_SECONDS / 2
        # Nobody waits for it again as long as that question has no answer, and it is not asked again.
        asked = mute.calls["probe"]
        assert min(seconds_of(rig, stored) for _ in range(3)) < DEADLINE_SECONDS * prefetch.LATE_FRACTION
        assert mute.calls["probe"] == asked == 1
        assert rig.sample("timeouts_total") == 0
        rig.storage.call_soon(mute.gate.set)
        until(rig.idle)
        assert rig.fetch(keys(stored + 5)).miss_reason is MissReason.NOT_STORED


def test_the_adapter_after_a_silent_one_is_asked() -> None:
    (first, fast), (second, mute), (third, last) = faulty(), faulty(index=1), faulty(index=2)
    with open_rig([first, second, third]) as rig:
        wanted = keys(2 * STORED)
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        for index, gone in ((0, wanted[STORED:]), (1, wanted)):
            rig.storage.call_soon(lambda runner=rig.storage.runners[index], gone=gone: runner.lost(gone))
        for key in wanted[STORED:]:
            del fast.inner.objects[key]
        silent(rig, mute)

        def whole() -> bool:
            """Not where this machine stands still until the deadline; later ones do not wait for the silent one."""
            result = rig.fetch(wanted, deadline_seconds=4.0)
            assert rig.holds(result, wanted)
            rig.l1.core.release(result.lease)
            return result.chunks == 2 * STORED

        until(whole)
        assert last.calls["load"] > 0 and not mute.calls["load"]
        rig.storage.call_soon(mute.gate.set)


def test_what_l1_holds_is_answered_though_the_adapter_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that servers wait."""
    monkeypatch.setattr(prefetch, "LATE_FRACTION", LATE_FRACTION)
    configured, mute = faulty()
    with open_rig([configured]) as rig:
        rig.put(keys(STORED), tell=False)
        silent(rig, mute)
        started = time.monotonic()
        result = rig.fetch(keys(STORED + 5)[STORED:], in_l1=keys(STORED), deadline_seconds=DEADLINE_SECONDS)
        assert (result.chunks, result.miss_reason) == (0, MissReason.L2_DEADLINE)
        assert time.monotonic() - started < DEADLINE_SECONDS / 2
        rig.storage.call_soon(mute.gate.set)


def test_a_window_that_a_fast_adapter_holds_is_a_hit_though_a_later_one_is_silent() -> None:
    whole, state = namespace(), namespace("states")
    (first, fast), (second, mute) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        wanted = keys(STORED + 5)
        states = [ObjectKey(state, wanted[chunk].chunk_hash) for chunk in (9, STORED - 1)]
        only_in_first(rig, [fast, mute], wanted[:STORED])
        only_in_first(rig, [fast, mute], states)
        silent(rig, mute)
        result = rig.fetch(wanted, namespaces=(whole, state), tails=(0, 1), deadline_seconds=DEADLINE_SECONDS)
        assert (result.chunks, result.miss_reason) == (STORED, MissReason.L2_DEADLINE)
        assert rig.holds(result, wanted, (whole, state))
        rig.storage.call_soon(mute.gate.set)


def test_requests_of_less_patience_than_the_adapter_suspend_it_all_the_same() -> None:
    """Else each of them waits for it to the end."""
    configured, mute = faulty()
    with open_rig([configured]) as rig:
        silent(rig, mute)
        rig.be_impatient(1.5)
        for seed in range(3):
            result = rig.fetch(keys(4, seed), deadline_seconds=0.1)
            assert (result.chunks, result.miss_reason) == (0, MissReason.L2_DEADLINE)
        until(lambda: rig.storage.status()["adapters"][0]["loads_suspended"])
        started = time.monotonic()
        assert rig.fetch(keys(4)).chunks == 0
        assert time.monotonic() - started < DEADLINE_SECONDS / 2, "nobody waits for it any more"
        rig.storage.call_soon(mute.gate.set)


def test_who_waits_for_a_silent_adapter_holds_no_place_of_the_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, fast), (second, mute) = faulty(), faulty(index=1, timeout_seconds=60)
    monkeypatch.setattr(prefetch, "LATE_FRACTION", 1.0)
    with open_rig([first, second], prefetch_max_in_flight=1) as rig:
        for seed in range(2):
            only_in_first(rig, [fast, mute], keys(STORED, seed))
        silent(rig, mute)
        waiting, _ = rig.begin_fetch(keys(STORED + 5), deadline_seconds=60.0)
        until(lambda: mute.stalled == 1)
        assert rig.fetch(keys(STORED, 1)).chunks == STORED
        assert waiting.empty()
        rig.storage.call_soon(mute.gate.set)
        assert waiting.get(timeout=60).chunks == STORED


def test_an_engine_that_wants_no_answer_any_more_leaves_nothing_behind() -> None:
    (first, fast), (second, mute) = faulty(), faulty(index=1)
    with open_rig([first, second], prefetch_max_in_flight=1) as rig:
        only_in_first(rig, [fast, mute], keys(STORED))
        silent(rig, mute)
        for _ in range(3):  # the first has the place, the others wait for it
            answers, cancel = rig.begin_fetch(keys(STORED + 5), deadline_seconds=20.0)
            assert rig.storage.responsive(20)
            cancel()
            assert answers.get(timeout=20).chunks == 0
        until(lambda: not any(rig.storage.status()["prefetch"].values()), tell=rig.storage.status)
        rig.storage.call_soon(mute.gate.set)
        until(rig.idle)
        rig.l1.core.drop_owner(ENGINE)


@pytest.mark.parametrize("lost", [10, 0])
def test_what_was_loaded_does_not_wait_for_a_silent_adapter_that_may_have_what_was_lost(lost: int) -> None:
    (first, fast), (second, mute) = faulty(), faulty(index=1, timeout_seconds=60)
    with open_rig([first, second]) as rig:
        wanted = keys(STORED)
        only_in_first(rig, [fast, mute], wanted)
        del fast.inner.objects[wanted[lost]]  # by somebody else: it counts as being there
        silent(rig, mute)
        started = time.monotonic()
        deadline_seconds = DEADLINE_SECONDS if lost else 1.0  # of which all is waited for
        result = rig.fetch(wanted, deadline_seconds=deadline_seconds)
        assert (result.chunks, result.miss_reason) == (lost, MissReason.L2_DEADLINE)
        assert rig.holds(result, wanted)
        if lost:  # else there is nothing that could be had without it
            assert time.monotonic() - started < DEADLINE_SECONDS / 2
        rig.storage.call_soon(mute.gate.set)


@pytest.mark.parametrize("first", [0, 1])
def test_a_question_that_fails_is_the_reason_of_its_own_request_alone(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        probe = adapter.inner.probe

        async def fails_for_one(wanted: list[ObjectKey]) -> list[int | None]:
            if wanted[0] == keys(1)[0]:
                raise AdapterError("refused")
            return list(await probe(wanted))

        monkeypatch.setattr(adapter.inner, "probe", fails_for_one)
        silent(rig, adapter)
        answers = {seed: rig.begin_fetch(keys(4, seed))[0] for seed in (first, 1 - first)}
        until(lambda: adapter.stalled == 2)
        rig.storage.call_soon(adapter.gate.set)
        reasons = [answers[seed].get(timeout=20).miss_reason for seed in range(2)]
        assert reasons == [MissReason.L2_FAILED, MissReason.NOT_STORED]


def test_a_prefix_that_ends_earlier_does_not_wait_for_loads_behind_its_end() -> None:
    (first, fast), (second, slow) = faulty(), faulty(index=1, timeout_seconds=60)
    with open_rig([first, second]) as rig:
        wanted = keys(2 * STORED)
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        for runner, adapter, gone in zip(
            rig.storage.runners, (fast, slow), (wanted[STORED:], wanted[:STORED]), strict=True
        ):
            for key in gone:
                del adapter.inner.objects[key]
            rig.storage.call_soon(lambda runner=runner, gone=gone: runner.lost(gone))
        del fast.inner.objects[wanted[10]]  # by somebody else: it counts as being there
        rig.storage.call_soon(slow.gate.clear)
        started = time.monotonic()
        result = rig.fetch(wanted, deadline_seconds=DEADLINE_SECONDS)
        assert (result.chunks, result.miss_reason) == (10, MissReason.NOT_STORED)
        assert rig.holds(result, wanted) and slow.stalled > 0
        assert time.monotonic() - started < DEADLINE_SECONDS / 2
        rig.storage.call_soon(slow.gate.set)
