"""Every decision of the scheduler side, against a server and an engine that do what the test says."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.client.server_probe import ANSWER_SECONDS, LONGEST_LOOK_SECONDS, QUIET_SECONDS
from lmcache.environment import SYSTEM
from lmcache.errors import RemoteError, ServerUnavailable
from lmcache.integration.engine.connector_metadata import LoadOrder, StoreOrder, WorkerReport
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.hit_lookups import STEP_WAIT_SECONDS
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, answer, hello, output, request, step

FULL = CacheGroup(128, ("layer0",))
WINDOW = CacheGroup(128, ("layer1",), tail_tokens=511)
STATE = CacheGroup(128, ("layer2",), tail_tokens=1, state="gdn")


class Engine:
    """The scheduler side with everything around it."""

    def __init__(self, blocks=400, random_bytes=SYSTEM.random_bytes, local_worker=lambda: None, **options: Any) -> None:
        self.clock = ManualClock()
        environment = EngineEnvironment(self.clock, random_bytes)
        self.client = FakeClient(self.clock)
        self.pool = FakeBlockPool(blocks)
        self.tables: dict[str, tuple[list[int], ...]] = {}
        engine = SchedulerOptions(**{"groups": (FULL,), "ranks": 1, "workers": 1, **options})
        self.side = SchedulerSide(self.client, "i", engine, local_worker=local_worker, environment=environment)
        self.side.bind(self.pool, lambda request_id: self.tables[request_id])

    def settle(self, reply, index: int = -1) -> None:
        self.client.pendings("lookup")[index].outcome = reply

    def leases_given_back(self) -> list[int]:
        return [message.lease for message in self.client.messages("release")]


def blocks_of(packed: bytes) -> list[int]:
    return array("q", packed).tolist()


def test_tokens_are_sent_once_with_the_first_question() -> None:
    engine = Engine()
    engine.side.on_new_request(request("a", 600, cache_salt="tenant"))
    (lookup,) = engine.client.messages("lookup")
    assert (lookup.first_token, lookup.cache_salt, lookup.request_id) == (0, "tenant", "a")
    assert array("I", lookup.tokens).tolist() == list(range(600))


def test_prompts_that_cannot_hit_ask_nothing() -> None:
    engine = Engine()
    engine.side.on_new_request(request("short", 255))
    engine.side.on_new_request(request("embeds", 600, prompt_embeds=object()))
    engine.side.on_new_request(request("x" * 600, 600))
    assert engine.client.sent == []
    assert engine.side.matched_tokens(request("short", 255), 0) == (0, False)


def test_a_server_whose_chunks_do_not_fit_the_blocks_is_asked_nothing() -> None:
    engine = Engine()
    engine.client.hello = hello(chunk_tokens=96)
    engine.side.on_new_request(asked := request("a", 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    assert engine.side.step_metadata(step(new=[("a", 0, 600)])).stores == []
    assert engine.client.sent == []


def test_chunks_that_are_not_whole_blocks_ask_and_store_nothing() -> None:
    engine = Engine(groups=(FULL, CacheGroup(640, ("layer1",))))
    engine.side.on_new_request(asked := request("a", 1300))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.tables["a"] = ([1] * 11, [2, 3, 4])
    assert engine.side.step_metadata(step(new=[("a", 0, 1300)])).stores == []
    assert engine.client.sent == []
    engine.client.hello = None  # a request that comes while the server is away, and a server that comes back so
    engine.side.on_new_request(two := request("b", 1300))
    engine.client.hello = hello()
    assert engine.side.matched_tokens(two, 0) == (0, False)
    assert engine.client.sent == []


def test_a_step_waits_only_its_budget_and_asks_again_later() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.side.on_new_request(two := request("b", 600))
    before = engine.clock.now_seconds
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    assert engine.side.matched_tokens(two, 0) == (None, False)
    assert engine.clock.now_seconds - before == pytest.approx(STEP_WAIT_SECONDS)
    engine.side.step_metadata(step())
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(two, 0) == (512, True)


def test_a_busy_engine_does_not_wait_for_an_old_question() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.side.step_metadata(step(new=[("other", 0, 10)]))
    engine.clock.advance(0.1)
    before = engine.clock.now_seconds
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    assert engine.clock.now_seconds == before


def test_a_hit_is_loaded_into_its_blocks_and_the_lease_kept_until_the_copy_ended() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)
    assert engine.side.matched_tokens(asked, 0) == (512, True)  # asked again while blocks are short
    engine.side.after_allocation(asked, ([5, 6, 7, 8],), 512)
    orders = engine.side.step_metadata(step())
    (load,) = orders.loads
    assert isinstance(load, LoadOrder)
    assert (load.request_id, load.hit_chunks, load.server_epoch) == ("a", 2, hello().server_epoch)
    assert load.groups[0].first_chunk == 0
    assert blocks_of(load.groups[0].blocks) == [5, 6, 7, 8]
    assert engine.side.step_metadata(step()).loads == []
    assert engine.side.tokens_not_in_l1("a") == 0
    assert engine.leases_given_back() == []
    engine.side.step_ended(output(received={"a"}))
    assert engine.leases_given_back() == [7]
    engine.side.after_allocation(asked, ([5, 6, 7, 8, 9],), 0)  # vLLM's second call, when the request is scheduled
    engine.side.request_finished(request("a", 600), ((),))
    assert [m.request_id for m in engine.client.messages("end_session")] == ["a"]
    assert engine.leases_given_back() == [7]


@pytest.mark.parametrize(
    ("computed", "expected_first", "expected_blocks"),
    [(128, 0, [-1, 6, 7, 8]), (256, 1, [7, 8]), (384, 1, [-1, 8])],
)
def test_what_the_engine_holds_already_is_verified_but_not_written(computed, expected_first, expected_blocks) -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, computed) == (512 - computed, True)
    engine.side.after_allocation(asked, ([5, 6, 7, 8],), 512 - computed)
    (load,) = engine.side.step_metadata(step()).loads
    assert load.groups[0].first_chunk == expected_first
    assert blocks_of(load.groups[0].blocks) == expected_blocks


def test_a_hit_that_the_engine_holds_itself_gives_the_lease_back() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 512) == (0, False)
    engine.side.after_allocation(asked, ([5, 6, 7, 8, 9],), 0)
    assert engine.leases_given_back() == [7]


def test_requests_that_must_not_read_a_cache_do_not() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600, skip_reading_prefix_cache=True))
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_chunks_are_stored_once_as_they_become_full() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 1100))
    engine.settle(answer(1, 1100))
    assert engine.side.matched_tokens(asked, 0) == (256, True)
    engine.side.after_allocation(asked, ([1, 2],), 256)
    engine.side.step_metadata(step())
    engine.side.step_ended(output(received={"a"}))
    table = list(range(1, 10))
    engine.tables["a"] = (table,)

    def stored(orders) -> list[tuple[list[int], bytes]]:
        return [(blocks_of(order.blocks[0]), order.hashes) for order in orders.stores]

    assert stored(engine.side.step_metadata(step(new=[("a", 256, 200)]))) == []
    assert stored(engine.side.step_metadata(step(running=[("a", 456, 400)]))) == [
        (table[2:6], bytes([1]) * 32 + bytes([2]) * 32)
    ]
    assert stored(engine.side.step_metadata(step(running=[("a", 856, 244)]))) == [(table[6:8], bytes([3]) * 32)]
    assert stored(engine.side.step_metadata(step(running=[("a", 1100, 1)]))) == []
    assert stored(engine.side.step_metadata(step(running=[("a", 1101, 400)]))) == []  # decoded tokens are not stored


def test_what_only_the_engine_holds_is_stored_too() -> None:
    """After a restart of the server the engine's own prefix cache may hit where L1 does not."""
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 512) == (0, False)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    (order,) = engine.side.step_metadata(step(new=[("a", 512, 88)])).stores
    assert blocks_of(order.blocks[0]) == [1, 2, 3, 4]


