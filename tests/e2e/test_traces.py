"""Spans of the server and of vLLM are parts of the trace that the request came with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.harness import until
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import sample_tokens

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from support.otlp_receiver import a_receiver

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENVIRONMENT = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"}


def ask(engine: VllmEngine, flags: str) -> None:
    """A completion within a trace."""
    body = json.dumps({"model": engine.model, "prompt": sample_tokens(600, seed=1), "max_tokens": 2})
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}
    with engine.connection(engine.port, 300.0) as connection:
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()


def test_a_request_is_one_trace_from_its_client_to_the_tiers(llama: Path, tmp_path: Path) -> None:
    with a_receiver() as receiver:
        traced = ("--otlp-endpoint", receiver.endpoint, "--enable-tracing")
        with CacheServer(tmp_path, l1_size_gb=0.25, extra=traced) as server:
            server.wait_ready()
            flags = ("--otlp-traces-endpoint", receiver.endpoint)
            with VllmEngine(llama, tmp_path, cache_port=server.port, extra=flags, environment=ENVIRONMENT) as engine:
                engine.wait_ready()
                ask(engine, "01")
                until(lambda: receiver.named("request"), tell=server.log)
                until(lambda: receiver.named("llm_request"), tell=engine.log)
    ours, theirs = receiver.named("request"), receiver.named("llm_request")
    assert {span.trace_id.hex() for span in [*ours, *theirs]} == {TRACE_ID}
    assert {span.parent_span_id.hex() for span in ours} == {PARENT_ID}
    (request,) = ours
    below = {span.name for span in receiver.spans if span.parent_span_id == request.span_id}
    assert {"mp.lookup_prefetch", "mp.store"} <= below
