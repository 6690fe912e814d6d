"""`lmcache describe engine`: what engines tell, and what they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lmcache.cli import main as cli
from support.openai_server import MODEL, OpenAIServer, openai_server

METRICS = """
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:external_prefix_cache_queries_total{engine="0"} 1000.0
vllm:external_prefix_cache_hits_total{engine="0"} 750.0
"""


@pytest.fixture
def openai() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def test_what_vllm_tells(
    capsys: pytest.CaptureFixture[str], openai: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_ADMIN_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("OPENAI_API_KEY", "engine-key")
    openai.answers = {
        "/health": (200, ""),
        "/version": (200, {"version": "0.32.0"}),
        "/v1/models": (200, {"data": [{"id": "m", "max_model_len": 32768}]}),
        "/metrics": (200, METRICS),
    }
    assert cli.main(["describe", "engine", "--url", openai.url, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert (found["health"], found["version"]) == ("OK", "0.32.0")
    assert found["models"] == [{"id": "m", "max_model_len": 32768}]
    assert (found["num_requests_running"], found["num_requests_waiting"], found["kv_cache_usage"]) == (3, 0, 0.25)
    assert (found["external_prefix_cache_hit_ratio"], found["prefix_cache_hit_ratio"]) == (0.75, None)
    assert {proof for _, proof in openai.gets} == {"Bearer engine-key"}
    assert cli.main(["describe", "engine", "--url", openai.url]) == 0
    shown = capsys.readouterr().out
    assert "75.0% of 1,000 tokens" in shown and "m, up to 32,768 tokens" in shown


def test_engines_that_tell_less(capsys: pytest.CaptureFixture[str], openai: OpenAIServer) -> None:
    assert cli.main(["describe", "engine", "--url", openai.url]) == 0
    shown = capsys.readouterr().out
    assert MODEL in shown and "Requests running:" in shown and shown.count(" -\n") == 6
    openai.answers = {"/health": (503, "")}
    assert cli.main(["describe", "engine", "--url", openai.url, "-q"]) == 1
    openai.answers = {"/v1/models": (401, {"error": {"message": "Unauthorized: no key.", "code": 401}})}
    capsys.readouterr()
    assert cli.main(["describe", "engine", "--url", openai.url]) == 1
    assert capsys.readouterr().err == "lmcache: Unauthorized: no key.\n"
    assert cli.main(["describe", "engine", "--url", "http://127.0.0.1:1"]) == 1
    assert "is the server running there?" in capsys.readouterr().err
