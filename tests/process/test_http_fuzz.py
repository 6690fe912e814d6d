"""Requests made from the OpenAPI document of a real server with objects: none crashes it, none is answered with 500 or
with what the document does not say, and nothing grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lmcache.testing.processes import CacheServer
from process.support import SmallEngine
from seeds import SEED

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = int(os.environ.get("TEST_HTTP_EXAMPLES", "15"))  # an operation
GROWTH_BYTES = 48 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    with CacheServer(folder, l1_size_gb=0.0625, l2_folder=folder / "l2") as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            engine.store(engine.tokens(*range(50)))
            yield server


def resident_bytes(pid: int) -> int:
    """Without shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def test_requests_from_the_openapi_document(server: CacheServer) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 25
    asked = 0
    before = 0
    for turn in range(2):  # what the first turn takes, caches included, is no growth
        for operation in operations:

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=False,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(
                case=st.one_of(
                    operation.as_strategy(), operation.as_strategy(generation_mode=GenerationMode("negative"))
                )
            )
            def ask(case: schemathesis.Case[Any]) -> None:
                nonlocal asked
                asked += 1
                answer = case.call(base_url=url, timeout=30)
                case.validate_response(answer, checks=CHECKS)

            ask = hypothesis.seed(SEED + turn)(ask)
            ask()
        if turn == 0:
            before = resident_bytes(server.pid)
    grown = resident_bytes(server.pid) - before
    print(f"{asked} requests; {grown / 2**20:.1f} MiB grown in the second turn")
    assert grown < GROWTH_BYTES
    assert server.ask(server.http_port, "GET", "/healthcheck") == (200, {"status": "healthy"})
    assert "Traceback" not in server.log()
