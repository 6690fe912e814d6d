"""Several turns of a chat: each finds the KV of everything before it, the engine's own answers included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, whole_chunks
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine


def test_each_turn_hits_the_prompt_and_the_answer_before_it(llama: Path, start_stack: Callable[..., Stack]) -> None:
    stack = start_stack(llama, l2=False, extra_config={"lmcache.mp.save_decode_cache": True})
    stack.rpc("kv_watch")
    text = sample_tokens(200, seed=1)  # less than a chunk
    held_tokens = 0
    for turn in range(3):
        answer = stack.engine.complete(text, max_tokens=200)
        assert answer.cached_tokens == whole_chunks(held_tokens)
        text = [*text, *answer.token_ids]
        held_tokens = len(text) - 1  # the last token was not fed back
        stack.wait_stored(whole_chunks(held_tokens) // 256)
        text += sample_tokens(60, seed=10 + turn)
    seen = stack.rpc("kv_seen")[0]
    assert len(seen["loaded"]) == whole_chunks(held_tokens - 260) // 256
    assert all(seen["stored"][chunk] == digest for chunk, digest in seen["loaded"].items())
    stack.wait_clean()
