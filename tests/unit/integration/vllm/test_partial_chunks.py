"""The end of a prompt that one engine computes for another, as its blocks are stored and loaded."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.client.lookup_client import APPEND_SECONDS
from lmcache.integration.engine.connector_metadata import LoadOrder, StoreOrder, WorkerReport
from lmcache.integration.vllm.block_pins import MAX_PINNED_FRACTION
from lmcache.integration.vllm.chunk_blocks import blocks_to_store, group_load
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.handover import SOURCE_KEY, source_of
from lmcache.integration.vllm.partial_chunks import has_partial_chunk, partial_unit_tokens
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.scheduler_side import SchedulerSide
from lmcache.protocol.messages import AppendReply, Empty, LookupReply
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeBlockPool, FakeClient, output, request, step

BLOCK, CHUNK = 64, 256
FULL = CacheGroup(BLOCK, ("layer0",))
COARSE = CacheGroup(2 * BLOCK, ("layer1",))
WINDOW = CacheGroup(BLOCK, ("layer1",), tail_tokens=511)
PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
DECODE: dict[str, Any] = {SOURCE_KEY: {"instance": "p", "p2p": "", "epoch": "00" * 16, "tokens": 704}}
PROMPT = 2 * CHUNK + 3 * BLOCK + 5
NAMES = [bytes([number]) * 32 for number in (1, 2, 9)]


class Engine:
    def __init__(self, groups: tuple[CacheGroup, ...] = (FULL,), blocks: int = 100, **role: Any) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock)
        self.pool = FakeBlockPool(blocks)
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            "i",
            SchedulerOptions(groups=groups, ranks=1, workers=1, load_or_recompute=False, **role),
            environment=EngineEnvironment(self.clock),
        )
        self.side.bind(self.pool, lambda name: self.tables)
        self.tables: tuple[list[int], ...] = (list(range(1, 13)), list(range(21, 27)))[: len(groups)]

    def prefill(self, prompt: Any, reply: AppendReply) -> list[StoreOrder]:
        """All of it in one step of a producer."""
        self.side.on_new_request(prompt)
        self.client.pendings("append")[-1].outcome = reply
        assert self.side.matched_tokens(prompt, 0) == (0, False)
        self.side.after_allocation(prompt, self.tables, 0)
        return self.side.step_metadata(step(new=[(prompt.request_id, 0, prompt.num_tokens)])).stores

    def load(self, prompt: Any, reply: LookupReply, computed: int = 0) -> tuple[int | None, list[LoadOrder]]:
        self.side.on_new_request(prompt)
        self.client.pendings("lookup")[-1].outcome = reply
        tokens, _ = self.side.matched_tokens(prompt, computed)
        self.side.after_allocation(prompt, self.tables, tokens or 0)
        return tokens, self.side.step_metadata(step()).loads

    def end(self, prompt: Any, orders: list[StoreOrder]) -> None:
        for order in orders:
            self.side.step_ended(output(report=WorkerReport(Counter([order.job]), {}, Counter([order.job]))))
        self.side.request_finished(prompt, self.tables)
        self.side.check_idle()
        assert not self.pool.pinned()


def named(chunks: int = 3, partial: int = 3 * BLOCK) -> AppendReply:
    return AppendReply(0, b"".join(NAMES[3 - chunks :]), partial)


def hit(chunks: int, *, chunks_l1: int = 0, groups: int = 1, partial: int = 3 * BLOCK) -> LookupReply:
    slots = array("Q", range(groups * chunks)).tobytes()
    return LookupReply(chunks, chunks_l1, 7, b"".join(NAMES[: 3 if partial else 2]), slots, partial_tokens=partial)


def blocks_of(packed: bytes) -> list[int]:
    return array("q", packed).tolist()


# ---- which requests --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("parameters", "is_named"),
    [
        (PREFILL, True),
        (DECODE, True),
        (None, False),
        ({}, False),
        ({"do_remote_decode": False, "do_remote_prefill": True}, False),
        ({"do_remote_decode": "yes"}, False),
        ({SOURCE_KEY: "somewhere"}, False),
        ([SOURCE_KEY], False),
    ],
)
def test_only_what_is_handed_over_has_one(parameters: Any, is_named: bool) -> None:
    engine = Engine()
    engine.side.on_new_request(prompt := request("a", PROMPT, kv_transfer_params=parameters))
    (lookup,) = engine.client.messages("lookup")
    assert lookup.partial_tokens == (3 * BLOCK if is_named else 0)
    session = request("a", 1, kv_transfer_params=parameters, resumable=True)
    assert not has_partial_chunk(session, source_of(session, 1.0))
    engine.end(prompt, [])


def test_a_unit_is_whole_blocks_of_all_groups_that_keep_every_block() -> None:
    assert partial_unit_tokens((FULL,)) == BLOCK
    assert partial_unit_tokens((FULL, COARSE, CacheGroup(3 * BLOCK, ()))) == 6 * BLOCK
    assert partial_unit_tokens((FULL, WINDOW)) == 0


def test_prompts_shorter_than_a_chunk_are_handed_over_in_blocks() -> None:
    engine = Engine(loads=False)
    engine.side.on_new_request(request("short", BLOCK - 1, kv_transfer_params=PREFILL))
    engine.side.on_new_request(request("plain", BLOCK + 1))
    assert engine.client.sent == []
    prompt = request("a", BLOCK + 1, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, named(1, BLOCK))
    assert (blocks_of(order.blocks[0]), order.hashes) == ([1, 1, 1, 1], NAMES[2])
    engine.end(prompt, [order])


# ---- stores ----------------------------------------------------------------------------------------------------------
def test_the_last_block_is_repeated_and_each_is_pinned_once() -> None:
    engine = Engine(loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, named())
    assert blocks_of(order.blocks[0]) == [*range(1, 9), 9, 10, 11, 11]
    assert (order.hashes, order.wanted) == (b"".join(NAMES), b"")
    assert engine.pool.pinned() == set(range(1, 12))
    assert {block.ref_cnt for block in engine.pool.blocks} == {0, 1}
    assert engine.side.step_metadata(step(running=[("a", PROMPT, 1)])).stores == []
    engine.end(prompt, [order])


def test_blocks_of_several_sizes() -> None:
    engine = Engine((FULL, COARSE), loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, named(partial=2 * BLOCK))
    assert blocks_of(order.blocks[0]) == [*range(1, 9), 9, 10, 10, 10]
    assert blocks_of(order.blocks[1]) == [21, 22, 23, 24, 25, 25]
    engine.end(prompt, [order])


def test_it_is_stored_when_all_of_it_is_computed() -> None:
    engine = Engine(loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    engine.side.on_new_request(prompt)
    engine.client.pendings("append")[0].outcome = named()
    engine.side.after_allocation(prompt, engine.tables, 0)
    last = 2 * CHUNK + 3 * BLOCK
    (full,) = engine.side.step_metadata(step(new=[("a", 0, last - 1)])).stores
    assert full.hashes == b"".join(NAMES[:2])
    (rest,) = engine.side.step_metadata(step(running=[("a", last - 1, 1)])).stores
    assert (blocks_of(rest.blocks[0]), rest.hashes) == ([9, 10, 11, 11], NAMES[2])
    engine.end(prompt, [full, rest])


@pytest.mark.parametrize(
    ("reply", "tokens"), [(named(), 2 * CHUNK + 3 * BLOCK), (AppendReply(0, NAMES[0] + NAMES[1]), 2 * CHUNK)]
)
def test_the_next_engine_is_told_of_it(reply: AppendReply, tokens: int) -> None:
    engine = Engine(loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, reply)
    engine.side.step_ended(output(report=WorkerReport(Counter([order.job]), {}, Counter([order.job]))))
    told = engine.side.request_finished(prompt, engine.tables)
    assert told is not None and told[SOURCE_KEY]["tokens"] == tokens
    engine.side.check_idle()


def test_a_server_that_names_none_gets_full_chunks() -> None:
    engine = Engine(loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, AppendReply(0, b"".join(NAMES[:2])))
    assert order.hashes == b"".join(NAMES[:2])
    engine.end(prompt, [order])


def test_a_table_that_lacks_blocks_is_not_filled_up() -> None:
    """The copy refuses it."""
    stored = blocks_to_store((FULL,), [[1, 2, 3]], 0, CHUNK, CHUNK, 0, {})
    assert stored is not None and stored.blocks[0].tolist() == [1, 2, 3]
    assert blocks_of(group_load(FULL, [1, 2, 3], 0, CHUNK, CHUNK, 0).blocks) == [1, 2, 3]


def test_blocks_of_a_full_chunk_never_have_the_name_of_the_partial_one() -> None:
    engine = Engine(blocks=14, loads=False)  # with room to pin one chunk, or the partial one
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, named())
    assert (order.hashes, blocks_of(order.blocks[0])) == (NAMES[0], [1, 2, 3, 4])


def test_without_room_to_pin_the_full_chunks_come_first() -> None:
    engine = Engine(blocks=20, loads=False)
    assert 8 <= MAX_PINNED_FRACTION * 20 < 11
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    (order,) = engine.prefill(prompt, named())
    assert order.hashes == b"".join(NAMES[:2])
    engine.side.step_ended(output(report=WorkerReport(Counter([order.job]), {}, Counter([order.job]))))
    (rest,) = engine.side.step_metadata(step(running=[("a", PROMPT, 1)])).stores
    assert rest.hashes == NAMES[2]
    engine.end(prompt, [rest])


def test_a_prompt_of_one_step_waits_for_its_names() -> None:
    """The step that computes it is the only one that can store it."""
    engine = Engine(loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    engine.side.on_new_request(prompt)
    engine.side.on_new_request(plain := request("b", PROMPT))
    assert engine.side.matched_tokens(plain, 0) == (0, False)
    assert engine.side.matched_tokens(prompt, 0) == (None, False)
    engine.client.pendings("append")[0].outcome = named()
    assert engine.side.matched_tokens(prompt, 0) == (0, False)
    engine.side.after_allocation(prompt, engine.tables, 0)
    (order,) = engine.side.step_metadata(step(new=[("a", 0, PROMPT)])).stores
    assert order.hashes == b"".join(NAMES)
    engine.side.request_finished(plain, engine.tables)
    engine.end(prompt, [order])


def test_names_that_do_not_come_cost_a_prompt_the_deadline_of_an_append() -> None:
    engine = Engine(loads=False)
    engine.client.answers["noop"] = lambda message: Empty()
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    engine.side.on_new_request(prompt)
    began = engine.clock.now_seconds
    while engine.side.matched_tokens(prompt, 0) == (None, False):
        engine.side.step_metadata(step())
    assert engine.clock.now_seconds - began == pytest.approx(APPEND_SECONDS, abs=0.01)
    engine.side.after_allocation(prompt, engine.tables, 0)
    assert engine.side.step_metadata(step(new=[("a", 0, PROMPT)])).stores == []
    engine.end(prompt, [])


def test_a_server_that_answers_nothing_costs_one_prompt_its_silence() -> None:
    engine = Engine(loads=False)
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    engine.side.on_new_request(prompt)
    began = engine.clock.now_seconds
    while engine.side.matched_tokens(prompt, 0) == (None, False):
        engine.side.step_metadata(step())
    assert engine.clock.now_seconds - began < APPEND_SECONDS
    engine.side.on_new_request(after := request("b", PROMPT, kv_transfer_params=PREFILL))
    assert engine.side.matched_tokens(after, 0) == (0, False)
    assert len(engine.client.messages("append")) == 1
    engine.side.request_finished(after, engine.tables)
    engine.end(prompt, [])


# ---- loads -----------------------------------------------------------------------------------------------------------
def test_whole_blocks_are_loaded_and_nothing_behind_them() -> None:
    engine = Engine(stores=False)
    prompt = request("a", PROMPT, kv_transfer_params=DECODE)
    tokens, (order,) = engine.load(prompt, hit(3, chunks_l1=2))
    assert tokens == 2 * CHUNK + 3 * BLOCK
    assert (order.hit_chunks, order.hashes) == (3, b"".join(NAMES))
    assert blocks_of(order.groups[0].blocks) == [*range(1, 12), -1]
    assert order.groups[0].written_blocks(2, 3) == [9, 10, 11]
    assert engine.side.tokens_not_in_l1("a") == 3 * BLOCK
    engine.side.step_ended(output(received={"a"}))
    (release,) = engine.client.messages("release")
    assert (release.lease, release.loaded_tokens) == (7, tokens)
    engine.end(prompt, [])


def test_what_the_engine_holds_itself_is_left_out() -> None:
    engine = Engine(stores=False)
    prompt = request("a", PROMPT, kv_transfer_params=DECODE)
    tokens, (order,) = engine.load(prompt, hit(3), 2 * CHUNK + BLOCK)
    assert tokens == 2 * BLOCK
    assert (order.groups[0].first_chunk, blocks_of(order.groups[0].blocks)) == (2, [-1, 10, 11, -1])
    engine.side.step_ended(output(received={"a"}))
    engine.end(prompt, [])


def test_loads_of_several_groups_end_with_blocks_of_each() -> None:
    engine = Engine((FULL, COARSE), stores=False)
    prompt = request("a", PROMPT, kv_transfer_params=DECODE)
    tokens, (order,) = engine.load(prompt, hit(3, groups=2, partial=2 * BLOCK))
    assert tokens == 2 * CHUNK + 2 * BLOCK
    assert blocks_of(order.groups[0].blocks) == [*range(1, 11), -1, -1]
    assert blocks_of(order.groups[1].blocks) == [21, 22, 23, 24, 25, -1]
    engine.side.step_ended(output(received={"a"}))
    engine.end(prompt, [])


@pytest.mark.parametrize("reply", [hit(2), hit(2, partial=0)])
def test_without_it_the_full_chunks_hit(reply: LookupReply) -> None:
    engine = Engine(stores=False)
    prompt = request("a", PROMPT, kv_transfer_params=DECODE)
    tokens, (order,) = engine.load(prompt, reply)
    assert (tokens, blocks_of(order.groups[0].blocks)) == (2 * CHUNK, list(range(1, 9)))
    engine.side.step_ended(output(received={"a"}))
    engine.end(prompt, [])


@pytest.mark.parametrize("reply", [hit(3, partial=2 * BLOCK), hit(3, partial=3 * BLOCK + 1), hit(3, partial=0)])
def test_an_answer_that_names_another_length_is_no_hit(reply: LookupReply) -> None:
    engine = Engine(stores=False)
    prompt = request("a", PROMPT, kv_transfer_params=DECODE)
    assert engine.load(prompt, reply) == (0, [])
    engine.end(prompt, [])


def test_who_loaded_it_stores_the_chunk_that_decoding_fills() -> None:
    engine = Engine(save_decode=True)
    whole = 3 * CHUNK
    prompt = request("a", PROMPT, kv_transfer_params=DECODE, all_token_ids=list(range(whole + 1)))
    engine.load(prompt, hit(3))
    engine.side.step_ended(output(received={"a"}))
    prompt.num_tokens = whole + 1
    engine.client.answers["append"] = lambda message: AppendReply(2, b"f" * 32)
    assert engine.side.step_metadata(step(running=[("a", PROMPT, whole - PROMPT)])).stores == []
    (append,) = engine.client.messages("append")
    assert append.partial_tokens == 0
    (order,) = engine.side.step_metadata(step(running=[("a", whole, 1)])).stores
    assert (order.hashes, blocks_of(order.blocks[0])) == (b"f" * 32, [9, 10, 11, 12])
    prompt.num_computed_tokens = whole
    engine.end(prompt, [order])


def test_what_did_not_verify_is_stored_anew_by_who_computes_it_for_another() -> None:
    engine = Engine()
    prompt = request("a", PROMPT, kv_transfer_params=PREFILL)
    tokens, _ = engine.load(prompt, hit(3))
    assert tokens == 2 * CHUNK + 3 * BLOCK
    report = WorkerReport(unreadable={"a": frozenset({2})})
    engine.side.step_ended(output(report=report, received={"a"}, invalid={9, 10, 11}))
    (order,) = engine.side.step_metadata(step(running=[("a", 2 * CHUNK, PROMPT - 2 * CHUNK)])).stores
    assert (order.hashes, blocks_of(order.blocks[0])) == (NAMES[2], [9, 10, 11, 11])
    engine.end(prompt, [order])
