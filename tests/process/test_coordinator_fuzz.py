"""Requests made from the OpenAPI document of a coordinator with a server and objects: none is answered with 500 or with
what the document does not say, and none ends the coordinator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from lmcache.testing.processes import LOOPBACK, CacheServer, CoordinatorProcess
from polling import until
from process.support import SmallEngine
from process.test_http_fuzz import ANSWER_SECONDS, CHECKS, each
from seeds import SEED

EXAMPLES = int(os.environ.get("TEST_HTTP_EXAMPLES", "3"))  # an operation
NO_SERVER = "nothing answers at http"
REAL_SERVER = f"http://{LOOPBACK}:"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    folder = tmp_path_factory.mktemp("fuzz")
    extra = ["--checkpoint-path", str(folder / "directory"), "--checkpoint-interval", "0.5"]
    with CoordinatorProcess(folder, extra=[*extra, "--metadata-path", str(folder / "decisions")]) as coordinator:
        coordinator.wait_ready()
        options = [*coordinator.member_options, "--instance-id", "a"]
        with CacheServer(folder, l1_size_gb=0.0625, extra=options) as server:
            server.wait_ready()
            with SmallEngine(server.port) as engine:
                engine.store(engine.tokens(*range(50)))
                until(lambda: coordinator.answer("GET", "/directory/stats")["placements"] >= 50)
                yield coordinator
        assert coordinator.stop() == 0


def test_requests_from_the_openapi_document(coordinator: CoordinatorProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{coordinator.url}/openapi.json")
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 35

    def ask(case: schemathesis.Case[Any]) -> None:
        answer = case.call(base_url=coordinator.url, timeout=ANSWER_SECONDS)
        # A server that an earlier request registered at a made-up address may be what is asked.
        made_up = answer.status_code == 503 and NO_SERVER in answer.text and REAL_SERVER not in answer.text
        case.validate_response(answer, checks=CHECKS, excluded_checks=[not_a_server_error] if made_up else [])

    for operation in operations:
        wrong = operation.as_strategy(generation_mode=GenerationMode("negative"))
        each(st.one_of(operation.as_strategy(), wrong), ask, EXAMPLES, SEED)
    assert coordinator.answer("GET", "/healthz") == {"status": "healthy"}
    lines = coordinator.log().splitlines()
    assert not [line for line in lines if "Traceback" in line or " ERROR" in line], coordinator.log()
