"""What other connectors of the same engine load, in a MultiConnector."""

from __future__ import annotations

import pytest

from unit.integration.vllm.fakes import answer, request, step
from unit.integration.vllm.test_scheduler_side import Engine, blocks_of


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
