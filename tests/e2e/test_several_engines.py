"""One server for several engines of the same model in the same layout, which share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, until
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_replicas_are_told_apart_and_share_hits(llama: Path, start_stack: Callable[..., Stack]) -> None:
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
