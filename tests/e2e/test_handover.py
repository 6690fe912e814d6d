"""Prefill and decode apart: one engine computes prompts, another one goes on with them, at one server. The test plays
the router: it asks the one for a token, and gives its `kv_transfer_params` to the other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from lmcache.integration.vllm.handover import SOURCE_KEY
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import sample_tokens
from support.router_requests import FOR_PREFILL

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_TOKENS = 32


def prefill(engine: VllmEngine, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": engine.model,
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": FOR_PREFILL,
    }
    status, answer = engine.ask(engine.port, "POST", "/v1/completions", body, 300.0)
    assert status == 200, answer
    told = answer["kv_transfer_params"]
    assert isinstance(told, dict)
    return told


def test_what_one_engine_computed_another_one_goes_on_with(llama: Path, tmp_path: Path) -> None:
    """Prompts of one step and of several. Of a prefill engine that dies nothing worse comes than a recompute."""

    def engine(role: str) -> VllmEngine:
        # Exact whatever the size of a step, as it decides how sums are rounded.
        flags = ("--dtype", "float32", "--block-size", str(BLOCK_TOKENS))
        return VllmEngine(llama, tmp_path, cache_port=server.port, role=role, extra=flags, log_name=f"{role}.log")

    with CacheServer(tmp_path, l1_size_gb=0.5) as server:
        server.wait_ready()
        with engine("kv_producer") as first, engine("kv_consumer") as second:
            first.wait_ready()
            second.wait_ready()
            until(lambda: len(server.status()["instances"]) == 2, tell=server.status)
            for seed, tokens in enumerate((300, 1100, 5000)):
                prompt = sample_tokens(tokens, seed=seed)
                told = prefill(first, prompt)
                assert told[SOURCE_KEY]["tokens"] == tokens // BLOCK_TOKENS * BLOCK_TOKENS
                warm = second.complete(prompt, kv_transfer_params=told)
                assert warm.cached_tokens == tokens // BLOCK_TOKENS * BLOCK_TOKENS
                assert warm.token_ids == first.complete(prompt).token_ids  # which never loads
            prompt = sample_tokens(3000, seed=9)
            told = prefill(first, prompt)
            first.kill()
            orphan = second.complete(prompt, kv_transfer_params=told)
            server.clear("l1")
            assert orphan.token_ids == second.complete(prompt, kv_transfer_params=told).token_ids
            assert second.complete(prompt).cached_tokens == 0

            def clean() -> bool:
                status = server.status()
                held = [status["sessions"], status["leases"], status["reservations"]]
                return not any(held + [status["l1"][name] for name in ("leased_objects", "reservations", "staged")])

            until(clean, tell=server.status)
            assert server.metric("lmcache_mp_handover_waits_total") < 10
            assert "Traceback" not in second.log()
