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

    answers = answers_of_engine(llama, tmp_path)
    objects = 3 * 4 + 3  # full chunks, and what is behind them
    with CacheServer(tmp_path, host=address, l1_size_gb=0.125) as server:
        server.wait_ready()
        with engine("kv_producer") as producer:
            producer.wait_ready()
            for prompt in answers:
                producer.complete(prompt, max_tokens=1, kv_transfer_params=PREFILL)
            until(lambda: server.status()["l1"]["objects"] == objects, tell=server.status)
        with engine("kv_consumer") as consumer:
            consumer.wait_ready()
            for prompt, token_ids in answers.items():
                warm = consumer.complete(prompt, kv_transfer_params=DECODE)
                assert warm.token_ids == token_ids
                assert warm.cached_tokens == WHOLE_TOKENS[len(prompt)]
            longest = max(answers, key=len)
            assert consumer.complete(longest).cached_tokens == 1024, "without the mark"
        status = server.status()
        held = status["sessions"], status["leases"], status["reservations"]
        assert (status["l1"]["objects"], held) == (objects, (0, 0, 0))


def answers_of_engine(model: Path, work_folder: Path) -> dict[tuple[int, ...], tuple[int, ...]]:
    """By prompt, those of an engine without a connector behind steps of the same lengths as after a hit of ours: some
    processors (AMX) round otherwise in longer ones. It hits its own cache, but never with the last block of a prompt,
    so that a prompt of whole blocks ends with a token that the engine has generated, in a step of its own."""
    with VllmEngine(
        model, work_folder, cache_port=None, prefix_caching=True, log_name="own_cache.log", extra=BLOCKS
    ) as engine:
        engine.wait_ready()
        answers = {}
        for length, whole_tokens in WHOLE_TOKENS.items():
            if whole_tokens == length:
                start = sample_tokens(length - 1, seed=length)
                last, *token_ids = engine.complete(start, max_tokens=17).token_ids
                answers[(*start, last)] = tuple(token_ids)
            else:
                prompt = sample_tokens(length, seed=length)
                engine.complete(prompt, max_tokens=1)
                hit = engine.complete(prompt)
                assert hit.cached_tokens == whole_tokens
                answers[tuple(prompt)] = hit.token_ids
    return answers
