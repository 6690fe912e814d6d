"""The same tokens with another adapter have other KV: they never share, and each finds its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack
from lmcache.testing.tiny_models import sample_tokens
from support.tiny_shapes import make_lora

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_adapters_do_not_share(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, start_stack: Callable[..., Stack]
) -> None:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: make_lora(folder / name, llama, seed=seed) for seed, name in enumerate(("one", "two"))}
    modules = [f"{name}={path}" for name, path in adapters.items()]
    stack = start_stack(
        llama, engine_flags=["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules]
    )
    stack.rpc("kv_watch")
    prompt = sample_tokens(1100, seed=1)
    models = ("one", "two", stack.engine.model)
    cold = {model: stack.engine.complete(prompt, model=model) for model in models}
    assert [answer.cached_tokens for answer in cold.values()] == [0, 0, 0]
    assert len({answer.token_ids for answer in cold.values()}) == 3
    stack.wait_stored(3 * 4, in_l2=True)
    for where in ("L1", "L2"):
        for model in models:
            warm = stack.engine.complete(prompt, model=model)
            assert (warm.token_ids, warm.cached_tokens) == (cold[model].token_ids, 1024), (where, model)
        stack.server.clear("l1")
    (seen,) = stack.rpc("kv_seen")
    assert len(seen["loaded"]) == 3 * 4
    assert seen["loaded"] == seen["stored"]
    stack.wait_clean()
