"""A request waits for what another one computes only while that is going to be stored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.engine.request_state import InvalidTransition, RequestState
from lmcache.integration.vllm.hit_lookups import HitLookups
from unit.integration.vllm.fakes import answer, request, step
from unit.integration.vllm.test_scheduler_side import Engine

TABLE = ([1, 2, 3, 4, 5],)
WAITS, COMPUTES = (None, False), (0, False)


def ask(engine: Engine, asked: Any) -> tuple[int | None, bool]:
    """Whether it waits, once the server has answered that nothing is stored."""
    engine.side.on_new_request(asked)
    engine.side.matched_tokens(asked, 0)
    if engine.client.pendings("lookup")[-1].outcome is None:
        engine.settle(answer(0, 600))
    matched: tuple[int | None, bool] = engine.side.matched_tokens(asked, 0)
    return matched


def begin(engine: Engine, asked: Any) -> None:
    """The engine computes it from its first token, once more after a preemption."""
    assert ask(engine, asked) == COMPUTES
    engine.tables[asked.request_id] = TABLE
    engine.side.after_allocation(asked, TABLE, 0)


def test_a_request_waits_for_what_another_computes_and_stores() -> None:
    engine = Engine()
    begin(engine, request("a", 600))
    assert ask(engine, request("b", 600)) == WAITS


def test_nobody_waits_for_a_request_whose_store_failed() -> None:
    engine = Engine()
    begin(engine, asked := request("a", 600))
    del engine.tables["a"]
    assert engine.side.step_metadata(step(new=[("a", 0, 600)])).stores == []
    begin(engine, asked)
    assert ask(engine, request("b", 600)) == COMPUTES


def test_nobody_waits_for_a_request_that_lacks_what_drafts() -> None:
    engine = Engine(lookahead_tokens=1, longest_drafted_tokens=100)
    begin(engine, asked := request("a", 601))
    assert engine.side.step_metadata(step(new=[("a", 0, 600)])).stores == []
    begin(engine, asked)
    assert ask(engine, request("b", 601)) == COMPUTES


def test_nobody_waits_for_a_request_that_a_fault_made_uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise InvalidTransition("a", RequestState.IDLE, RequestState.LATE)

    engine = Engine()
    begin(engine, asked := request("a", 600))
    with monkeypatch.context() as patch:
        patch.setattr(HitLookups, "matched_tokens", refuse)
        assert engine.side.matched_tokens(asked, 0) == COMPUTES
    engine.side.after_allocation(asked, TABLE, 0)
    assert ask(engine, request("b", 600)) == COMPUTES


@pytest.mark.parametrize("computed_tokens", [0, 300])
def test_nobody_waits_for_a_request_whose_adapter_was_replaced(tmp_path: Path, computed_tokens: int) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    lora = SimpleNamespace(lora_name="style", lora_path=str(tmp_path), lora_int_id=1, load_inplace=False)
    engine = Engine()
    asked, other = (request(name, 600, lora_request=lora) for name in "ab")
    engine.side.on_new_request(other)
    engine.settle(answer(0, 600))
    if computed_tokens:
        begin(engine, asked)
        weights.write_bytes(b"another")
        assert engine.side.step_metadata(step(new=[("a", 0, computed_tokens)])).stores == []
    else:
        engine.side.on_new_request(asked)
        weights.write_bytes(b"another")
        begin(engine, asked)
    assert engine.side.matched_tokens(other, 0) == COMPUTES
