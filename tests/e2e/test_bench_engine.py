"""`lmcache bench engine` on a real vLLM: what comes again is loaded from the cache server, and the bench says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack
from lmcache.cli.main import main

pytestmark = pytest.mark.engine


def test_questions_about_documents(
    llama: Path, start_stack: Callable[..., Stack], capsys: pytest.CaptureFixture[str]
) -> None:
    stack = start_stack(llama, l2=False)
    url = f"http://127.0.0.1:{stack.engine.port}"
    words = ["bench", "engine", "--url", url, "--token-ids", "8000", "--ignore-eos", "--format", "json"]
    words += ["--requests", "9", "--prefixes", "3", "--prompt-tokens", "1024", "--question-tokens", "16"]
    assert main([*words, "--output-tokens", "8", "--concurrency", "2"]) == 0
    result = json.loads(capsys.readouterr().out)["metrics"]
    figures = result["figures"]
    assert result["settings"]["model"] == str(llama)
    assert (figures["completed"], figures["output_tokens"], figures["prompt_tokens"]) == (9, 9 * 8, 9 * 1040)
    assert figures["labels"]["first question"]["cached_tokens"] == 0
    assert figures["labels"]["later question"]["cached_tokens"] == 6 * 1024
    for key in ("ttft_ms", "itl_ms", "tpot_ms", "total_ms"):
        assert 0 < figures[key]["p50"] <= figures[key]["max"]
    assert main(["describe", "engine", "--url", url, "--format", "json"]) == 0
    engine = json.loads(capsys.readouterr().out)["metrics"]
    assert (engine["health"], engine["models"][0]["id"]) == ("OK", str(llama)) and engine["version"]
    assert engine["num_requests_running"] == 0
    assert engine["external_prefix_cache_hits"] == 6 * 1024 < engine["external_prefix_cache_queries"]
    stack.wait_clean()
