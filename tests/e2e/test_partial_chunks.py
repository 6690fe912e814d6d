"""A prompt that a real engine computes for another one: it is stored, and loaded, to its last whole block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from lmcache.integration.vllm.handover import SOURCE_KEY
from lmcache.testing.processes import CacheServer, Completion, VllmEngine
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE: dict[str, Any] = {SOURCE_KEY: {"instance": "", "p2p": "", "epoch": "00" * 16, "tokens": 1 << 20}}
BLOCKS = ("--block-size", "32")
# By prompt: blocks of 32 tokens behind the full chunks of 256.
WHOLE_TOKENS = {1100: 1088, 100: 96, 1056: 1056, 1030: 1024}


def test_what_decodes_computes_less_than_a_block(llama: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/lmcache.sock"

    def engine(role: str) -> VllmEngine:
        extra = {"lmcache.mp.host": address, "lmcache.mp.load_or_recompute": False}
        return VllmEngine(
            llama, tmp_path, cache_port=1, role=role, extra_config=extra, log_name=f"{role}.log", extra=BLOCKS
        )

    prompts = {length: sample_tokens(length, seed=length) for length in WHOLE_TOKENS}
    hits_of_engine = hits_of_its_own_cache(llama, tmp_path, prompts)
    objects = 3 * 4 + 3  # full chunks, and what is behind them
    with CacheServer(tmp_path, host=address, l1_size_gb=0.125) as server:
        server.wait_ready()
        with engine("kv_producer") as producer:
            producer.wait_ready()
            for prompt in prompts.values():
                producer.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
            until(lambda: server.status()["l1"]["objects"] == objects, tell=server.status)
        with engine("kv_consumer") as consumer:
            consumer.wait_ready()
            for length, whole_tokens in WHOLE_TOKENS.items():
                warm = consumer.complete(prompts[length], kv_transfer_params=DECODE)
                assert warm.cached_tokens == whole_tokens
                # vLLM gives up the last block of a prompt that it has as a whole, and computes that in a longer step.
                compared = 1 if whole_tokens == length else len(warm.token_ids)
                assert warm.token_ids[:compared] == hits_of_engine[length].token_ids[:compared]
            assert consumer.complete(prompts[1100]).cached_tokens == 1024, "without the mark"
        status = server.status()
        held = status["sessions"], status["leases"], status["reservations"]
        assert (status["l1"]["objects"], held) == (objects, (0, 0, 0))


def hits_of_its_own_cache(
    model: Path, work_folder: Path, prompts: Mapping[int, Sequence[int]]
) -> dict[int, Completion]:
    """Of an engine without a connector. A step of another length rounds otherwise on some processors (AMX), so that the
    answers of computed prompts are no measure for steps of a few tokens."""
    with VllmEngine(
        model, work_folder, cache_port=None, prefix_caching=True, log_name="own_cache.log", extra=BLOCKS
    ) as engine:
        engine.wait_ready()
        for _ in ("computed", "hits"):
            answers = {length: engine.complete(prompt) for length, prompt in prompts.items()}
    return answers
