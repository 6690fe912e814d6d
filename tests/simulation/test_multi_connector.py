"""The connector in vLLM's MultiConnector, with the settings that the guide gives that one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from simulation.engine import Shape
from simulation.logged_errors import LoggedErrors
from simulation.test_connector import DECODED, RECOMPUTES, Run
from simulation.test_partial_chunks import CHUNK, CHUNK_BLOCKS, HandedOver

pytestmark = pytest.mark.engine


def of_the_guide() -> dict[str, Any]:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "separate_prefill_and_decode.md").read_text()
    settings = json.loads(guide.split("```json\n")[1].split("```")[0])
    return {
        name: value for name, value in settings.items() if name not in ("kv_connector", "kv_connector_extra_config")
    }


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Of the connector."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("lmcache.vllm")
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


def test_a_chunk_that_is_damaged_is_computed(model_folder: Path, errors: LoggedErrors, warnings: list[str]) -> None:
    run = HandedOver(Shape(multi=of_the_guide()), model_folder)
    try:
        text = run.fresh(3 * CHUNK)
        run.ask(text)
        assert run.ask(text) == 3 * CHUNK_BLOCKS
        assert run.network.server is not None
        for _ in range(40):
            run.network.server.spoil()
        run.engine.scheduler.reset_prefix_cache()
        request = run.engine.add("last", text, 1, None, None, None)
        while run.engine.live or run.engine.in_flight:
            run.step()
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        run.world.sleep(10.0)
        assert run.ask(text) == 3 * CHUNK_BLOCKS, "and stored anew"
        run.settle()
    finally:
        run.close()
    assert not errors.faults, errors.faults[0]
    assert not any("kv_load_failure_policy" in line for line in warnings)


def test_an_engine_whose_failed_loads_fail_requests_is_warned(model_folder: Path, warnings: list[str]) -> None:
    run = HandedOver(Shape(ranks=2, multi={}), model_folder)
    run.close()
    (line,) = [line for line in warnings if "kv_load_failure_policy" in line]
    assert line.startswith("kv_load_failure_policy of SimulatedMultiConnector is 'fail': ")


@pytest.mark.parametrize("seed", [1, 2])
def test_an_abort_while_another_connector_loads_stores_nothing_of_it(
    seed: int, model_folder: Path, errors: LoggedErrors
) -> None:
    """Its blocks are not written yet, while the engine counts their tokens as computed."""
    shape = Shape(multi=RECOMPUTES, beside="before", blocks=80, extra=DECODED)
    run = Run(seed, shape, model_folder)
    run.odds.aborts = 30.0
    for fault in ("kills", "drops", "pauses", "freezes", "updates", "spoils", "clears"):
        setattr(run.odds, fault, 0.0)
    try:
        run.go()
    finally:
        run.close()
    assert not errors.faults, errors.faults[0]
