"""`kv_role`: an engine that only stores, and one that only loads."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.integration.engine.connector_metadata import WorkerReport
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from lmcache.protocol.messages import AppendReply
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, answer, output, request, step

CHUNK = 256


class Engine:
    def __init__(self, **role: bool) -> None:
        clock = ManualClock()
        self.client = FakeClient(clock)
        self.pool = FakeBlockPool(100)
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            "i",
            SchedulerOptions(groups=(CacheGroup(128, ("layer0",)),), ranks=1, workers=1, **role),
            environment=EngineEnvironment(clock),
        )
        self.side.bind(self.pool, lambda name: (list(range(1, 21)),))


def test_a_producer_stores_and_never_looks_up() -> None:
    engine = Engine(loads=False)
    prompt = request("a", 600)
    engine.side.on_new_request(prompt)
    assert [name for name, _, _ in engine.client.sent] == ["append"]
    assert engine.side.matched_tokens(prompt, 0) == (0, False)
    engine.side.after_allocation(prompt, ([],), 0)
    assert engine.side.step_metadata(step(new=[("a", 0, 300)])).stores == []  # not named yet
    engine.client.pendings("append")[0].outcome = AppendReply(0, bytes([1]) * 32 + bytes([2]) * 32)
    (order,) = engine.side.step_metadata(step(running=[("a", 300, 300)])).stores
    assert array("q", order.blocks[0]).tolist() == [1, 2, 3, 4]
    assert order.hashes == bytes([1]) * 32 + bytes([2]) * 32
    engine.side.step_ended(output(report=WorkerReport(Counter([order.job]))))
    assert engine.side.matched_tokens(prompt, 0) == (0, False)  # preempted
    engine.side.request_finished(prompt, ([],))
    assert [name for name, _, _ in engine.client.sent] == ["append", "end_session"]
    assert not engine.pool.pinned()


def test_a_producer_also_stores_what_decoding_fills() -> None:
    engine = Engine(loads=False, save_decode=True)
    prompt = request("a", 300, all_token_ids=list(range(512)), num_tokens=300)
    engine.side.on_new_request(prompt)
    engine.side.after_allocation(prompt, ([],), 0)
    engine.client.pendings("append")[0].outcome = AppendReply(0, bytes([1]) * 32)
    assert len(engine.side.step_metadata(step(new=[("a", 0, 300)])).stores) == 1
    prompt.num_tokens = 512
    engine.side.step_metadata(step(running=[("a", 511, 1)]))
    engine.client.pendings("append")[1].outcome = AppendReply(1, bytes([2]) * 32)
    (order,) = engine.side.step_metadata(step(running=[("a", 512, 1)])).stores
    assert (array("q", order.blocks[0]).tolist(), order.hashes) == ([3, 4], bytes([2]) * 32)


@pytest.mark.parametrize("save_decode", [False, True])
def test_a_consumer_loads_and_stores_nothing(save_decode: bool) -> None:
    engine = Engine(stores=False, save_decode=save_decode)
    prompt = request("a", 600, all_token_ids=list(range(700)))
    engine.side.on_new_request(prompt)
    engine.client.pendings("lookup")[0].outcome = answer(1, 600)
    assert engine.side.matched_tokens(prompt, 0) == (256, True)
    engine.side.after_allocation(prompt, (list(range(1, 6)),), 256)
    (load,) = engine.side.step_metadata(step()).loads
    assert load.hit_chunks == 1
    # A chunk that is not what its key says is computed, and still not stored.
    report = WorkerReport(unreadable={"a": frozenset({0})})
    engine.side.step_ended(output(report=report, received={"a"}, invalid={1}))
    orders = engine.side.step_metadata(step(new=[("a", 0, 600)]))
    prompt.num_tokens = 700
    assert (orders.loads, orders.stores, engine.pool.pinned()) == ([], [], set())
    engine.side.request_finished(prompt, (list(range(1, 6)),))
    assert engine.client.messages("append") == []


def test_requests_of_a_consumer_do_not_wait_for_each_other() -> None:
    """Nobody will store what the first one computes."""
    engine = Engine(stores=False)
    for name in ("a", "b"):
        asked = request(name, 600)
        engine.side.on_new_request(asked)
        engine.client.pendings("lookup")[-1].outcome = answer(0, 600)
        assert engine.side.matched_tokens(asked, 0) == (0, False)
        engine.side.after_allocation(asked, ([],), 0)
        engine.side.step_metadata(step(new=[(name, 0, 100)]))
