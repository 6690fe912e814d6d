"""The same greedy tokens and the same KV bytes, wherever the KV of a prompt comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, whole_chunks
from lmcache.testing.processes import Completion
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine


class Bytes:
    """Digests of stored and loaded chunks over the starts of an engine."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.checked = 0

    def check(self, stack: Stack) -> None:
        """Every chunk that was loaded since the last watch is what was stored under its hash."""
        for worker in stack.rpc("kv_seen"):
            for chunk, digest in worker["stored"].items():
                assert self.stored.setdefault(chunk, digest) == digest
            for chunk, digest in worker["loaded"].items():
                assert self.stored[chunk] == digest
                self.checked += 1


def ask_all(stack: Stack, lengths: list[int]) -> list[Completion]:
    return [stack.engine.complete(sample_tokens(length, seed=length), max_tokens=24) for length in lengths]


def test_every_tier_gives_what_was_computed(llama: Path, start_stack: Callable[..., Stack]) -> None:
    lengths = [2100, 8192, 16384]
    stack = start_stack(llama)
    chunks = sum(length // 256 for length in lengths)
    bytes_seen = Bytes()
    stack.rpc("kv_watch")
    cold = ask_all(stack, lengths)
    assert [answer.cached_tokens for answer in cold] == [0] * len(lengths)

    def same_again(where: str) -> None:
        warm = ask_all(stack, lengths)
        assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold], where
        assert [answer.cached_tokens for answer in warm] == [whole_chunks(length) for length in lengths], where
        bytes_seen.check(stack)
        stack.wait_clean()

    stack.wait_stored(chunks, in_l2=True)
    same_again("from L1")
    computed_seconds = sum(answer.time_to_first_token_seconds for answer in cold)
    # By what the engine measured of its prefill.
    assert 0.1 < stack.server.metric("lmcache_mp_prefill_saved_seconds_total") / computed_seconds < 3.0
    stack.server.clear("l1")
    assert stack.server.status()["l1"]["objects"] == 0
    same_again("from L2")
    stack.server.kill()
    stack.restart_server()
    same_again("from L2 after kill -9 of the server")
    stack.restart_engine()
    stack.rpc("kv_watch")
    same_again("after a restart of the engine")
    assert bytes_seen.checked == 4 * chunks
