"""Tokens that were computed without drafting are not stored: what drafts has no KV of them."""

from __future__ import annotations

from typing import Any

from lmcache.integration.vllm.undrafted_blocks import UndraftedBlocks
from unit.integration.vllm.fakes import answer, request, step
from unit.integration.vllm.test_scheduler_side import FULL, Engine, blocks_of

LONGEST = 1000


def table(*ids: int) -> Any:
    return lambda request_id: (list(ids),)


def test_blocks_of_a_step_with_a_sequence_that_is_too_long_are_noted_until_they_are_written_anew() -> None:
    blocks = UndraftedBlocks((FULL,), LONGEST)
    blocks.note_step([("a", 0, 1000)], table(*range(1, 9)))
    assert not blocks.among(([*range(1, 9)],), 0, 1000)
    blocks.note_step([("a", 200, 300), ("b", 990, 1001)], lambda name: ([1, 2, 3],) if name == "a" else ([9] * 8,))
    assert [blocks.among(([1, 2, 3, 4],), at, at + 128) for at in range(0, 512, 128)] == [False, True, True, False]
    blocks.note_step([("c", 300, 400)], table(1, 2, 3, 4))  # from within a block on
    assert blocks.among(([3],), 0, 1)
    blocks.note_step([("d", 128, 256)], table(5, 3))
    assert not blocks.among(([3],), 0, 1)
    assert blocks.among(([2],), 0, 1)
    blocks.written([2])
    assert not blocks.among(([2],), 0, 1)


def test_where_drafting_is_never_left_out_nothing_is_noted() -> None:
    blocks = UndraftedBlocks((FULL,), None)
    blocks.note_step([("a", 0, 100_000)], table(*range(1, 900)))
    assert not blocks.among(([1],), 0, 1)


def test_a_chunk_that_lacks_kv_is_not_stored_nor_what_is_behind_it() -> None:
    engine = Engine(lookahead_tokens=1, longest_drafted_tokens=LONGEST)
    engine.tables |= {"a": (list(range(1, 9)),), "long": (list(range(10, 20)),)}
    engine.side.on_new_request(asked := request("a", 1000))
    engine.settle(answer(0, 999))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.after_allocation(asked, engine.tables["a"], 0)
    (order,) = engine.side.step_metadata(step(new=[("a", 0, 300)])).stores
    assert blocks_of(order.blocks[0]) == [1, 2]
    assert engine.side.step_metadata(step(running=[("a", 300, 100), ("long", 999, 2)])).stores == []
    assert engine.side.step_metadata(step(running=[("a", 400, 400)])).stores == []
    assert engine.side.step_metadata(step(running=[("a", 800, 200)])).stores == []


def test_a_tail_that_lacks_kv_is_not_kept() -> None:
    for sequence, pinned in ((1000, {3, 4}), (1001, set())):
        engine = Engine(lookahead_tokens=1, longest_drafted_tokens=LONGEST, save_decode=True)
        engine.tables |= {"a": (list(range(1, 9)),), "long": (list(range(10, 20)),)}
        engine.side.on_new_request(asked := request("a", 300, all_token_ids=list(range(514))))
        engine.settle(answer(1, 299))
        assert engine.side.matched_tokens(asked, 256) == (0, False)
        engine.side.after_allocation(asked, engine.tables["a"], 0)
        engine.side.step_metadata(step(running=[("a", 256, 200), ("long", sequence - 1, 1)]))
        engine.side.step_metadata(step(running=[("a", 456, 57)]))
        asked.num_tokens, asked.num_computed_tokens = 514, 513
        engine.side.request_finished(asked, engine.tables["a"])
        assert engine.pool.pinned() == pinned
