"""An adapter that is slow: requests that need it wait, those that another adapter serves do not, nor do its stores."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lmcache.core import limits
from lmcache.core.key import accepting_layout
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from polling import until
from support.faults import FaultyAdapter
from unit.tiering.support import FRAME_BYTES, MOCK, Rig, faulty, keys, namespace, open_rig

REQUESTS = 6
CHUNKS = 20


def only_in(adapters: list[FaultyAdapter], index: int, seed: int, rig: Rig) -> None:
    """Stored in all, and taken from the others behind everybody's back."""
    wanted = keys(CHUNKS, seed)
    rig.put(wanted)
    assert rig.storage.flush(20)
    for number, adapter in enumerate(adapters):
        if number != index:
            for key in wanted:
                del adapter.inner.objects[key]
            rig.storage.call_soon(lambda runner=rig.storage.runners[number]: runner.lost(wanted))
    rig.storage.clear("l1")


def under_way(rig: Rig) -> tuple[int, int]:
    """Requests that have a place, and those that wait for one."""
    figures = rig.storage.status()["prefetch"]
    return figures["in_flight"], figures["waiting"]


@pytest.mark.parametrize("slow", ["load", "probe"])
def test_requests_for_a_slow_adapter_take_no_place_of_others(slow: str) -> None:
    (first, fast_one), (second, slow_one) = faulty(), faulty(index=1)
    with open_rig([first, second], prefetch_max_in_flight=2) as rig:
        for seed in range(REQUESTS):
            only_in([fast_one, slow_one], 1, seed, rig)
        only_in([fast_one, slow_one], 0, REQUESTS, rig)
        if slow == "probe":
            slow_one.stalls.add("probe")
            for seed in range(REQUESTS):
                rig.storage.call_soon(lambda seed=seed: rig.storage.runners[1].lost(keys(CHUNKS, seed)))
        rig.storage.call_soon(slow_one.gate.clear)
        waiting = [rig.begin_fetch(keys(CHUNKS, seed))[0] for seed in range(REQUESTS)]
        until(lambda: under_way(rig) == (2, REQUESTS - 2), tell=rig.storage.status)
        until(lambda: slow_one.stalled == 2)
        result = rig.fetch(keys(CHUNKS, REQUESTS), deadline_seconds=10)
        assert result.chunks == CHUNKS and rig.holds(result, keys(CHUNKS, REQUESTS))
        rig.storage.call_soon(slow_one.gate.set)
        assert [answer.get(timeout=20).chunks for answer in waiting] == [CHUNKS] * REQUESTS


@pytest.mark.parametrize("slow", [0, 1])
def test_prompts_that_go_on_beyond_what_is_stored_wait_for_no_loads_of_a_slow_adapter(slow: int) -> None:
    configured, adapters = zip(*(faulty(index=index) for index in range(2)), strict=True)
    with open_rig(configured, prefetch_max_in_flight=2) as rig:
        for seed in range(REQUESTS):
            only_in(list(adapters), slow, seed, rig)
        only_in(list(adapters), 1 - slow, REQUESTS, rig)
        rig.storage.call_soon(adapters[slow].gate.clear)
        waiting = [rig.begin_fetch(keys(CHUNKS + 5, seed))[0] for seed in range(REQUESTS)]
        until(lambda: under_way(rig) == (2, REQUESTS - 2), tell=rig.storage.status)
        until(lambda: adapters[slow].stalled == 2)
        assert rig.fetch(keys(CHUNKS + 5, REQUESTS), deadline_seconds=10).chunks == CHUNKS
        rig.storage.call_soon(adapters[slow].gate.set)
        assert [answer.get(timeout=20).chunks for answer in waiting] == [CHUNKS] * REQUESTS


def lossy(index: int) -> tuple[ConfiguredAdapter, FaultyAdapter]:
    configured = build(parse_adapter({**MOCK, "serde": {"type": "fp8"}}, index))
    adapter = FaultyAdapter(configured.adapter)
    return ConfiguredAdapter(configured.config, adapter, configured.serde), adapter


APPROXIMATE = replace(namespace(), layout=accepting_layout(namespace().layout, "fp8"))


def test_exact_prompts_do_not_wait_for_an_adapter_with_a_lossy_serde() -> None:
    (first, _), (second, slow_one) = faulty(), lossy(1)
    with open_rig([first, second], prefetch_max_in_flight=2) as rig:
        rig.put(keys(CHUNKS))
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        slow_one.stalls.add("probe")
        rig.storage.call_soon(slow_one.gate.clear)
        waiting = [rig.begin_fetch(keys(CHUNKS, seed, of=APPROXIMATE))[0] for seed in range(REQUESTS)]
        until(lambda: slow_one.stalled == 2, tell=rig.storage.status)
        assert rig.fetch(keys(CHUNKS + 5), deadline_seconds=10).chunks == CHUNKS
        rig.storage.call_soon(slow_one.gate.set)
        assert [answer.get(timeout=20).chunks for answer in waiting] == [0] * REQUESTS


def test_kv_of_both_kinds_that_another_server_stored_is_found() -> None:
    (first, exact_one), (second, lossy_one) = faulty(), lossy(1)
    wanted, approximate = keys(CHUNKS), keys(CHUNKS, of=APPROXIMATE)
    with open_rig([first, second]) as rig:
        rig.put(wanted)
        rig.put(approximate)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        assert len(exact_one.inner.objects) == len(lossy_one.inner.objects) == CHUNKS
        for runner, stored in zip(rig.storage.runners, (wanted, approximate), strict=True):
            rig.storage.call_soon(lambda runner=runner, stored=stored: runner.lost(runner.stored_keys(stored)))
        assert rig.fetch(wanted, namespaces=[namespace(), APPROXIMATE]).chunks == CHUNKS


def test_bytes_on_their_way_from_a_slow_adapter_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_PREFETCH_BYTES_IN_FLIGHT", CHUNKS * FRAME_BYTES)
    (first, fast_one), (second, slow_one) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        for seed in range(2):
            only_in([fast_one, slow_one], 1, seed, rig)
        only_in([fast_one, slow_one], 0, 2, rig)
        rig.storage.call_soon(slow_one.gate.clear)
        waiting = [rig.begin_fetch(keys(CHUNKS, seed))[0] for seed in range(2)]
        until(lambda: rig.storage.status()["prefetch"]["bytes_in_flight"] == CHUNKS * FRAME_BYTES)
        assert rig.fetch(keys(CHUNKS, 2), deadline_seconds=10).chunks == CHUNKS
        rig.storage.call_soon(slow_one.gate.set)
        assert [answer.get(timeout=20).chunks for answer in waiting] == [CHUNKS] * 2


def test_what_a_slow_adapter_does_not_take_fills_its_own_queue_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_L2_STORE_QUEUE_OBJECTS", 200)
    (first, fast_one), (second, slow_one) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        rig.storage.call_soon(slow_one.gate.clear)
        for seed in range(8):
            rig.put(keys(80, seed))
            until(lambda seed=seed: len(fast_one.inner.objects) == 80 * (seed + 1), tell=rig.storage.status)
        assert rig.storage.status()["store"]["queued_objects"] == 100
        assert rig.sample("l2_store_dropped_total", reason="queue_full") > 0
        rig.storage.call_soon(slow_one.gate.set)
        assert rig.storage.flush(20)
        assert len(slow_one.inner.objects) >= 100
