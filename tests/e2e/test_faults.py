"""A server that dies, hangs or is not wanted any more never costs the engine more than a little time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, leave_early, until, whole_chunks
from lmcache.integration.engine.connection_settings import DEFAULT_HEARTBEAT_SECONDS
from lmcache.testing.processes import Completion
from lmcache.testing.tiny_models import sample_tokens
from support.other_version import PACKAGE_VERSION, other_version

pytestmark = pytest.mark.engine

PROMPT = 3072
# Beyond what an uncached run takes, of which a busy machine may need thrice as long. A lookup's deadline is 30 s.
ALLOWED_SECONDS = 10.0


@pytest.fixture(scope="module")
def stack(llama: Path, start_stack: Callable[..., Stack]) -> Stack:
    started = start_stack(llama, networked=True)
    started.engine.complete(sample_tokens(300, seed=1))
    return started


def cached(stack: Stack, tokens: list[int]) -> Completion:
    """A completion from the cache, computed before if need be."""
    first = stack.engine.complete(tokens, max_tokens=4)
    until(lambda: stack.engine.complete(tokens, max_tokens=1).cached_tokens == whole_chunks(len(tokens)))
    return first


def uncached_run_seconds(stack: Stack, tokens: int, seed: int) -> float:
    """The slower of two runs that nothing is cached for."""
    runs = [
        stack.engine.complete(sample_tokens(tokens, seed=number), max_tokens=4) for number in (1000 + seed, 2000 + seed)
    ]
    assert all(run.cached_tokens == 0 for run in runs)
    return max(run.total_seconds for run in runs)


@pytest.fixture(scope="module")
def prefill_seconds(stack: Stack) -> float:
    return uncached_run_seconds(stack, PROMPT, seed=100)


def test_a_server_killed_during_a_prefill_is_survived_and_found_again(stack: Stack, prefill_seconds: float) -> None:
    prompt = sample_tokens(PROMPT, seed=102)
    unavailable = "The LMCache server is unavailable"
    before = stack.engine.log().count(unavailable)  # where the machine stood still for as long as an answer may take
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.engine.complete, prompt, max_tokens=4)
        time.sleep(0.3 * prefill_seconds)
        stack.server.kill()
        survived = running.result()
    assert survived.total_seconds < 3 * prefill_seconds + ALLOWED_SECONDS
    while_away = stack.engine.complete(prompt, max_tokens=4)
    assert (while_away.token_ids, while_away.cached_tokens) == (survived.token_ids, 0)
    assert while_away.total_seconds < 3 * prefill_seconds + ALLOWED_SECONDS
    # Once by the scheduler side, once by the worker.
    assert stack.engine.log().count(unavailable) - before == 2

    stack.restart_server()
    again = cached(stack, prompt)
    assert again.token_ids == survived.token_ids
    stack.wait_clean()


@pytest.mark.parametrize("successor", ["itself", "other chunks", "chunks that do not fit"])
def test_a_server_replaced_at_once_during_a_prefill_is_noticed(
    stack: Stack, prefill_seconds: float, successor: str
) -> None:
    """Faster than 100 ms: nobody ever finds the address empty."""
    chunk = {"other chunks": 512, "chunks that do not fit": 96}.get(successor, 256)
    prompt = sample_tokens(PROMPT, seed=chunk)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.engine.complete, prompt, max_tokens=4)
        time.sleep(0.3 * prefill_seconds)
        stack.replace_server(["--chunk-size", str(chunk)])
        replaced_at = time.monotonic()
        survived = running.result()
    if chunk % 128:
        until(lambda: "This engine runs uncached" in stack.engine.log())
        assert stack.engine.complete(prompt, max_tokens=4).token_ids == survived.token_ids
        stack.replace_server()
        replaced_at, chunk = time.monotonic(), 256
    stack.wait_registered()
    registered_seconds = time.monotonic() - replaced_at
    print(f"{successor}: registered {registered_seconds:.2f} s after the previous server was killed")
    assert registered_seconds < DEFAULT_HEARTBEAT_SECONDS  # of misses, and no more
    assert stack.engine.complete(prompt, max_tokens=4).token_ids == survived.token_ids
    until(lambda: stack.engine.complete(prompt).cached_tokens == PROMPT // chunk * chunk)
    stack.wait_clean()


def test_a_server_of_another_protocol_is_reported_and_not_used_and_one_of_both_is(stack: Stack) -> None:
    prompt = sample_tokens(2048, seed=130)
    warm = cached(stack, prompt)
    stack.replace_server(program=other_version(2, 3))
    until(lambda: "upgrade the older side" in stack.engine.log())
    away = stack.engine.complete(prompt, max_tokens=4)
    assert (away.token_ids, away.cached_tokens) == (warm.token_ids, 0)
    assert stack.server.status()["instances"] == []
    stack.replace_server(program=other_version(1, 2))
    stack.wait_registered()
    assert f"(version {PACKAGE_VERSION}" in stack.engine.log()
    assert cached(stack, prompt).token_ids == warm.token_ids
    stack.wait_clean()


@pytest.mark.parametrize("loss", ["packets", "connections"])
def test_a_network_that_fails_costs_a_bounded_time(stack: Stack, prefill_seconds: float, loss: str) -> None:
    assert stack.network is not None
    prompt = sample_tokens(2048, seed=140)
    warm = cached(stack, prompt)
    stack.network.cut()
    try:
        away = [stack.engine.complete(prompt, max_tokens=4) for _ in range(2)]
        if loss == "connections":  # a router that forgets them
            stack.network.drop()
    finally:
        stack.network.mend()
    mended_at = time.monotonic()
    for answer in away:
        assert (answer.token_ids, answer.cached_tokens) == (warm.token_ids, 0)
        assert answer.total_seconds < 3 * prefill_seconds + ALLOWED_SECONDS
    until(lambda: stack.engine.complete(prompt).cached_tokens == 2048)
    print(f"{loss}: a hit again {time.monotonic() - mended_at:.2f} s after the network was mended")
    stack.wait_clean()


@pytest.mark.parametrize("seconds", [0.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_a_server_that_hangs_costs_a_bounded_time(stack: Stack, prefill_seconds: float, seconds: float) -> None:
    prompt = sample_tokens(2048, seed=200)
    warm = cached(stack, prompt)
    stack.server.pause()
    stopped_at = time.monotonic()
    answers: list[Any] = []
    try:
        while len(answers) < 2 or time.monotonic() < stopped_at + seconds:
            answers.append(stack.engine.complete(prompt, max_tokens=4))
    finally:
        stack.server.resume()
    resumed_at = time.monotonic()
    for answer in answers:
        assert answer.token_ids == warm.token_ids
        assert answer.cached_tokens == 0
        assert answer.total_seconds < 3 * prefill_seconds + ALLOWED_SECONDS
    until(lambda: stack.engine.complete(prompt).cached_tokens == 2048)
    print(f"a hit again {time.monotonic() - resumed_at:.2f} s after the server went on")
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
    cold = stack.engine.complete(prompt, cache_salt="tenant one")
    until(lambda: stack.engine.complete(prompt, cache_salt="tenant one").cached_tokens == 2048)
    assert stack.engine.complete(prompt, cache_salt="tenant two").cached_tokens == 0
    assert stack.engine.complete(prompt).cached_tokens == 0
    assert stack.engine.complete(prompt, cache_salt="tenant one").token_ids == cold.token_ids
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
    assert all(answer.cached_tokens == 2048 for answer in answers.values())
    # Batched together, later tokens may round otherwise; the first one comes straight from the loaded KV.
    assert all(answer.token_ids[0] == expected[index % 4][0] for index, answer in answers.items())
    stack.wait_clean()


def test_a_burst_computes_what_it_shares_once(stack: Stack) -> None:
    prefix = sample_tokens(2048, seed=600)
    before = stack.engine_metric("vllm:prompt_tokens_by_source_total", "local_compute")
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(stack.engine.complete, [*prefix, *sample_tokens(20, seed=s)], max_tokens=4) for s in range(8)
        ]
        assert all(len(future.result().token_ids) == 4 for future in asked)
    computed = stack.engine_metric("vllm:prompt_tokens_by_source_total", "local_compute") - before
    print(f"computed {computed:.0f} tokens for {len(prefix)} common ones")
    assert computed < 3 * len(prefix)
    stack.wait_clean()


@pytest.mark.slow
def test_what_an_engine_killed_while_it_loads_and_stores_held_comes_back(stack: Stack) -> None:
    prompt = sample_tokens(2048, seed=700)
    warm = cached(stack, prompt)
    stack.rpc("kv_stall")
    pool = ThreadPoolExecutor(2)
    lost = [pool.submit(stack.engine.complete, tokens) for tokens in (prompt, sample_tokens(2048, seed=701))]

    def held() -> bool:
        status = stack.server.status()
        return bool(status["leases"] and status["reservations"])

    until(held, tell=stack.server.status)
    stack.kill_engine()
    killed_at = time.monotonic()
    assert all(future.exception(90.0) or len(future.result().token_ids) < 16 for future in lost)
    stack.wait_clean()
    print(f"all that the engine held was free {time.monotonic() - killed_at:.2f} s after it was killed")
    stack.engine.wait_ready()
    stack.wait_registered()
    again = stack.engine.complete(prompt, max_tokens=4)
    assert (again.token_ids, again.cached_tokens) == (warm.token_ids, 2048)
    assert stack.engine.complete(sample_tokens(2048, seed=701)).cached_tokens == 0
    stack.wait_clean()
