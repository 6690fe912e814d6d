"""A load that is slower than computing is left out, once that is known; what is fast is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK_GIB = 2 / 1024
# 5 s a chunk; computing takes 0.2 s.
SLOW = {"type": "mock", "max_size_gb": 0.1, "mock_bandwidth_gb": CHUNK_GIB / 5, "timeout_seconds": 200}
KNOWN_AFTER = 6  # loads that were measured


def test_a_slow_tier_is_left_out_and_a_fast_one_is_not(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(
        llama,
        l2=False,
        server_flags=["--l2-adapter", json.dumps(SLOW)],
        extra_config={"lmcache.mp.load_or_recompute": True},
    )
    prompts = [sample_tokens(300, seed=seed) for seed in range(KNOWN_AFTER + 2)]
    cold = [stack.engine.complete(prompt, max_tokens=4) for prompt in prompts]
    assert [answer.cached_tokens for answer in cold] == [0] * len(prompts)
    stack.wait_stored(len(prompts), in_l2=True)

    def left_out() -> float:
        return stack.server.metric('lmcache_mp_misses_total{reason="recompute_faster"}')

    stack.server.clear("l1")
    for prompt, first in zip(prompts[:KNOWN_AFTER], cold, strict=False):
        loaded = stack.engine.complete(prompt, max_tokens=4)
        assert (loaded.token_ids, loaded.cached_tokens) == (first.token_ids, 256)
    assert left_out() == 0

    stack.server.clear("l1")
    computed = stack.engine.complete(prompts[-1], max_tokens=4)
    assert (computed.token_ids, computed.cached_tokens) == (cold[-1].token_ids, 0)
    assert left_out() == 1
    print(f"5 s of loading left out: first token after {computed.time_to_first_token_seconds:.2f} s")

    stack.wait_stored(1)
    from_l1 = stack.engine.complete(prompts[-1], max_tokens=4)
    assert (from_l1.token_ids, from_l1.cached_tokens) == (cold[-1].token_ids, 256)
    assert left_out() == 1
    stack.wait_clean()
