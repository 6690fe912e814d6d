"""A load that is slower than computing is left out, once that is known; what is fast is loaded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack
from lmcache.testing.processes import LOOPBACK
from lmcache.testing.tiny_models import sample_tokens
from services.redis import Valkey
from support.network import network_to

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK_GIB = 2 / 1024
# 5 s a chunk; computing takes 0.2 s.
SLOW = {"type": "mock", "max_size_gb": 0.1, "mock_bandwidth_gb": CHUNK_GIB / 5, "timeout_seconds": 200}
KNOWN_AFTER = 6  # loads that were measured
# Of each 256 KiB that a connection brings. Valkey on the same machine takes about 1 ms.
DELAYS_SECONDS = (0.01, 0.1, 1.0)
PIECES = 8  # of a chunk, or more
AT_EACH_DELAY, LAST = 10, 4  # prompts


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


def test_a_remote_tier_that_becomes_slower_is_left_out(
    llama: Path, start_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    """Ten, a hundred, a thousand times: after a few loads, what takes much longer to load is computed."""
    with Valkey(tmp_path / "valkey") as valkey, network_to(valkey.port) as network:
        valkey.wait_ready()
        adapter = {"type": "resp", "host": LOOPBACK, "port": network.port, "timeout_seconds": 60}
        stack = start_stack(
            llama,
            l2=False,
            server_flags=["--l2-adapter", json.dumps(adapter)],
            extra_config={"lmcache.mp.load_or_recompute": True},
        )
        count = KNOWN_AFTER + AT_EACH_DELAY * len(DELAYS_SECONDS)
        prompts = iter([(sample_tokens(600, seed=seed), seed) for seed in range(count)])
        cold = [stack.engine.complete(sample_tokens(600, seed=seed), max_tokens=4) for seed in range(count)]
        computing = statistics.median(answer.time_to_first_token_seconds for answer in cold)
        stack.wait_stored(2 * count, in_l2=True)
        stack.server.clear("l1")

        def ask() -> tuple[float, bool]:
            """Seconds to the first token, and whether the KV was loaded."""
            prompt, seed = next(prompts)
            answer = stack.engine.complete(prompt, max_tokens=4)
            assert answer.token_ids == cold[seed].token_ids
            assert answer.cached_tokens in (0, 512)
            return answer.time_to_first_token_seconds, answer.cached_tokens > 0

        healthy = [ask() for _ in range(KNOWN_AFTER)]
        assert all(loaded for _, loaded in healthy)
        print(f"computed: {computing:.2f} s, loaded: {statistics.median(took for took, _ in healthy):.2f} s")
        for delay_seconds in (*DELAYS_SECONDS[:-1], max(DELAYS_SECONDS[-1], 0.5 * computing)):
            network.slow_down(delay_seconds)
            asked = [ask() for _ in range(AT_EACH_DELAY)]
            left_out = [took for took, loaded in asked[-LAST:] if not loaded]
            print(
                f"{delay_seconds} s: {[(round(took, 2), 'loaded' if loaded else 'computed') for took, loaded in asked]}"
            )
            at_least = PIECES * delay_seconds
            if at_least > 2.5 * computing + 0.2:  # whatever the machine does, at the last delay
                assert len(left_out) >= LAST - 1  # now and then a load is tried
                assert statistics.median(left_out) < at_least
        network.slow_down(0)
        stack.wait_clean()
