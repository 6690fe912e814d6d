"""Real vLLM on a GPU: the same tokens cold, from L1 in the same engine, and after its restart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import make_llama, sample_tokens

TOKENS = 2000


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_a_hit_gives_the_same_tokens(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    prompt = sample_tokens(TOKENS, seed=1)
    extra = ("--gpu-memory-utilization", "0.3")
    with CacheServer(tmp_path, l1_size_gb=2) as server:
        server.wait_ready()
        with VllmEngine(tmp_path / "model", tmp_path, cache_port=server.port, extra=extra) as engine:
            engine.wait_ready(600.0)
            cold = engine.complete(prompt)
            warm = engine.complete(prompt)
        with VllmEngine(tmp_path / "model", tmp_path, cache_port=server.port, extra=extra) as engine:
            engine.wait_ready(600.0)
            restarted = engine.complete(prompt)
    assert cold.cached_tokens == 0
    assert min(warm.cached_tokens, restarted.cached_tokens) >= TOKENS - 512
    assert cold.token_ids == warm.token_ids == restarted.token_ids
