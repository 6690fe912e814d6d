"""The states of a request: what the table allows happens, everything else is refused and costs the request its hits."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lmcache.errors import RemoteError
from lmcache.integration.engine.request_state import (
    TRANSITIONS,
    InvalidTransition,
    RequestState,
    RequestStateMachine,
)
from unit.integration.vllm.fakes import answer, output, request, step
from unit.integration.vllm.test_scheduler_side import Engine


def machine(state: RequestState) -> RequestStateMachine:
    progress = RequestStateMachine("a")
    progress.state = state
    return progress


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("wanted", RequestState)
def test_only_transitions_of_the_table_happen(state: RequestState, wanted: RequestState) -> None:
    progress = machine(state)
    if wanted in TRANSITIONS[state]:
        progress.move(wanted)
        assert progress.state is wanted
        return
    with pytest.raises(InvalidTransition, match=f"request a cannot go from {state.value} to {wanted.value}"):
        progress.move(wanted)
    assert progress.state is state


def test_every_state_can_be_reached_and_leads_to_the_end() -> None:
    reached = {RequestState.IDLE}
    while more := {wanted for state in reached for wanted in TRANSITIONS[state]} - reached:
        reached |= more
    assert reached == set(RequestState)
    for state in RequestState:
        onward = {state}
        while more := {wanted for origin in onward for wanted in TRANSITIONS[origin]} - onward:
            onward |= more
        assert RequestState.ENDED in onward


@pytest.mark.parametrize("state", RequestState)
def test_after_a_fault_no_hit_is_used_but_a_load_still_ends(state: RequestState) -> None:
    progress = machine(state)
    progress.recompute()
    if state in (RequestState.LOADING, RequestState.ENDING, RequestState.ENDED):
        assert progress.state is state
    else:
        assert progress.state is RequestState.RECOMPUTING


def test_a_refused_transition_is_logged_and_the_request_goes_uncached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    engine.side.on_new_request(first := request("a", 600))
    engine.side.requests["a"].state = RequestState.LOOKING_UP
    engine.side.requests["a"].session.lookup.outcome = answer(2, 600)
    engine.side.requests["a"].move = refuse
    assert engine.side.matched_tokens(first, 0) == (0, False)
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said.exc_info
    assert engine.side.matched_tokens(first, 0) == (0, False)
    engine.tables["a"] = ([1, 2, 3, 4, 5],)
    assert engine.side.step_metadata(step(new=[("a", 0, 600)])).stores == []
    del engine.side.requests["a"].move
    engine.side.request_finished(first, ((),))
    engine.side.check_idle()


def refuse(wanted: RequestState) -> None:
    raise InvalidTransition("a", RequestState.LOOKING_UP, wanted)


@pytest.mark.parametrize("state", [state for state in RequestState if state is not RequestState.ENDED])
def test_an_abort_in_each_state_leaves_nothing_behind(state: RequestState, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.side.on_new_request(first := request("a", 600))
    bring_to(engine, first, state)
    assert engine.side.requests["a"].state is state
    engine.side.request_finished(first, ((),))
    engine.side.step_ended(output(received={"a"}))
    engine.side.check_idle()
    assert [message.request_id for message in engine.client.messages("end_session")] == ["a"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def bring_to(engine: Engine, first: Any, state: RequestState) -> None:
    if state is RequestState.LOOKING_UP:
        return
    if state is RequestState.LATE:
        engine.side.after_allocation(first, ([1, 2, 3, 4, 5],), 0)
        return
    if state is RequestState.RECOMPUTING:
        engine.settle(RemoteError("busy", "no"))
        assert engine.side.matched_tokens(first, 0) == (0, False)
        return
    engine.settle(answer(2, 600))
    assert engine.side.matched_tokens(first, 0) == (512, True)
    if state is RequestState.IDLE:
        engine.side.after_allocation(first, ([1, 2, 3, 4, 5],), 0)
    elif state in (RequestState.LOADING, RequestState.ENDING):
        engine.side.after_allocation(first, ([1, 2, 3, 4, 5],), 512)
        engine.side.step_metadata(step())
    if state is RequestState.ENDING:
        engine.side.request_finished(first, ((),))
