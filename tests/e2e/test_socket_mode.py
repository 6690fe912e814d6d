"""An engine that may not use shared memory gets the same bytes and the same tokens over the socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, whole_chunks
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine


def test_tokens_and_bytes_are_those_of_the_cold_run(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(llama, l2=False, extra_config={"lmcache.mp.transfer_mode": "socket"})
    lengths = [700, 8192]
    stack.rpc("kv_watch")
    prompts = [sample_tokens(length, seed=length) for length in lengths]
    cold = [stack.engine.complete(prompt, max_tokens=24) for prompt in prompts]
    assert [answer.cached_tokens for answer in cold] == [0, 0]
    stack.wait_stored(sum(length // 256 for length in lengths))
    warm = [stack.engine.complete(prompt, max_tokens=24) for prompt in prompts]
    print("time to first token, ms:", [round(1e3 * answer.time_to_first_token_seconds) for answer in (*cold, *warm)])
    assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold]
    assert [answer.cached_tokens for answer in warm] == [whole_chunks(length) for length in lengths]
    [seen] = stack.rpc("kv_seen")
    assert len(seen["loaded"]) == sum(length // 256 for length in lengths)
    assert all(seen["stored"][chunk] == digest for chunk, digest in seen["loaded"].items())
    [instance] = stack.server.status()["instances"]
    assert [worker["mode"] for worker in instance["transfer"]] == ["socket"]
    assert "KV travels over the socket" in stack.engine.log()
    assert "transfer mode socket" in stack.server.log()
    stack.wait_clean()
