"""Every model shape with a real engine: KV that is restored byte by byte, or an engine that runs uncached and says why.

Each engine takes half a minute to start, so only a cheap one runs always, the others nightly. Where the engine's own
prefix cache works, a hit of ours has to give the very probabilities that a hit of the engine's own cache gives, and the
tokens of the cold run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, until
from lmcache.testing.processes import Completion
from lmcache.testing.tiny_models import LlamaShape, make_llama, sample_tokens
from support.tiny_heads import (
    make_deepseek_with_mtp,
    make_glm_with_mtp,
    make_with_eagle,
    make_with_eagle3,
    make_with_medusa,
)
from support.tiny_hybrids import make_gemma3n, make_gpt_oss, make_llama4, make_qwen3_next
from support.tiny_shapes import make_deepseek_v2, make_gemma3, make_qwen3

pytestmark = pytest.mark.engine


_BLOCK_TOKENS = 128  # of vLLM on CPU


@dataclass(frozen=True)
class Shape:
    make: Callable[[Path], Path]
    flags: tuple[str, ...] = ()  # "{folder}" stands for the model's folder
    environment: dict[str, str] = field(default_factory=dict)
    chunk_tokens: int = 256
    hit_chunks: int = 4
    prefix_caching: bool = True
    refusal: str = ""  # what the engine says when it runs uncached
    same_tokens: bool = True  # False where the engine itself computes otherwise after a partial prefill
    ranks: int = 1  # that each store a part of a chunk
    workers: int | None = None  # where several hold the same
    is_state: bool = False
    accepts_drafts: bool = False  # as many from a hit as from the engine's own cache; some where that is off
    has_head: bool = False  # the engine's own cache gives up the last block of a hit
    always: bool = False  # not only nightly

    @property
    def hit_tokens(self) -> int:
        return self.hit_chunks * self.chunk_tokens

    @property
    def prompt(self) -> list[int]:
        """A little more than the hit, so that ours and one of the engine's own cache end at the same token."""
        return sample_tokens(self.hit_tokens + 20 + (_BLOCK_TOKENS if self.has_head else 0), seed=1)


def make_multi_query(folder: Path) -> Path:
    return make_llama(folder, LlamaShape(num_hidden_layers=2, num_key_value_heads=1))


def make_with_draft(folder: Path) -> Path:
    """The draft is the model once more, so that the other accepts what it says as long as its KV is right."""
    make_llama(folder / "draft")
    return make_llama(folder)