def test_source_blocks_stay_pinned_until_every_worker_has_read_them() -> None:
    engine = Engine(workers=2)
    engine.side.on_new_request(asked := request("a", 512))
    engine.settle(answer(0, 512))
    engine.side.matched_tokens(asked, 0)
    engine.tables["a"] = ([3, 4, 5, 6],)
    (order,) = engine.side.step_metadata(step(new=[("a", 0, 512)])).stores
    assert isinstance(order, StoreOrder)
    assert engine.pool.pinned() == {3, 4, 5, 6}
    assert engine.side.has_pins and engine.side.pins_end_soon
    engine.side.request_finished(request("a", 600), ((),))
    engine.side.step_ended(output(report=WorkerReport(Counter([order.job]))))
    assert engine.pool.pinned() == {3, 4, 5, 6}
    engine.clock.advance(10.0)
    assert engine.side.has_pins and not engine.side.pins_end_soon  # rather preempt than wait for a stuck store
    one_each = WorkerReport(Counter([order.job])).aggregate(WorkerReport(Counter()))
    engine.side.step_ended(output(report=one_each))
    assert engine.pool.pinned() == set()
    assert not engine.side.has_pins


def test_stores_never_pin_most_of_the_engine_and_the_rest_waits() -> None:
    engine = Engine(blocks=12)
    for name, table in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])):
        engine.side.on_new_request(asked := request(name, 512))
        engine.settle(answer(0, 512))
        engine.side.matched_tokens(asked, 0)
        engine.tables[name] = (table,)
    orders = engine.side.step_metadata(step(new=[("a", 0, 512), ("b", 0, 512)]))
    assert [blocks_of(order.blocks[0]) for order in orders.stores] == [[1, 2, 3, 4], [5, 6]]
    assert engine.pool.pinned() == {1, 2, 3, 4, 5, 6}
    decoding = step(running=[("a", 512, 1), ("b", 512, 1)])
    assert engine.side.step_metadata(decoding).stores == []
    engine.side.step_ended(output(report=WorkerReport(Counter([orders.stores[0].job]))))
    (rest,) = engine.side.step_metadata(decoding).stores
    assert blocks_of(rest.blocks[0]) == [7, 8]
    assert rest.hashes == bytes([1]) * 32
    assert engine.side.step_metadata(decoding).stores == []
    assert engine.pool.pinned() == {5, 6, 7, 8}


