"""What `make matrix` runs with every version of vLLM: the same prompts, from every place that KV can come from.

Each test is a scenario in `tested_engines.json`. Answers are compared with those of the cold run of the same engine,
bytes with what the engine itself had when they were stored; what `record_property` keeps, between versions.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, leave_early, push_each_other_out, until, whole_chunks
from lmcache.cli.tested_engines import TIMED_TOKENS
from lmcache.testing.processes import Completion
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (2100, 4200)
CHUNKS = sum(length // 256 for length in LENGTHS)
SMALL: dict[str, Any] = {"l1_size_gb": 0.25}
TIMED_HITS = 9
TIGHT_BLOCKS = ("--block-size", "32", "--num-gpu-blocks-override", "128", "--max-model-len", "3000")
TWO_WORKERS: dict[str, Any] = {
    "workers": 2,
    "engine_flags": ("--tensor-parallel-size", "2"),
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


def ask_all(stack: Stack) -> list[Completion]:
    return [stack.engine.complete(sample_tokens(length, seed=length), max_tokens=24) for length in LENGTHS]


def digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def check_loaded(stack: Stack) -> int:
    """How many chunks were loaded since `kv_watch`, each as it had been stored by the same rank."""
    loaded = 0
    for seen in stack.rpc("kv_seen"):
        assert not {chunk for chunk, what in seen["loaded"].items() if seen["stored"][chunk] != what}
        loaded += len(seen["loaded"])
    return loaded


def check_hits(stack: Stack, cold: list[Completion]) -> None:
    def all_hit() -> None:
        warm = ask_all(stack)
        assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold]
        assert [answer.cached_tokens for answer in warm] == [whole_chunks(length) for length in LENGTHS]

    stack.unless_machine_stood_still(all_hit)


def time_first_tokens(stack: Stack) -> tuple[float, float]:
    """Milliseconds to the first token of a prompt: computed, and the median of hits in L1. Of an engine that is not
    watched yet, as digests take time, too. The server is empty afterwards."""
    length = TIMED_TOKENS
    for seed in (1, 2):  # the first one warms the engine up
        computed = stack.engine.complete(sample_tokens(length, seed=seed), max_tokens=1)
    stack.wait_stored(2 * (length // 256), in_l2=True)
    hits: list[Completion] = []

    def all_hit() -> None:
        hits[:] = [stack.engine.complete(sample_tokens(length, seed=2), max_tokens=1) for _ in range(TIMED_HITS)]
        assert [hit.cached_tokens for hit in hits] == [whole_chunks(length)] * TIMED_HITS

    stack.unless_machine_stood_still(all_hit)
    stack.wait_clean()
    stack.server.clear("all")
    median = statistics.median(hit.time_to_first_token_seconds for hit in hits)
    return round(1e3 * computed.time_to_first_token_seconds, 1), round(1e3 * median, 1)


class Run:
    """One engine, and what it computed cold."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.computed_ms, self.hit_ms = time_first_tokens(stack)
        stack.rpc("kv_watch")
        self.cold = ask_all(stack)
        stack.wait_stored(CHUNKS, in_l2=True)
        self.stored: Mapping[str, str] = stack.rpc("kv_seen")[0]["stored"]

    def answers_again(self) -> None:
        check_hits(self.stack, self.cold)
        assert check_loaded(self.stack) == CHUNKS
        self.stack.wait_clean()


@pytest.fixture(scope="module")
def run(llama: Path, start_stack: Callable[..., Stack]) -> Run:
    return Run(start_stack(llama, **SMALL))


def test_cold(run: Run, record_property: Callable[[str, object], None]) -> None:
    engine = run.stack.engine
    assert engine.ask(engine.port, "GET", "/version") == (200, {"version": pytest.importorskip("vllm").__version__})
    assert [answer.cached_tokens for answer in run.cold] == [0] * len(LENGTHS)
    assert len(run.stored) == CHUNKS
    record_property("tokens", digest([answer.token_ids for answer in run.cold]))
    record_property("kv", digest(sorted(run.stored.items())))


def test_l1_hit(run: Run, record_property: Callable[[str, object], None]) -> None:
    run.answers_again()
    record_property("hit_ms", run.hit_ms)
    record_property("computed_ms", run.computed_ms)


def test_l2_hit(run: Run) -> None:
    run.stack.server.clear("l1")
    run.answers_again()


def test_server_restart(run: Run) -> None:
    run.stack.server.kill()
    run.stack.restart_server()
    run.answers_again()


def test_failed_load(run: Run) -> None:
    """L1 holds other bytes than were stored, and nothing else has them: they are computed again, and stored."""
    stack = run.stack
    stack.server.clear("all")
    prompt, cold = sample_tokens(LENGTHS[0], seed=LENGTHS[0]), run.cold[0]
    assert stack.engine.complete(prompt, max_tokens=24).token_ids == cold.token_ids
    stack.wait_stored(LENGTHS[0] // 256, in_l2=True)
    stack.server.clear("l2")
    stack.wait_clean()
    assert stack.spoil_l1(range(3, 8)) >= 8
    assert stack.engine.complete(prompt, max_tokens=24).token_ids == cold.token_ids
    assert "not what was stored" in stack.engine.log()
    stack.wait_stored(LENGTHS[0] // 256)
    assert stack.engine.complete(prompt, max_tokens=24).token_ids == cold.token_ids
    stack.wait_clean()


def test_abort(run: Run) -> None:
    """Clients leave while their prompts are computed, looked up and loaded."""
    stack = run.stack
    prompt = sample_tokens(LENGTHS[1], seed=LENGTHS[1])
    for seconds in (0.0, 0.05, 0.2, 0.5):
        leave_early(stack.engine, prompt, seconds)
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0)
    assert stack.engine.complete(prompt, max_tokens=24).token_ids == run.cold[1].token_ids
    stack.wait_clean()
    assert not [sentence for held in stack.rpc("kv_held") for sentence in held]


def test_preemption(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(llama, prefix_caching=True, engine_flags=TIGHT_BLOCKS, **SMALL)
    stack.rpc("kv_watch")
    prompts, answers = push_each_other_out(stack)
    stack.forget_prefixes()
    alone = [stack.engine.complete(prompt, max_tokens=1) for prompt in prompts]
    assert [answer.token_ids for answer in alone] == [answer.token_ids[:1] for answer in answers]
    assert check_loaded(stack) > 0
    stack.wait_clean()


def test_tensor_parallel_2(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(llama, **TWO_WORKERS, **SMALL)
    stack.rpc("kv_watch")
    cold = ask_all(stack)
    stack.wait_stored(2 * CHUNKS, in_l2=True)
    check_hits(stack, cold)
    stack.server.clear("l1")
    check_hits(stack, cold)
    assert check_loaded(stack) == 2 * CHUNKS
    stack.wait_clean()