TWO_RANKS: dict[str, Any] = {
    "flags": ("--tensor-parallel-size", "2"),
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
MLA: dict[str, Any] = {"prefix_caching": False, "same_tokens": False}
N_GRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'
DRAFT = '{"method":"draft_model","model":"{folder}/draft","num_speculative_tokens":2}'
EAGLE = '{"method":"eagle","model":"{folder}/head","num_speculative_tokens":3}'
EAGLE_3 = '{"method":"eagle3","model":"{folder}/head","num_speculative_tokens":3}'
MEDUSA = '{"method":"medusa","model":"{folder}/head","num_speculative_tokens":2}'
MTP = '{"method":"mtp","num_speculative_tokens":2}'
HEAD: dict[str, Any] = {"has_head": True, "accepts_drafts": True}
STATE: dict[str, Any] = {"chunk_tokens": 640, "hit_chunks": 2, "is_state": True}
HALF_STATE: dict[str, Any] = {**STATE, "chunk_tokens": 384}  # the engine's block is as large as a rank's state
SHAPES: dict[str, Shape] = {
    "mla": Shape(make_deepseek_v2, **MLA, always=True),
    "mla, two ranks": Shape(make_deepseek_v2, **MLA, **TWO_RANKS, workers=2),
    "qwen3": Shape(make_qwen3),
    "multi-query": Shape(make_multi_query),
    "multi-query, two ranks": Shape(make_multi_query, **TWO_RANKS, ranks=2),
    "sliding windows": Shape(make_gemma3),
    "sliding windows, two ranks": Shape(make_gemma3, **TWO_RANKS, ranks=2),
    "fp8": Shape(make_qwen3, flags=("--kv-cache-dtype", "fp8")),
    "blocks of 32": Shape(make_qwen3, flags=("--block-size", "32")),
    "blocks of 64": Shape(make_qwen3, flags=("--block-size", "64")),
    "n-gram speculation": Shape(make_llama, flags=("--speculative-config", N_GRAM)),
    "draft model": Shape(make_with_draft, flags=("--speculative-config", DRAFT), accepts_drafts=True),
    "EAGLE": Shape(make_with_eagle, flags=("--speculative-config", EAGLE), **HEAD, always=True),
    "EAGLE-3": Shape(make_with_eagle3, flags=("--speculative-config", EAGLE_3), **HEAD),
    "MTP": Shape(make_glm_with_mtp, flags=("--speculative-config", MTP), **HEAD),
    "MLA with MTP": Shape(make_deepseek_with_mtp, flags=("--speculative-config", MTP), **MLA, accepts_drafts=True),
    "Medusa": Shape(make_with_medusa, flags=("--speculative-config", MEDUSA)),
    "attention sinks": Shape(make_gpt_oss),
    "chunked attention": Shape(make_llama4, hit_chunks=3),  # ends within a chunk of the model's 512 tokens
    "shared KV": Shape(make_gemma3n),
    "recurrent state": Shape(make_qwen3_next, **STATE),
    "recurrent state, two ranks": Shape(make_qwen3_next, **HALF_STATE, **TWO_RANKS, ranks=2),
    "recurrent state without a prefix cache": Shape(
        make_qwen3_next, **STATE, prefix_caching=False, refusal="start vLLM with --enable-prefix-caching"
    ),
    "recurrent state in chunks that do not fit": Shape(
        make_qwen3_next, refusal="not a multiple of this engine's block size of 640"
    ),
}


def parameters() -> list[Any]:
    return [pytest.param(name, marks=[] if shape.always else [pytest.mark.slow]) for name, shape in SHAPES.items()]


class Witness:
    """What was stored and loaded over the starts of an engine, in digests of the engine's own tensors."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.stored: dict[str, str] = {}
        self.groups = self.watch()

    def watch(self) -> int:
        return int(self._stack.rpc("kv_watch")[0])

    def loaded(self) -> int:
        """How many chunks the workers have loaded since the last watch: each is what was stored under its name."""
        ranks = self._stack.rpc("kv_seen")
        for rank in ranks:
            for chunk, digest in rank["stored"].items():
                name = f"{rank['kv_rank']} {chunk}"
                assert self.stored.setdefault(name, digest) == digest
        for rank in ranks:
            for chunk, digest in rank["loaded"].items():
                assert self.stored[f"{rank['kv_rank']} {chunk}"] == digest
        return sum(len(rank["loaded"]) for rank in ranks)


@pytest.mark.parametrize("name", parameters())
def test_shape(name: str, tmp_path_factory: pytest.TempPathFactory, start_stack: Callable[..., Stack]) -> None:
    pytest.importorskip("vllm")
    shape = SHAPES[name]
    model = shape.make(tmp_path_factory.mktemp("models") / "model")
    stack = start_stack(
        model,
        l2=not shape.refusal,
        engine_flags=[flag.replace("{folder}", str(model)) for flag in shape.flags],
        environment=shape.environment,
        server_flags=["--chunk-size", str(shape.chunk_tokens)],
        prefix_caching=shape.prefix_caching,
        ranks=shape.ranks,
        workers=shape.workers,
        dtype="bfloat16",
    )
    if shape.refusal:
        check_uncached(stack, shape)
        return
    witness = Witness(stack)
    cold = ask(stack, shape)
    assert cold.cached_tokens == 0
    # Of states the engine keeps the one at the end of its step, of attention everything that this step computes.
    of_groups = shape.hit_chunks + (witness.groups - 1) * (1 if shape.is_state else shape.hit_chunks)
    stack.wait_stored(of_groups, in_l2=True)
    before = accepted_drafts(stack)
    own = ask(stack, shape) if shape.prefix_caching else cold
    drafts = accepted_drafts(stack) - before
    assert drafts > 0 or not (shape.accepts_drafts and shape.prefix_caching)
    assert own.cached_tokens == (shape.hit_tokens if shape.prefix_caching else 0)

    hits: list[tuple[Any, ...]] = []

    def same_again(where: str) -> None:
        if shape.prefix_caching:
            stack.forget_prefixes()
        before = accepted_drafts(stack)
        warm = ask(stack, shape)
        accepted = accepted_drafts(stack) - before
        if shape.accepts_drafts:
            assert accepted == drafts if shape.prefix_caching else accepted > 0, where
        hits.append((warm.token_ids, warm.logprobs, accepted))
        assert hits[-1] == hits[0], where  # wherever it came from
        assert warm.cached_tokens == shape.hit_tokens, where
        if shape.same_tokens:
            assert (warm.token_ids, warm.logprobs) == (cold.token_ids, own.logprobs), where
        assert witness.loaded() >= (shape.hit_chunks + witness.groups - 1) * shape.ranks
        stack.wait_clean()

    stack.unless_machine_stood_still(lambda: same_again("from L1"))
    stack.server.clear("l1")
    stack.unless_machine_stood_still(lambda: same_again("from L2"))
    if not shape.always:
        stack.restart_engine()
        witness.watch()
        stack.unless_machine_stood_still(lambda: same_again("after a restart of the engine"))


def ask(stack: Stack, shape: Shape) -> Completion:
    return stack.engine.complete(shape.prompt, max_tokens=16, logprobs=1)


def accepted_drafts(stack: Stack) -> float:
    """Since the engine's start; 0 without speculation."""
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0)
    return stack.engine_metric("vllm:spec_decode_num_accepted_tokens_total")


def check_uncached(stack: Stack, shape: Shape) -> None:
    first = ask(stack, shape)
    if shape.prefix_caching:
        stack.forget_prefixes()
    again = ask(stack, shape)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)
    log = stack.engine.log()
    assert log.count("This engine runs uncached") == 1
    assert shape.refusal in log
    assert stack.server.status()["l1"]["objects"] == 0