def test_a_load_that_failed_is_computed_and_not_tried_again() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([5, 6, 7, 8],), 512)
    engine.side.step_metadata(step())
    engine.side.step_ended(output(received={"a"}, invalid={5, 6}))
    assert engine.leases_given_back() == [7]
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    assert len(engine.client.messages("lookup")) == 1


def test_a_failure_that_one_worker_reports_early_counts_when_all_have_ended() -> None:
    engine = Engine(workers=2)
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([5, 6, 7, 8],), 512)
    engine.side.step_ended(output(report=WorkerReport(unreadable={"a": frozenset({1})}), invalid={7, 8}))
    engine.side.step_ended(output(report=WorkerReport(unreadable={"a": frozenset({0})}), received={"a"}))
    (release,) = engine.client.messages("release")
    assert release.unreadable_chunks == [0, 1]
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_what_replaces_an_unreadable_chunk_is_stored() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 800))
    engine.settle(answer(3, 800))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5, 6],), 768)
    engine.side.step_metadata(step())
    report = WorkerReport(unreadable={"a": frozenset({1})})
    engine.side.step_ended(output(report=report, received={"a"}, invalid={3, 4}))
    engine.tables["a"] = ([1, 2, 3, 4, 5, 6, 7],)
    (order,) = engine.side.step_metadata(step(new=[("a", 256, 544)])).stores
    assert blocks_of(order.blocks[0]) == [3, 4, 5, 6]


def test_nothing_is_kept_of_a_request_that_left_during_a_load_that_failed() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 800))
    engine.settle(answer(3, 800))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5, 6],), 768)
    engine.side.step_metadata(step())
    engine.side.request_finished(request("a", 600), ((),))
    engine.side.step_ended(output(report=WorkerReport(unreadable={"a": frozenset({1})}), received={"a"}))
    engine.side.check_idle()


def test_other_requests_failures_are_not_ours() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([5, 6, 7, 8],), 512)
    engine.side.step_ended(output(received={"a"}, invalid={50}))
    assert engine.side.matched_tokens(asked, 0) == (None, False)  # preempted: asks anew


