"""Two workers, each with its own half of the heads: one decision, two copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, until
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine


def test_each_rank_loads_what_it_stored(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(
        llama, workers=2, engine_flags=["--tensor-parallel-size", "2"], environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    )
    stack.rpc("kv_watch")
    prompt = sample_tokens(2100, seed=1)
    cold = stack.engine.complete(prompt, max_tokens=16)
    stack.wait_stored(2 * 8, in_l2=True)

    def hit() -> None:
        warm = stack.engine.complete(prompt, max_tokens=16)
        assert (warm.token_ids, warm.cached_tokens) == (cold.token_ids, 2048)

    def hit_in_l2() -> None:
        stack.wait_stored(2 * 8, in_l2=True)
        stack.server.clear("l1")
        hit()

    stack.unless_machine_stood_still(hit)
    stack.unless_machine_stood_still(hit_in_l2)
    first, second = stack.rpc("kv_seen")
    for rank in (first, second):
        assert len(rank["stored"]) == len(rank["loaded"]) == 8
        assert rank["stored"] == rank["loaded"]
    assert first["stored"] != second["stored"]

    stack.server.kill()
    assert stack.engine.complete(prompt, max_tokens=16).token_ids == cold.token_ids
    stack.restart_server()
    until(lambda: stack.engine.complete(prompt, max_tokens=16).cached_tokens == 2048)
    stack.wait_clean()
