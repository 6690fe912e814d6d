"""A prompt that a real engine computes for another one: it is stored, and loaded, to its last whole block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from lmcache.integration.vllm.handover import SOURCE_KEY
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE: dict[str, Any] = {SOURCE_KEY: {"instance": "", "p2p": "", "epoch": "00" * 16, "tokens": 1 << 20}}
# By prompt: blocks of 32 tokens behind the full chunks of 256.
WHOLE_TOKENS = {1100: 1088, 100: 96, 1056: 1056, 1030: 1024}


def test_what_decodes_computes_less_than_a_block(llama: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/lmcache.sock"

    def engine(role: str) -> VllmEngine:
        extra = {"lmcache.mp.host": address, "lmcache.mp.load_or_recompute": False}
        log_name, flags = f"{role}.log", ("--block-size", "32")
        return VllmEngine(llama, tmp_path, cache_port=1, role=role, extra_config=extra, log_name=log_name, extra=flags)

    prompts = {length: sample_tokens(length, seed=length) for length in WHOLE_TOKENS}
    objects = 3 * 4 + 3  # full chunks, and what is behind them
    with CacheServer(tmp_path, host=address, l1_size_gb=0.125) as server:
        server.wait_ready()
        with engine("kv_producer") as producer:
            producer.wait_ready()
            for prompt in prompts.values():
                producer.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
            until(lambda: server.status()["l1"]["objects"] == objects, tell=server.status)
            cold = {length: producer.complete(prompt) for length, prompt in prompts.items()}
        with engine("kv_consumer") as consumer:
            consumer.wait_ready()
            for length, whole_tokens in WHOLE_TOKENS.items():
                warm = consumer.complete(prompts[length], kv_transfer_params=DECODE)
                assert warm.token_ids == cold[length].token_ids
                assert warm.cached_tokens == whole_tokens
            assert consumer.complete(prompts[1100]).cached_tokens == 1024, "without the mark"
        status = server.status()
        held = status["sessions"], status["leases"], status["reservations"]
        assert (status["l1"]["objects"], held) == (objects, (0, 0, 0))
