"""When a load is left out because computing is faster, and how a wrong estimate is corrected."""

from __future__ import annotations

import random

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.integration.engine.latency_model import MIN_SAMPLES, PROBE_EVERY, LatencyFit, LatencyModel, StepTimer, Tier
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, answer, output, request, step


def measured(*, prefill_rate: float, latency: float, load_rate: float, tier: Tier = Tier.L2) -> LatencyModel:
    costs = LatencyModel()
    source = random.Random(1)
    for _ in range(20):
        tokens = source.choice((256, 512, 2048))
        costs.computed(tokens, tokens / prefill_rate)
        costs.loaded(tier, tokens, latency + tokens / load_rate)
    return costs


def test_without_enough_samples_everything_is_loaded() -> None:
    costs = LatencyModel()
    for _ in range(MIN_SAMPLES - 1):
        costs.computed(2048, 0.01)
        costs.loaded(Tier.L2, 256, 10.0)
        assert costs.worth_loading(Tier.L2, 256)


def test_a_short_prefix_on_a_slow_disk_is_computed_and_a_long_one_loaded() -> None:
    costs = measured(prefill_rate=5000, latency=0.5, load_rate=100_000)
    assert not costs.worth_loading(Tier.L2, 256)
    assert costs.worth_loading(Tier.L2, 8192)
    assert costs.worth_loading(Tier.L1, 256)  # tiers are distinguished


def test_small_differences_change_nothing() -> None:
    costs = measured(prefill_rate=50_000, latency=0.06, load_rate=1e6)  # ten times slower, but 60 ms
    assert costs.worth_loading(Tier.L2, 256)
    costs = measured(prefill_rate=1000, latency=0.4, load_rate=1e6)  # 0.4 s against 0.26
    assert costs.worth_loading(Tier.L2, 256)


def test_a_probe_now_and_then_finds_out_that_a_backend_became_fast() -> None:
    costs = measured(prefill_rate=5000, latency=0.5, load_rate=100_000)
    decisions = [costs.worth_loading(Tier.L2, 256) for _ in range(4 * PROBE_EVERY)]
    assert decisions.count(True) == 4
    asked = 0
    while not all(costs.worth_loading(Tier.L2, 256) for _ in range(2)):
        asked += 1
        assert asked < 30 * PROBE_EVERY
        if costs.worth_loading(Tier.L2, 256):
            costs.loaded(Tier.L2, 256, 0.005)


def test_between_the_two_ratios_the_previous_decision_stands() -> None:
    costs = measured(prefill_rate=1000, latency=0.45, load_rate=1e6)  # 1.76 times as long as computing 256
    assert costs.worth_loading(Tier.L2, 256)
    for _ in range(40):
        costs.loaded(Tier.L2, 256, 0.9)
    assert not costs.worth_loading(Tier.L2, 256)
    for _ in range(60):
        costs.loaded(Tier.L2, 256, 0.45)
    assert not costs.worth_loading(Tier.L2, 256)


def test_steps_that_mostly_decode_are_no_measure_of_prefill() -> None:
    costs = LatencyModel()
    costs.computed(2048, 0.2)
    for _ in range(100):
        costs.computed(8, 0.2)
    assert costs.compute_seconds(2048) == pytest.approx(0.2)


def test_overlapped_steps_are_timed_one_after_another() -> None:
    clock = ManualClock()
    watch = StepTimer(clock)
    watch.step_begins(2048)
    clock.advance(0.1)
    watch.step_begins(512)
    clock.advance(0.1)
    assert watch.step_ends() == (2048, pytest.approx(0.2))
    clock.advance(0.3)
    assert watch.step_ends() == (512, pytest.approx(0.3))
    assert watch.step_ends()[0] == 0


class Alone:
    """An engine that serves one request after another; 10,000 tokens a second."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock)
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            "i",
            SchedulerOptions(groups=(CacheGroup(128, ("layer0",)),), ranks=1, workers=1),
            environment=EngineEnvironment(self.clock),
        )
        self.side.bind(FakeBlockPool(100), lambda name: ([1, 2, 3, 4],))
        for _ in range(10):
            self.side.step_metadata(step(new=[("other", 0, 1000)]))
            self.clock.advance(0.1)
            self.side.step_ended(output())

    def serve(self, name: str, *, in_l1: int, answer_seconds: float = 0.0, load_seconds: float = 0.0) -> bool:
        """A request for two chunks of which L1 has some and L2 the rest; whether something was loaded."""
        self.side.on_new_request(asked := request(name, 600))
        (message,) = self.client.messages("lookup")[-1:]
        hit = in_l1 if message.recompute else 2
        reply = answer(hit, 600)
        reply.chunks_l1 = in_l1
        self.clock.advance(0.0 if message.recompute else answer_seconds)
        self.client.pendings("lookup")[-1].outcome = reply
        tokens, _ = self.side.matched_tokens(asked, 0)
        assert self.side.matched_tokens(asked, 0)[0] == tokens  # the same whenever it is asked
        self.side.after_allocation(asked, ([1, 2, 3, 4],), tokens)  # type: ignore[arg-type]
        if tokens:
            self.side.step_metadata(step())
            self.clock.advance(load_seconds)
            self.side.step_ended(output(received={name}))
        self.side.request_finished(asked, ((),))
        return bool(tokens)


def test_a_slow_l2_is_not_asked_again_for_a_short_prompt() -> None:
    engine = Alone()
    assert all(engine.serve(f"r{i}", in_l1=0, answer_seconds=0.5) for i in range(MIN_SAMPLES))
    asked = [engine.serve(f"s{i}", in_l1=0, answer_seconds=0.5) for i in range(PROBE_EVERY)]
    assert asked.count(True) == 1
    assert [message.recompute for message in engine.client.messages("lookup")].count(True) == PROBE_EVERY - 1


def test_a_load_that_would_take_longer_than_computing_is_left_out_and_said() -> None:
    engine = Alone()
    assert all(engine.serve(f"r{i}", in_l1=2, load_seconds=0.5) for i in range(MIN_SAMPLES))
    assert not engine.serve("s", in_l1=2, load_seconds=0.5)
    assert [message.recomputed for message in engine.client.messages("release")][-2:] == [False, True]


def test_beside_other_requests_everything_is_loaded() -> None:
    engine = Alone()
    assert all(engine.serve(f"r{i}", in_l1=2, load_seconds=0.5) for i in range(MIN_SAMPLES))
    engine.side.on_new_request(request("another", 600))
    assert engine.serve("s", in_l1=2, load_seconds=0.5)


def test_a_line_is_found_again() -> None:
    line = LatencyFit()
    for tokens in (256, 512, 1024, 2048, 4096) * 3:
        line.add(tokens, 0.02 + tokens / 10_000)
    assert line.seconds(8192) == pytest.approx(0.8392)
    assert line.seconds(0) == pytest.approx(0.02)


def test_a_line_never_promises_less_than_nothing() -> None:
    line = LatencyFit()
    for _ in range(3):
        line.add(100, 2.0)
        line.add(1000, 1.0)
    assert line.seconds(0) == line.seconds(10_000) > 1.0