def test_a_preempted_request_is_asked_for_again_without_its_tokens() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(0, 600))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    assert len(engine.side.step_metadata(step(new=[("a", 0, 600)])).stores) == 1
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    again = engine.client.messages("lookup")[1]
    assert (again.first_token, again.tokens) == (600, b"")
    engine.settle(answer(2, 600, lease=9))
    assert engine.side.matched_tokens(asked, 0) == (512, True)
    engine.side.after_allocation(asked, ([11, 12, 13, 14],), 512)
    engine.side.step_ended(output(received={"a"}))
    engine.tables["a"] = ([11, 12, 13, 14, 15],)
    assert engine.side.step_metadata(step(running=[("a", 512, 88)])).stores == []  # nothing is stored twice
    assert engine.leases_given_back() == [9]


def test_an_abort_during_a_load_keeps_session_and_lease_until_the_copy_ended() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    engine.side.matched_tokens(asked, 0)
    engine.side.after_allocation(asked, ([5, 6, 7, 8],), 512)
    engine.side.step_metadata(step())
    engine.side.request_finished(request("a", 600), ((),))
    assert engine.client.messages("end_session") == []
    engine.side.step_ended(output(received={"a"}))
    assert [m.request_id for m in engine.client.messages("end_session")] == ["a"]
    assert engine.leases_given_back() == [7]


@pytest.mark.parametrize("answered", [False, True])
def test_an_abort_before_scheduling_ends_the_session(answered: bool) -> None:
    engine = Engine()
    engine.side.on_new_request(request("a", 600))
    if answered:
        engine.settle(answer(2, 600))
    engine.side.request_finished(request("a", 600), ((),))
    assert [m.request_id for m in engine.client.messages("end_session")] == ["a"]


def test_without_a_server_nothing_is_asked_waited_for_or_stored() -> None:
    engine = Engine()
    engine.client.hello = None
    engine.side.on_new_request(asked := request("a", 600))
    before = engine.clock.now_seconds
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    assert engine.side.step_metadata(step(new=[("a", 0, 600)])).stores == []
    engine.side.request_finished(request("a", 600), ((),))
    assert engine.clock.now_seconds == before
    assert engine.client.sent == []


def test_a_server_that_appears_before_scheduling_is_used() -> None:
    engine = Engine()
    engine.client.hello = None
    engine.side.on_new_request(asked := request("a", 600))
    engine.client.hello = hello(b"epoch-two-epoch-")
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)


def test_a_lease_of_a_previous_server_is_not_given_back_to_the_next_which_numbers_alike() -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.side.on_new_request(asked := request(name, 600))
        engine.settle(answer(2, 600))
        assert engine.side.matched_tokens(asked, 0) == (512, True)
        engine.side.after_allocation(asked, ([5, 6, 7, 8, 9],), 512)
        engine.side.step_metadata(step())
        if name == "a":
            engine.client.hello = hello(b"epoch-two-epoch-")
    engine.side.step_ended(output(received={"a"}, report=WorkerReport(unreadable={"a": frozenset({0})})))
    assert engine.leases_given_back() == []
    engine.side.step_ended(output(received={"b"}))
    assert engine.leases_given_back() == [7]


def test_an_answer_of_a_previous_server_is_not_used() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)
    engine.client.hello = hello(b"epoch-two-epoch-", chunk_tokens=512)
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    again = engine.client.messages("lookup")[1]
    assert again.first_token == 0 and len(again.tokens) == 600 * 4
    engine.settle(answer(1, 600, chunk=512, lease=3))
    assert engine.side.matched_tokens(asked, 0) == (512, True)


def test_a_server_that_does_not_answer_costs_a_bounded_time_once() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    started = engine.clock.now_seconds
    while engine.side.matched_tokens(asked, 0) == (None, False):
        engine.side.step_metadata(step())
        engine.clock.advance(0.001)
        assert engine.clock.now_seconds - started < 2.0
    assert engine.clock.now_seconds - started >= QUIET_SECONDS + ANSWER_SECONDS
    assert engine.side.matched_tokens(asked, 0) == (0, False)

    engine.side.on_new_request(two := request("b", 600))  # known to be silent: not even asked
    assert engine.side.matched_tokens(two, 0) == (0, False)
    assert len(engine.client.messages("lookup")) == 1

    (probe,) = engine.client.pendings("noop")
    probe.outcome = object()
    engine.side.on_new_request(three := request("c", 600))  # it answers again
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(three, 0) == (512, True)


