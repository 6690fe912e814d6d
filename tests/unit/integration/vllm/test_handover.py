"""What a prefill engine tells a decode engine, and what that one makes of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.integration.engine.connector_metadata import WorkerReport
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.handover import HANDOVER_SECONDS, SOURCE_KEY, source_of
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from lmcache.protocol.messages import AppendReply, Source
from manual_clock import ManualClock
from support.router_requests import FOR_PREFILL
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, answer, hello, output, request, step

EPOCH = hello().server_epoch
TOLD = {"instance": "i", "p2p": "10.0.0.7:9500", "epoch": EPOCH.hex(), "tokens": 512}


class Engine:
    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock)
        self.pool = FakeBlockPool(100)
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            "i",
            SchedulerOptions(groups=(CacheGroup(128, ("layer0",)),), ranks=1, workers=1, **options),
            environment=EngineEnvironment(self.clock),
        )
        self.side.bind(self.pool, lambda name: (list(range(1, 21)),))

    def prefill(self, prompt: Any) -> dict[str, Any] | None:
        """All of it in one step, after which the request ends."""
        self.side.after_allocation(prompt, ([],), 0)
        self.side.step_metadata(step(new=[(prompt.request_id, 0, prompt.num_tokens)]))
        return self.side.request_finished(prompt, (list(range(1, 21)),))


def named(chunks: int) -> AppendReply:
    return AppendReply(0, b"".join(bytes([number]) * 32 for number in range(1, chunks + 1)))


def test_the_answer_of_a_prefill_engine_names_what_it_stores() -> None:
    engine = Engine(loads=False)
    assert engine.client.hello is not None
    engine.client.hello.peer_address = "10.0.0.7:9500"
    prompt = request("a", 600, kv_transfer_params=FOR_PREFILL)
    engine.side.on_new_request(prompt)
    engine.client.pendings("append")[0].outcome = named(2)
    assert engine.side.matched_tokens(prompt, 0) == (0, False)
    assert engine.prefill(prompt) == {SOURCE_KEY: TOLD}


def test_its_only_step_waits_for_the_names_of_its_chunks() -> None:
    """The server names them in a millisecond. Without, nothing of a prompt of one step would be stored."""
    engine = Engine(loads=False)
    prompt = request("a", 600, kv_transfer_params=FOR_PREFILL)
    engine.side.on_new_request(prompt)
    for _ in range(3):
        engine.side.step_metadata(step())
        assert engine.side.matched_tokens(prompt, 0) == (None, False)
    engine.client.pendings("append")[0].outcome = named(2)
    assert engine.side.matched_tokens(prompt, 0) == (0, False)
    assert engine.prefill(prompt) is not None


def test_a_step_waits_little_for_all_of_them_and_nobody_for_ever() -> None:
    engine = Engine(loads=False)
    prompts = [request(name, 600, kv_transfer_params=FOR_PREFILL) for name in "abc"]
    for prompt in prompts:
        engine.side.on_new_request(prompt)
    began = engine.clock.now_seconds
    engine.side.step_metadata(step())
    assert [engine.side.matched_tokens(prompt, 0)[0] for prompt in prompts] == [None] * 3
    assert engine.clock.now_seconds - began < 0.003
    engine.clock.advance(3.0)
    assert [engine.side.matched_tokens(prompt, 0)[0] for prompt in prompts] == [0] * 3
    assert [engine.prefill(prompt) for prompt in prompts] == [None] * 3


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}, {"do_remote_prefill": True}, "text"]
)
def test_nothing_is_told_of_other_requests(params: Any) -> None:
    engine = Engine()
    prompt = request("a", 600, kv_transfer_params=params)
    engine.side.on_new_request(prompt)
    engine.client.pendings("lookup")[0].outcome = answer(0, 600)
    assert engine.side.matched_tokens(prompt, 0) == (0, False)
    assert engine.prefill(prompt) is None


def test_an_engine_that_stores_nothing_or_has_another_server_tells_nothing() -> None:
    decode = Engine(stores=False)
    prompt = request("a", 600, kv_transfer_params=FOR_PREFILL)
    decode.side.on_new_request(prompt)
    decode.client.pendings("lookup")[0].outcome = answer(2, 600)
    assert decode.side.matched_tokens(prompt, 512) == (0, False)
    assert decode.prefill(prompt) is None
    prefill = Engine(loads=False)
    prefill.side.on_new_request(prompt)
    prefill.client.pendings("append")[0].outcome = named(2)
    prefill.side.after_allocation(prompt, ([],), 0)
    prefill.side.step_metadata(step(new=[("a", 0, 600)]))
    prefill.client.hello = hello(b"epoch-two-epoch-")
    assert prefill.side.request_finished(prompt, ([],)) is None


def test_a_decode_engine_asks_with_it_and_loads_what_it_finds() -> None:
    """Also where it would compute sooner than load: that it does not compute is what it is for."""
    engine = Engine(stores=False, handover_timeout_seconds=7.0)
    for tokens, seconds in ((100_000, 0.001), (100_000, 0.001)):
        engine.clock.advance(1.0)
        engine.side.step_metadata(step(running=[("x", 0, tokens)]))
        engine.clock.advance(seconds)
    prompt = request("a", 600, kv_transfer_params={SOURCE_KEY: TOLD, "do_remote_prefill": False})
    engine.side.on_new_request(prompt)
    (asked,) = engine.client.messages("lookup")
    assert asked.source == Source("i", "10.0.0.7:9500", EPOCH, 512, 7.0)
    assert asked.recompute is False
    engine.client.pendings("lookup")[0].outcome = answer(2, 600)
    assert engine.side.matched_tokens(prompt, 0) == (512, True)


def test_waits_for_the_other_engine_do_not_count_as_the_speed_of_l2() -> None:
    """Or ordinary requests would compute what L2 has."""
    engine = Engine(stores=False)
    for second in range(8):  # 1,000 tokens a second
        engine.side.step_metadata(step(running=[("x", second * 1000, 1000)]))
        engine.clock.advance(1.0)
        engine.side.step_ended(output())
    for number in range(8):
        prompt = request(f"r{number}", 600, kv_transfer_params={SOURCE_KEY: TOLD})
        engine.side.on_new_request(prompt)
        engine.clock.advance(8.0)
        engine.client.pendings("lookup")[-1].outcome = from_l2 = answer(2, 600)
        from_l2.chunks_l1 = 0
        assert engine.side.matched_tokens(prompt, 0) == (512, True)
        engine.side.request_finished(prompt, ([],))
    engine.side.on_new_request(request("ordinary", 600))
    assert engine.client.messages("lookup")[-1].recompute is False


def test_after_a_preemption_it_waits_no_more() -> None:
    engine = Engine(stores=False)
    prompt = request("a", 600, kv_transfer_params={SOURCE_KEY: TOLD})
    engine.side.on_new_request(prompt)
    engine.client.pendings("lookup")[0].outcome = answer(0, 600)
    assert engine.side.matched_tokens(prompt, 0) == (0, False)
    engine.side.after_allocation(prompt, ([],), 0)
    engine.side.matched_tokens(prompt, 0)
    waits = [asked.source.wait_seconds for asked in engine.client.messages("lookup")]
    assert waits == [HANDOVER_SECONDS, 0.0]


def test_one_that_asks_again_when_another_request_has_stored_its_prefix_waits_no_more() -> None:
    engine = Engine()
    engine.side.on_new_request(first := request("a", 600))
    engine.client.pendings("lookup")[0].outcome = answer(0, 600)
    assert engine.side.matched_tokens(first, 0) == (0, False)
    engine.side.after_allocation(first, (list(range(1, 21)),), 0)
    engine.side.on_new_request(second := request("b", 600, kv_transfer_params={SOURCE_KEY: TOLD}))
    engine.client.pendings("lookup")[1].outcome = answer(0, 600)
    assert engine.side.matched_tokens(second, 0) == (None, False)
    (order,) = engine.side.step_metadata(step(new=[("a", 0, 600)])).stores
    engine.clock.advance(0.1)
    engine.side.step_ended(output(report=WorkerReport(settled_stores=Counter([order.job]))))
    engine.side.matched_tokens(second, 0)
    waits = [asked.source.wait_seconds for asked in engine.client.messages("lookup")[1:]]
    assert waits == [HANDOVER_SECONDS, 0.0]


@pytest.mark.parametrize(
    "told",
    [
        *("text", 7, [], {}),
        {**TOLD, "instance": 7},
        {**TOLD, "instance": "x" * 513},
        {**TOLD, "instance": "\ud800"},
        {**TOLD, "p2p": None},
        {**TOLD, "epoch": "no hex"},
        {**TOLD, "epoch": "00" * 17},
        {**TOLD, "tokens": "512"},
        {**TOLD, "tokens": True},
        {**TOLD, "tokens": -1},
        {**TOLD, "tokens": 1 << 40},
    ],
)
def test_what_no_engine_tells_is_left_out(told: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompt = request("a", 600, kv_transfer_params={SOURCE_KEY: told})
    assert source_of(prompt, 1.0) is None
    assert "is not what an engine tells" in caplog.text


def test_requests_without_it_have_no_source() -> None:
    for params in (None, {}, "text", {SOURCE_KEY: None}):
        assert source_of(SimpleNamespace(request_id="a", kv_transfer_params=params), 1.0) is None
    assert source_of(SimpleNamespace(request_id="a"), 1.0) is None
