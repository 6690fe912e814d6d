"""Sixteen requests at once that share 4,096 tokens: one computes them, with and without a cache in the engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.harness import Stack
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS, COMMON, OWN = 16, 4096, 30


@pytest.mark.parametrize("own_cache", [False, True])
def test_a_burst_computes_what_it_shares_once(llama: Path, start_stack: Callable[..., Stack], own_cache: bool) -> None:
    stack = start_stack(llama, l2=False, prefix_caching=own_cache, engine_flags=["--max-num-seqs", "16"])
    common = sample_tokens(COMMON, seed=1)
    stack.engine.complete(sample_tokens(300, seed=2), max_tokens=1)
    alone = stack.engine.complete(sample_tokens(COMMON + OWN, seed=3), max_tokens=2)

    def computed() -> float:
        return stack.engine_metric("vllm:prompt_tokens_by_source_total", "local_compute")

    before = computed()
    with ThreadPoolExecutor(REQUESTS) as pool:
        prompts = [[*common, *sample_tokens(OWN, seed=10 + number)] for number in range(REQUESTS)]
        answers = list(pool.map(lambda prompt: stack.engine.complete(prompt, max_tokens=2), prompts))
    tokens = computed() - before
    slowest = max(answer.total_seconds for answer in answers)
    print(
        f"own cache {own_cache}: {tokens:.0f} tokens computed for {COMMON} + {REQUESTS} x {OWN}, "
        f"the last answer after {slowest:.2f} s; one such prompt alone takes {alone.total_seconds:.2f} s"
    )
    assert tokens < 2 * COMMON
    # From KV that came otherwise, later tokens may round otherwise.
    again = [stack.engine.complete(prompt, max_tokens=2).token_ids[0] for prompt in prompts[:3]]
    assert again == [answer.token_ids[0] for answer in answers[:3]]
    stack.wait_clean()