def test_an_engine_that_stood_still_does_not_take_the_server_for_dead() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.clock.advance(QUIET_SECONDS)
    assert engine.side.matched_tokens(asked, 0) == (None, False)  # asks whether the server answers
    engine.clock.advance(20 * LONGEST_LOOK_SECONDS)
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    looks = 1
    while engine.side.matched_tokens(asked, 0) == (None, False):  # in long steps
        engine.clock.advance(10 * LONGEST_LOOK_SECONDS)
        looks += 1
    assert looks <= 2 * ANSWER_SECONDS / LONGEST_LOOK_SECONDS + 1
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_a_server_on_a_machine_that_stands_still_again_and_again_is_waited_for_once_more() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.clock.advance(QUIET_SECONDS)
    started = engine.clock.now_seconds
    while engine.clock.now_seconds - started < 4 * LONGEST_LOOK_SECONDS:  # nothing runs for most of that time
        assert engine.side.matched_tokens(asked, 0) == (None, False)
        engine.clock.advance(LONGEST_LOOK_SECONDS)
        assert engine.side.matched_tokens(asked, 0) == (None, False)
        engine.clock.advance(0.01)
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)


def test_a_slow_lookup_of_a_live_server_is_waited_for() -> None:
    engine = Engine()
    engine.client.answers["noop"] = lambda _: object()
    engine.side.on_new_request(asked := request("a", 600))
    started = engine.clock.now_seconds
    while engine.clock.now_seconds - started < 5.0:
        assert engine.side.matched_tokens(asked, 0) == (None, False)
        engine.side.step_metadata(step())
        engine.clock.advance(0.01)
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)
    assert len(engine.client.messages("noop")) <= 5.0 / QUIET_SECONDS


def test_hashes_of_a_late_answer_are_stored_by_and_its_lease_given_back() -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    while engine.side.matched_tokens(asked, 0) == (None, False):
        engine.side.step_metadata(step())
        engine.clock.advance(0.01)
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    assert engine.side.step_metadata(step(new=[("a", 0, 300)])).stores == []
    engine.settle(answer(1, 600))
    (order,) = engine.side.step_metadata(step(running=[("a", 300, 300)])).stores
    assert len(order.hashes) == 64
    assert engine.leases_given_back() == [7]


@pytest.mark.parametrize("error", [ServerUnavailable("gone"), RemoteError("bad_request", "no")])
def test_a_failed_lookup_is_a_miss(error: Exception) -> None:
    engine = Engine()
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(error)
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.request_finished(request("a", 600), ((),))


def test_an_answer_that_does_not_add_up_is_a_miss() -> None:
    engine = Engine(ranks=2)
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600, ranks=1))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    assert engine.leases_given_back() == [7]


