"""What other connectors of the same engine load, in a MultiConnector."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.integration.vllm.handover import HANDOVER_SECONDS, SOURCE_KEY
from unit.integration.vllm.fakes import answer, request, step
from unit.integration.vllm.test_handover import TOLD, named
from unit.integration.vllm.test_scheduler_side import Engine, blocks_of

OF_NIXL = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3, 4, 5]],
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
}


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_what_another_connector_loads_within_a_step_is_not_stored(is_asynchronous: bool) -> None:
    """Its blocks would be copied before the engine is told that the load has failed."""
    engine = Engine()
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    if is_asynchronous:
        engine.side.step_metadata(step())
        engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    stores = engine.side.step_metadata(step(new=[("a", 512, 88)])).stores
    assert [blocks_of(order.blocks[0]) for order in stores] == ([[1, 2, 3, 4]] if is_asynchronous else [])
    assert engine.side.step_metadata(step(running=[("a", 600, 1)])).stores == []


def test_what_the_engine_itself_had_is_stored() -> None:
    engine = Engine()
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 512) == (0, False)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    (order,) = engine.side.step_metadata(step(new=[("a", 512, 88)])).stores
    assert blocks_of(order.blocks[0]) == [1, 2, 3, 4]


def told() -> dict[str, Any]:
    return {SOURCE_KEY: TOLD, **OF_NIXL}


def beside_nixl() -> Engine:
    """NIXL has fetched a prompt, by which it is known to be there: that first one was looked up, too."""
    engine = Engine()
    engine.side.on_new_request(first := request("first", 600, kv_transfer_params=(params := told())))
    assert engine.client.messages("lookup")
    params["do_remote_prefill"] = False  # as NixlConnector does
    engine.side.after_allocation(first, ([6, 7, 8, 9, 10],), 0)
    engine.side.request_finished(first, ([6, 7, 8, 9, 10],))
    engine.client.sent.clear()
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    return engine


def test_what_nixl_fetches_is_not_looked_up_and_stored_when_it_has_come() -> None:
    engine = beside_nixl()
    engine.side.on_new_request(asked := request("a", 600, kv_transfer_params=(params := told())))
    assert engine.side.matched_tokens(asked, 0) == (0, False), "NIXL begins at once"
    assert [method for method, _, _ in engine.client.sent] == ["append"]
    params["do_remote_prefill"] = False
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    engine.side.step_metadata(step())
    engine.client.pendings("append")[0].outcome = named(2)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    (order,) = engine.side.step_metadata(step(new=[("a", 599, 1)])).stores
    assert blocks_of(order.blocks[0]) == [1, 2, 3, 4]
    assert not engine.client.messages("lookup")


def test_what_nixl_could_not_fetch_is_looked_up_and_waited_for() -> None:
    engine = beside_nixl()
    engine.clock.advance(1.0)
    engine.side.on_new_request(asked := request("a", 600, kv_transfer_params=(params := told())))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    params["do_remote_prefill"] = False
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    engine.side.step_metadata(step())
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    (lookup,) = engine.client.messages("lookup")
    assert lookup.source is not None and lookup.source.wait_seconds == HANDOVER_SECONDS
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(asked, 0) == (512, True)


def test_a_decode_engine_without_nixl_looks_up_what_a_prefill_engine_with_it_hands_over() -> None:
    """Whatever the router or a client says."""
    engine = Engine()
    for name in "ab":
        engine.side.on_new_request(asked := request(name, 600, kv_transfer_params=told()))
        assert len(engine.client.messages("lookup")) == 1
        engine.settle(answer(0, 600))
        assert engine.side.matched_tokens(asked, 0) == (0, False)
        engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
        engine.side.request_finished(asked, ([1, 2, 3, 4, 5],))
        engine.client.sent.clear()


@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_engine_id"])
def test_a_word_without_blocks_changes_nothing(missing: str) -> None:
    engine = beside_nixl()
    engine.side.on_new_request(request("a", 600, kv_transfer_params={**told(), missing: None}))
    assert engine.client.messages("lookup")


def test_an_abort_while_another_connector_loads_stores_nothing() -> None:
    """The engine counts tokens as computed from the beginning of the load on."""
    engine = Engine(save_decode=True)
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    engine.side.on_new_request(asked := request("a", 600))
    engine.settle(answer(0, 600))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.after_allocation(asked, ([1, 2, 3, 4, 5],), 0)
    asked.num_computed_tokens = 600
    asked.all_token_ids = asked.prompt_token_ids
    engine.side.step_metadata(step())
    engine.side.request_finished(asked, ([1, 2, 3, 4, 5],))
    assert engine.side.step_metadata(step()).stores == []
