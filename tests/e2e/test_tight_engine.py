"""An engine with few and small blocks, a prefix cache of its own, and requests that push each other out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, leave_early, push_each_other_out, until
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 32
BLOCKS = 128  # 4,096 tokens for all requests together


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def stack(request: pytest.FixtureRequest, llama: Path, start_stack: Callable[..., Stack]) -> Stack:
    parallel: dict[str, Any] = {"ranks": request.param}
    if request.param == 2:
        parallel["environment"] = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    started = start_stack(
        llama,
        prefix_caching=True,
        **parallel,
        engine_flags=[
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
            *("--max-model-len", "3000", "--tensor-parallel-size", str(request.param)),
        ],
    )
    started.rpc("kv_watch")
    return started


def check_bytes(stack: Stack) -> int:
    """Chunks that were loaded as they had been stored."""
    loaded = 0
    for seen in stack.rpc("kv_seen"):
        for chunk, digest in seen["loaded"].items():
            assert seen["stored"][chunk] == digest
        loaded += len(seen["loaded"])
    return loaded


def test_a_hit_continues_where_the_engines_own_cache_ends(stack: Stack) -> None:
    prompt = sample_tokens(2080, seed=1)
    cold = stack.engine.complete(prompt, max_tokens=8)
    stack.wait_stored(8)
    for held_tokens in (96, 320, 512, 700):
        stack.forget_prefixes()
        # Leaves a prefix of whole blocks, though not of whole chunks, in the engine.
        stack.engine.complete(prompt[:held_tokens], max_tokens=1)
        again = stack.engine.complete(prompt, max_tokens=8)
        assert again.token_ids == cold.token_ids
        assert again.cached_tokens == 2048
    assert check_bytes(stack) > 0
    stack.wait_clean()


def test_what_the_engine_still_holds_reaches_a_new_server(stack: Stack) -> None:
    prompt = sample_tokens(1100, seed=2)
    stack.engine.complete(prompt, max_tokens=1)
    stack.wait_stored(8 + 4, in_l2=True)
    stack.server.clear("all")
    held = stack.engine.complete(prompt, max_tokens=1)
    assert held.cached_tokens == 1088
    stack.wait_stored(4)
    stack.forget_prefixes()
    assert stack.engine.complete(prompt, max_tokens=1).cached_tokens == 1024
    stack.wait_clean()


def test_spoilt_chunks_in_l1_are_computed_again(stack: Stack) -> None:
    """Answers are compared with those of the same engine from its own cache: how many tokens are computed together
    decides how sums are rounded, and so may change a token."""
    if stack.ranks > 1:
        pytest.skip("whose frames lie where is not known, so neither is what would be computed again")
    prompt = sample_tokens(2080, seed=3)
    stack.forget_prefixes()
    stack.wait_clean()
    stack.server.clear("all")
    stack.engine.complete(prompt[:768], max_tokens=1)
    stack.wait_stored(3)  # else the blocks that its store pins leave too little room for the next one
    expected = stack.engine.complete(prompt, max_tokens=8)
    assert expected.cached_tokens == 768
    stack.wait_stored(8, in_l2=True)
    stack.server.clear("l2")
    stack.forget_prefixes()
    stack.wait_clean()
    assert stack.spoil_l1(range(3, 8)) >= 8
    spoilt = stack.engine.complete(prompt, max_tokens=8)
    assert spoilt.token_ids == expected.token_ids
    assert "not what was stored" in stack.engine.log()
    stack.wait_stored(8)
    own = stack.engine.complete(prompt, max_tokens=8)
    stack.forget_prefixes()
    again = stack.engine.complete(prompt, max_tokens=8)
    assert (again.token_ids, again.cached_tokens) == (own.token_ids, 2048)
    check_bytes(stack)
    stack.wait_clean()


def test_preempted_requests_come_back_from_the_cache(stack: Stack) -> None:
    prompts, answers = push_each_other_out(stack)
    alone = stack.engine.complete(prompts[0], max_tokens=1)
    assert alone.token_ids == answers[0].token_ids[:1]
    check_bytes(stack)
    stack.wait_clean()


def test_requests_leave_while_others_push_each_other_out(stack: Stack) -> None:
    prompts = [sample_tokens(1100, seed=30 + index) for index in range(6)]
    alone = [stack.engine.complete(prompt, max_tokens=1).token_ids for prompt in prompts]
    before = stack.engine_metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        staying = [pool.submit(stack.engine.complete, prompt, max_tokens=300) for prompt in prompts]
        leaving = [
            pool.submit(leave_early, stack.engine, prompts[number % 6], after_seconds=0.15 * number)
            for number in range(24)
        ]
        answers = [future.result() for future in staying]
        assert not any(future.exception() for future in leaving)
    assert stack.engine_metric("vllm:num_preemptions_total") > before
    assert [answer.token_ids[:1] for answer in answers] == alone
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0)
    check_bytes(stack)
    stack.wait_clean()
