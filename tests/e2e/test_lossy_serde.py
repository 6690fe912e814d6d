"""An engine that accepts a lossy serde loads what it left of its KV; everything that names KV is as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, until, whole_chunks
from lmcache.testing.tiny_models import sample_tokens

pytestmark = pytest.mark.engine


def test_what_comes_from_l2_is_approximate_and_what_comes_from_l1_is_not(
    llama: Path, start_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    spec = {"type": "fs_native", "base_path": str(tmp_path / "kv"), "serde": {"type": "fp8"}}
    stack = start_stack(
        llama,
        l2=False,
        dtype="bfloat16",
        server_flags=["--l2-adapter", json.dumps(spec)],
        extra_config={"lmcache.mp.lossy_serde": "fp8"},
    )
    prompt, chunks = sample_tokens(1100, seed=1), 4
    stack.rpc("kv_watch")
    cold = stack.engine.complete(prompt, max_tokens=8)
    stack.wait_stored(chunks)
    until(lambda: stack.server.status()["l2"]["adapters"][0]["objects"] == chunks)
    stack.forget_prefixes()
    from_l1 = stack.engine.complete(prompt, max_tokens=8)
    assert (cold.cached_tokens, from_l1.cached_tokens) == (0, whole_chunks(1100))
    [seen] = stack.rpc("kv_seen")
    exact = seen["stored"]
    assert len(seen["loaded"]) == chunks and seen["loaded"].items() <= exact.items()

    stack.server.stop()
    stack.restart_server()
    stack.forget_prefixes()
    from_l2 = stack.engine.complete(prompt, max_tokens=8)
    assert from_l2.cached_tokens == whole_chunks(1100)
    [seen] = stack.rpc("kv_seen")
    assert seen["loaded"].keys() == exact.keys()
    assert all(digest != exact[chunk] for chunk, digest in seen["loaded"].items())
    assert stack.server.metric("lmcache_mp_corrupt_frames_total") == 0
    stack.wait_clean()
