"""One server for several engines: the same model in the same layout shares, everything else keeps apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, until
from lmcache.testing.processes import VllmEngine
from lmcache.testing.tiny_models import sample_tokens
from support.tiny_shapes import make_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = sample_tokens(1100, seed=1)


@contextmanager
def beside(stack: Stack, model: Path, flags: Sequence[str] = ()) -> Iterator[Any]:
    """Another engine on the same server, with the one of the stack still running."""
    engine = stack.another_engine(model, flags)
    try:
        engine.wait_ready()
        until(lambda: len(stack.server.status()["instances"]) == 2, tell=stack.server.status)
        yield engine
    finally:
        engine.stop()
    until(lambda: len(stack.server.status()["instances"]) == 1, tell=stack.server.status)


def hit(engine: VllmEngine) -> tuple[tuple[int, ...], int]:
    answer = engine.complete(PROMPT)
    return answer.token_ids, answer.cached_tokens


def test_engines_share_what_has_the_same_layout_and_nothing_else(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, start_stack: Callable[..., Stack]
) -> None:
    stack = start_stack(llama, l2=False)
    stack.rpc("kv_watch")
    tokens, cached = hit(stack.engine)
    assert cached == 0
    stack.wait_stored(4)
    with beside(stack, llama) as twin:
        stack.rpc("kv_watch", twin)
        assert hit(twin) == hit(stack.engine) == (tokens, 1024)
        (loaded,) = stack.rpc("kv_seen", twin)
        (there,) = stack.rpc("kv_seen")
        assert loaded["loaded"] == there["loaded"]
        assert len(loaded["loaded"]) == 4
    for flags in (["--block-size", "32"], ["--kv-cache-dtype", "fp8"]):
        with beside(stack, llama, flags) as other:
            assert hit(other)[1] == 0
            until(lambda engine=other: hit(engine)[1] == 1024)
            assert hit(stack.engine) == (tokens, 1024)
    with beside(stack, make_qwen3(tmp_path_factory.mktemp("models") / "qwen3")) as other:
        cold = hit(other)
        assert (cold[1], cold[0] == tokens) == (0, False)
        until(lambda: hit(other) == (cold[0], 1024))
        assert hit(stack.engine) == (tokens, 1024)
    assert stack.server.status()["l1"]["objects"] == 4 * 4
    stack.wait_clean()


def test_replicas_are_distinguished_and_share_hits(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(
        llama,
        l2=False,
        engine_flags=["--data-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    until(lambda: len(stack.server.status()["instances"]) == 2, tell=stack.server.status)
    names = sorted(str(instance["instance_id"])[-4:] for instance in stack.server.status()["instances"])
    assert names == ["_dp0", "_dp1"]
    for replica in (0, 1):
        prompt = sample_tokens(1100, seed=10 + replica)
        cold = stack.engine.complete(prompt, replica=replica)
        assert cold.cached_tokens == 0
        stack.wait_stored(4 * (replica + 1))
        for other in (1 - replica, replica):
            warm = stack.engine.complete(prompt, replica=other)
            assert (warm.token_ids, warm.cached_tokens) == (cold.token_ids, 1024)
    stack.wait_clean()
