"""A model with sliding windows: several KV cache groups over the same bytes, of which old blocks are given up early."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.harness import Stack
from lmcache.testing.tiny_models import sample_tokens
from support.tiny_shapes import make_gemma3

pytestmark = pytest.mark.engine


def test_windows_are_restored_as_far_as_the_engine_keeps_them(
    tmp_path_factory: pytest.TempPathFactory, start_stack: Callable[..., Stack]
) -> None:
    pytest.importorskip("vllm")
    stack = start_stack(make_gemma3(tmp_path_factory.mktemp("models") / "gemma3"), l2=False)
    groups = int(stack.rpc("kv_watch")[0])
    assert groups > 1
    prompt = sample_tokens(3000, seed=1)
    chunks = 3000 // 256
    cold = stack.engine.complete(prompt, max_tokens=16)
    stack.wait_stored(groups * chunks)
    warm = stack.engine.complete(prompt, max_tokens=16)
    assert (warm.token_ids, warm.cached_tokens) == (cold.token_ids, chunks * 256)
    seen = stack.rpc("kv_seen")[0]
    assert all(seen["stored"][chunk] == digest for chunk, digest in seen["loaded"].items())
    assert chunks < len(seen["loaded"]) < groups * chunks  # all of one group, the windows of the others
    stack.wait_clean()

    # Block ids do not tell groups apart, so a spoilt chunk of one of them makes the whole request be computed again.
    assert stack.spoil_l1(range(groups * chunks)) == groups * chunks
    assert stack.engine.complete(prompt, max_tokens=16).token_ids == cold.token_ids
    assert "not what was stored" in stack.engine.log()
    stack.wait_stored(groups * chunks)
    again = stack.engine.complete(prompt, max_tokens=16)
    assert (again.token_ids, again.cached_tokens) == (cold.token_ids, chunks * 256)
    stack.wait_clean()
