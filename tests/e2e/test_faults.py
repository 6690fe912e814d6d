"""A server that dies, hangs or is not wanted any more never costs the engine more than a little time."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.harness import Stack, until, whole_chunks
from lmcache.testing.processes import LOOPBACK, Completion, VllmEngine
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine

PROMPT = 3072
ALLOWED_SECONDS = 2.0  # beyond what an uncached run takes, of which a busy machine may need twice as long


@pytest.fixture(scope="module")
def stack(llama: Path, start_stack: Callable[..., Stack]) -> Stack:
    started = start_stack(llama)
    started.engine.complete(sample_tokens(300, seed=1))
    return started


def cached(stack: Stack, tokens: list[int]) -> Completion:
    """A completion from the cache, computed before if need be."""
    first = stack.engine.complete(tokens, max_tokens=4)
    until(lambda: stack.engine.complete(tokens, max_tokens=1).cached_tokens == whole_chunks(len(tokens)))
    return first


def uncached_run_seconds(stack: Stack, tokens: int, seed: int) -> float:
    """The slower of two runs that nothing is cached for."""
    runs = [stack.engine.complete(sample_tokens(tokens, seed=one), max_tokens=4) for one in (1000 + seed, 2000 + seed)]
    assert all(run.cached_tokens == 0 for run in runs)
    return max(run.total_seconds for run in runs)


def leave_early(engine: VllmEngine, prompt: list[int], after_seconds: float) -> None:
    """Sends a request and hangs up."""
    body = json.dumps({"model": engine.model, "prompt": prompt, "max_tokens": 64, "temperature": 0.0, "stream": True})
    connection = http.client.HTTPConnection(LOOPBACK, engine.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    time.sleep(after_seconds)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def test_a_server_killed_during_a_prefill_is_survived_and_found_again(stack: Stack) -> None:
    uncached_seconds = uncached_run_seconds(stack, PROMPT, seed=100)
    prompt = sample_tokens(PROMPT, seed=102)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.engine.complete, prompt, max_tokens=4)
        time.sleep(0.3 * uncached_seconds)
        stack.server.kill()
        survived = running.result()
    assert survived.total_seconds < 2 * uncached_seconds + ALLOWED_SECONDS
    while_away = stack.engine.complete(prompt, max_tokens=4)
    assert (while_away.token_ids, while_away.cached_tokens) == (survived.token_ids, 0)
    assert while_away.total_seconds < 2 * uncached_seconds + ALLOWED_SECONDS
    log = stack.engine.log()
    assert log.count("The LMCache server is unavailable") == 2  # once by the scheduler side, once by the worker

    stack.restart_server()
    again = cached(stack, prompt)
    assert again.token_ids == survived.token_ids
    stack.wait_clean()


def test_a_server_that_hangs_costs_a_bounded_time(stack: Stack) -> None:
    prompt = sample_tokens(2048, seed=200)
    warm = cached(stack, prompt)
    uncached_seconds = uncached_run_seconds(stack, 2048, seed=201)
    stack.server.pause()
    try:
        first = stack.engine.complete(prompt, max_tokens=4)
        second = stack.engine.complete(prompt, max_tokens=4)
    finally:
        stack.server.resume()
    for one in (first, second):
        assert one.token_ids == warm.token_ids
        assert one.cached_tokens == 0
        assert one.total_seconds < 2 * uncached_seconds + ALLOWED_SECONDS
    until(lambda: stack.engine.complete(prompt).cached_tokens == 2048)
    stack.wait_clean()


def test_requests_that_leave_at_any_moment_leave_nothing_behind(stack: Stack) -> None:
    prompt = sample_tokens(6144, seed=300)
    warm = cached(stack, prompt)
    fresh = iter(range(301, 400))
    for attempt in range(16):
        leave_early(stack.engine, prompt, after_seconds=0.005 * attempt)
        if attempt % 4 == 0:
            leave_early(stack.engine, sample_tokens(3000, seed=next(fresh)), after_seconds=0.03 * attempt)
    assert stack.engine.complete(prompt, max_tokens=4).token_ids == warm.token_ids
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0)
    stack.wait_clean()


def test_tenants_do_not_see_each_other(stack: Stack) -> None:
    prompt = sample_tokens(2048, seed=400)
    one = stack.engine.complete(prompt, cache_salt="tenant one")
    until(lambda: stack.engine.complete(prompt, cache_salt="tenant one").cached_tokens == 2048)
    assert stack.engine.complete(prompt, cache_salt="tenant two").cached_tokens == 0
    assert stack.engine.complete(prompt).cached_tokens == 0
    assert stack.engine.complete(prompt, cache_salt="tenant one").token_ids == one.token_ids
    stack.wait_clean()


def test_many_hits_at_once(stack: Stack) -> None:
    prompts = [sample_tokens(2048, seed=500 + i) for i in range(4)]
    expected = [cached(stack, prompt).token_ids for prompt in prompts]
    answers: dict[int, Completion] = {}

    def ask(index: int) -> None:
        answers[index] = stack.engine.complete(prompts[index % 4], max_tokens=4)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(one.cached_tokens == 2048 for one in answers.values())
    # Batched together, later tokens may round otherwise; the first one comes straight from the loaded KV.
    assert all(one.token_ids[0] == expected[index % 4][0] for index, one in answers.items())
    stack.wait_clean()
