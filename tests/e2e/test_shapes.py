"""Every model shape with a real engine: KV that is restored byte by byte, or an engine that runs uncached and says why.

Each engine takes half a minute to start, so only a cheap one runs always, the others nightly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, whole_chunks
from lmcache.testing.tiny_models import make_deepseek_v2, make_llama, make_qwen3, make_qwen3_next, sample_tokens

pytestmark = pytest.mark.engine

TOKENS = 1100


@dataclass(frozen=True)
class Shape:
    make: Callable[[Path], Path]
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    refusal: str = ""  # what the engine says when it runs uncached
    same_tokens: bool = True  # False where the engine itself computes otherwise after a partial prefill
    copies: int = 1  # how often L1 has each chunk: once a rank with KV of its own


TWO_RANKS = {
    "flags": ("--tensor-parallel-size", "2"),
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
SHAPES: dict[str, Shape] = {
    "mla": Shape(make_deepseek_v2, same_tokens=False),
    "qwen3": Shape(make_qwen3),
    "fp8": Shape(make_qwen3, flags=("--kv-cache-dtype", "fp8")),
    "small blocks": Shape(make_qwen3, flags=("--block-size", "32")),
    "n-gram speculation": Shape(
        make_llama,
        flags=(
            "--speculative-config",
            '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}',
        ),
    ),
    "mla, two ranks": Shape(make_deepseek_v2, same_tokens=False, **TWO_RANKS),
    "linear attention": Shape(make_qwen3_next, refusal="start vLLM with --enable-prefix-caching"),
}
CHEAP = ("mla",)


def parameters() -> list[Any]:
    return [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.slow]) for name in SHAPES]


@pytest.mark.parametrize("name", parameters())
def test_shape(name: str, tmp_path_factory: pytest.TempPathFactory, start_stack: Callable[..., Stack]) -> None:
    pytest.importorskip("vllm")
    shape = SHAPES[name]
    model = shape.make(tmp_path_factory.mktemp("models") / "model")
    stack = start_stack(model, l2=False, engine_flags=shape.flags, environment=shape.environment)
    prompt = sample_tokens(TOKENS, seed=1)
    if shape.refusal:
        check_uncached(stack, prompt, shape.refusal)
        return
    stack.rpc("kv_watch")
    cold = stack.engine.complete(prompt, max_tokens=16)
    chunks = whole_chunks(TOKENS) // 256
    stack.wait_stored(chunks * shape.copies)
    assert stack.server.status()["l1"]["objects"] == chunks * shape.copies
    warm = stack.engine.complete(prompt, max_tokens=16)
    assert warm.cached_tokens == whole_chunks(TOKENS)
    if shape.same_tokens:
        assert warm.token_ids == cold.token_ids
    stored: dict[str, str] = {}
    for rank in (ranks := stack.rpc("kv_seen")):
        stored.update(rank["stored"])
    for rank in ranks:
        assert len(rank["loaded"]) == chunks
        assert all(stored[chunk] == digest for chunk, digest in rank["loaded"].items())
    stack.wait_clean()


def check_uncached(stack: Stack, prompt: list[int], refusal: str) -> None:
    first = stack.engine.complete(prompt, max_tokens=16)
    again = stack.engine.complete(prompt, max_tokens=16)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)
    log = stack.engine.log()
    assert log.count("This engine runs uncached") == 1
    assert refusal in log
    assert stack.server.status()["l1"]["objects"] == 0
