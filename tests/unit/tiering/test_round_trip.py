"""L1 to L2 and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import MissReason
from lmcache.l2.adapter_types import build, parse_adapter
from polling import until
from unit.l2.support import eviction_order
from unit.tiering.support import MOCK, faulty, keys, namespace, open_rig


@pytest.mark.parametrize("direct", [False, True])
def test_what_left_l1_comes_back_from_disk(tmp_path: Path, direct: bool) -> None:
    wanted = keys(300)
    spec = {"type": "fs_native", "base_path": str(tmp_path), "use_odirect": direct}
    with open_rig([build(parse_adapter(spec, 0))]) as rig:
        assert rig.put(wanted) == 300
        assert rig.storage.flush(20)
        assert rig.storage.clear("l1")[0] == 300
        result = rig.fetch(wanted)
        assert (result.chunks, result.miss_reason) == (300, None)
        assert rig.holds(result, wanted)
        # Not retained: gone with its last lease.
        assert rig.resident(wanted) == 300
        rig.l1.core.release(result.lease)
        assert rig.resident(wanted) == 0
        assert rig.sample("l2_prefetch_load_completed_chunks_total") == 300
    with open_rig([build(parse_adapter(spec, 0))], prefetch_policy="retain") as rig:  # another server, the same folder
        result = rig.fetch(wanted)
        assert result.chunks == 300 and rig.holds(result, wanted)
        rig.l1.core.release(result.lease)
        assert rig.resident(wanted) == 300
        assert rig.storage.clear("all")[0] == 600
        assert rig.fetch(wanted).miss_reason is MissReason.NOT_STORED
    assert not list(tmp_path.rglob("*.data")) and not list(tmp_path.rglob("*.tmp"))


def test_no_prefix_is_due_to_leave_l2_before_its_suffix(tmp_path: Path) -> None:
    wanted = keys(300)  # several batches
    eviction = {"eviction_policy": "LRU"}
    spec = {"type": "fs_native", "base_path": str(tmp_path), "max_capacity_gb": 1, "eviction": eviction}
    with open_rig([build(parse_adapter(spec, 0))]) as rig:
        rig.put(wanted)
        assert rig.storage.flush(20)
        ledger = rig.storage.runners[0].ledger
        for in_l1 in (0, 40):  # the second time L1 still has a part
            rig.storage.clear("l1")
            if in_l1:
                rig.put(wanted[:in_l1], tell=False)
            result = rig.fetch(wanted[in_l1:], in_l1=wanted[:in_l1])
            assert result.chunks == 300 - in_l1
            rig.l1.core.release(result.lease)
            noted = threading.Event()  # use is noted after the answer
            rig.storage.call_soon(noted.set)
            assert noted.wait(20)
            assert eviction_order(ledger) == wanted[::-1]


def test_the_prefix_ends_at_the_first_chunk_that_is_nowhere() -> None:
    wanted = keys(100)
    with open_rig([faulty()[0]]) as rig:
        rig.put(wanted[:40] + wanted[41:])
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        result = rig.fetch(wanted)
        assert (result.chunks, result.miss_reason) == (40, MissReason.NOT_STORED)
        assert rig.holds(result, wanted)


def test_a_chunk_is_there_when_every_namespace_has_it() -> None:
    ranks = [namespace(rank=rank) for rank in range(3)]
    wanted = keys(50)
    with open_rig([faulty()[0]]) as rig:
        for rank, length in zip(ranks, (50, 45, 48), strict=True):
            rig.put([ObjectKey(rank, key.chunk_hash) for key in wanted[:length]])
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        result = rig.fetch(wanted, namespaces=ranks)
        assert (result.chunks, result.miss_reason) == (45, MissReason.NOT_STORED)
        assert rig.holds(result, wanted, ranks)


def test_what_l1_still_has_is_not_loaded_again() -> None:
    """A hole in L1: the middle was evicted."""
    wanted = keys(60)
    with open_rig([faulty()[0]]) as rig:
        rig.put(wanted[:20] + wanted[40:], tell=False)
        rig.put(wanted[20:40])
        assert rig.storage.flush(20)
        digests = wanted[0].namespace.digest * 20
        assert rig.l1.core.remove(digests, b"".join(key.chunk_hash for key in wanted[20:40])) == 20
        result = rig.fetch(wanted)
        assert result.chunks == 60 and rig.holds(result, wanted)
        assert rig.sample("l2_prefetch_load_completed_chunks_total") == 20


def test_adapters_are_asked_in_order_and_each_for_what_the_others_lack() -> None:
    wanted = keys(30)
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        assert rig.fetch(wanted).chunks == 30
        assert (front.calls["load"], back.calls["load"]) == (1, 0)
        rig.l1.core.drop_owner(7)
        for key in wanted[10:]:
            del front.inner.objects[key]  # the backend lost them and nobody knows
        result = rig.fetch(wanted)
        assert result.chunks == 30 and rig.holds(result, wanted)
        assert (front.calls["load"], back.calls["load"]) == (2, 1)


def test_requests_for_the_same_objects_share_one_load() -> None:
    wanted = keys(20)
    configured, adapter = faulty()
    with open_rig([configured]) as rig:
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        adapter.gate.clear()
        answers = [rig.begin_fetch(wanted)[0] for _ in range(5)]
        until(lambda: rig.storage.status()["prefetch"]["in_flight"] == 5)
        rig.storage.call_soon(adapter.gate.set)
        results = [answer.get(timeout=20) for answer in answers]
        assert [result.chunks for result in results] == [20] * 5
        assert all(rig.holds(result, wanted) for result in results)
        assert adapter.calls["load"] == 1
        for result in results[1:]:
            rig.l1.core.release(result.lease)
        assert rig.resident(wanted) == 20
        rig.l1.core.release(results[0].lease)
        assert rig.resident(wanted) == 0


def test_many_threads_at_once() -> None:
    with open_rig([build(parse_adapter(MOCK, 0))], slots=4096) as rig:

        def client(seed: int) -> None:
            for round_ in range(10):
                wanted = keys(24, seed=100 * seed + round_ % 3)
                rig.put(wanted)
                result = rig.fetch(wanted)
                assert rig.holds(result, wanted)
                rig.l1.core.release(result.lease)

        threads = [threading.Thread(target=client, args=(seed % 3,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert rig.storage.flush(20)
        until(rig.idle)
        assert rig.storage.responsive(5)


@pytest.mark.parametrize(
    ("takes", "largest"),
    [((64, 64), 64), ((256, 256), 217), ((64, 256), 64), ((256, 64), 64)],
)
def test_small_objects_are_loaded_many_at_a_time_where_each_adapter_takes_them(
    monkeypatch: pytest.MonkeyPatch, takes: tuple[int, int], largest: int
) -> None:
    """And a quarter of a window at most: windows of 32, 128 and 512 chunks, and 868 that are left."""
    wanted = keys(32 + 128 + 512 + 868)
    adapters = [faulty(index=index) for index in range(2)]
    loads: list[int] = []
    for (_, adapter), most in zip(adapters, takes, strict=True):
        monkeypatch.setattr(adapter, "most_load_objects", most, raising=False)

        async def noted(of: Sequence[ObjectKey], into: Sequence[memoryview], load: Any = adapter.load) -> Any:
            loads.append(len(of))
            return await load(of, into)

        monkeypatch.setattr(adapter, "load", noted)
    with open_rig([configured for configured, _ in adapters], slots=2048) as rig:
        rig.put(wanted)
        assert rig.storage.flush(20)
        rig.storage.clear("l1")
        result = rig.fetch(wanted)
        assert result.chunks == len(wanted) and rig.holds(result, wanted)
        assert max(loads) == largest and sum(loads) == len(wanted)
        rig.l1.core.release(result.lease)