def test_groups_with_a_window_load_only_the_blocks_that_the_engine_keeps() -> None:
    engine = Engine(groups=(FULL, WINDOW))
    engine.side.on_new_request(asked := request("a", 1100))
    engine.settle(answer(4, 1100, groups=2))
    assert engine.side.matched_tokens(asked, 0) == (1024, True)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 9, 10, 11]), 1024)
    (load,) = engine.side.step_metadata(step()).loads
    full, window = load.groups
    assert (full.first_chunk, blocks_of(full.blocks)) == (0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (window.first_chunk, blocks_of(window.blocks)) == (2, [-1, 9, 10, 11])
    engine.side.step_ended(output(received={"a"}, failed={"a"}))
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_of_a_window_that_the_engine_found_in_its_own_cache_what_is_whole_is_stored() -> None:
    engine = Engine(groups=(FULL, WINDOW))
    engine.side.on_new_request(asked := request("a", 512))
    engine.settle(answer(0, 512, groups=2))
    engine.side.matched_tokens(asked, 256)
    engine.tables["a"] = ([1, 2, 3, 4], [0, 7, 5, 6])
    (order,) = engine.side.step_metadata(step(new=[("a", 256, 256)])).stores
    assert order.wanted == bytes([1, 1, 0, 1])
    assert [blocks_of(group) for group in order.blocks] == [[1, 2, 3, 4], [0, 7, 5, 6]]
    assert engine.pool.pinned() == {1, 2, 3, 4, 5, 6, 7}


def test_chunks_without_the_blocks_that_every_hit_needs_are_not_stored() -> None:
    engine = Engine(groups=(FULL, WINDOW))
    engine.side.on_new_request(asked := request("a", 512))
    engine.settle(answer(0, 512, groups=2))
    engine.side.matched_tokens(asked, 256)
    engine.tables["a"] = ([0, 2, 3, 4], [1, 7, 5, 6])
    assert engine.side.step_metadata(step(new=[("a", 256, 256)])).stores == []
    assert engine.pool.pinned() == set()


@pytest.mark.parametrize("group", [WINDOW, STATE])
def test_a_hit_of_the_whole_prompt_is_not_taken_where_its_last_token_needs_what_is_before_the_end(group) -> None:
    engine = Engine(groups=(FULL, group))
    engine.side.on_new_request(asked := request("a", 1024))
    engine.settle(answer(4, 1024, groups=2))
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_a_state_is_stored_where_the_engine_keeps_one_and_nowhere_else() -> None:
    engine = Engine(groups=(FULL, STATE))
    engine.side.on_new_request(asked := request("a", 1100))
    engine.settle(answer(0, 1100, groups=2))
    engine.side.matched_tokens(asked, 0)
    # The table of a state group is not to be trusted: block 9 may hold a state in the middle of its tokens.
    engine.tables["a"] = ([1, 2, 3, 4, 5, 6, 7, 8, 10], [0, 0, 0, 9, 0, 11])
    states = {"a": [(1, 11, 768), (1, 12, 700)], "b": [(1, 13, 512)]}
    (order,) = engine.side.step_metadata(step(new=[("a", 0, 768)], states=states)).stores
    assert [blocks_of(group) for group in order.blocks] == [[1, 2, 3, 4, 5, 6], [0, 0, 11]]
    assert order.wanted == bytes([1, 1, 1, 0, 0, 1])
    assert engine.pool.pinned() == {1, 2, 3, 4, 5, 6, 11}


def test_of_a_state_only_the_one_at_the_end_of_the_hit_is_loaded() -> None:
    engine = Engine(groups=(FULL, STATE))
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600, groups=2))
    assert engine.side.matched_tokens(asked, 128) == (384, True)
    engine.side.after_allocation(asked, ([1, 2, 3, 4], [0, 0, 0, 9]), 384)
    (load,) = engine.side.step_metadata(step()).loads
    assert [(group.first_chunk, blocks_of(group.blocks)) for group in load.groups] == [(0, [-1, 2, 3, 4]), (1, [9])]
    assert load.server_epoch == hello().server_epoch


@pytest.mark.parametrize(
    ("groups", "all_or_nothing"),
    [((FULL,), False), ((WINDOW,), True), ((STATE,), True), ((FULL, FULL), True), ((FULL, WINDOW), True)],
)
def test_only_one_group_of_every_block_is_of_use_in_part(groups: Any, all_or_nothing: bool) -> None:
    engine = Engine(groups=groups)
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600, groups=len(groups)))
    assert engine.side.matched_tokens(asked, 0) == (512, True)
    engine.side.after_allocation(asked, tuple([1, 2, 3, 4] for _ in groups), 512)
    (load,) = engine.side.step_metadata(step()).loads
    assert load.all_or_nothing is all_or_nothing


def test_without_a_block_for_the_state_attention_is_not_loaded_either() -> None:
    engine = Engine(groups=(FULL, STATE))
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(2, 600, groups=2))
    assert engine.side.matched_tokens(asked, 0) == (512, True)
    engine.side.after_allocation(asked, ([1, 2, 3, 4], [0, 0, 0, 0]), 512)
    metadata = engine.side.step_metadata(step())
    assert not metadata.loads
    (load,) = metadata.impossible_loads  # all workers report that it failed
    assert load.request_id == "a"
