"""CURVE with a real engine: without a key that is let in it runs uncached and says why, with one it hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.harness import Stack, until, whole_chunks
from lmcache.cli.main import main
from lmcache.testing.tiny_models import sample_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NOT_LET_IN = "does not let"


def test_an_engine_hits_when_its_key_is_let_in_and_computes_when_it_is_not(
    llama: Path, start_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    for name in ("server", "stranger", "engine"):
        assert main(["keygen", name, "--folder", str(tmp_path), "-q"]) == 0
    allowed, own = tmp_path / "clients" / "engine.pub", tmp_path / "own.key"
    allowed.parent.mkdir(mode=0o700)
    allowed.write_text((tmp_path / "engine.pub").read_text())
    own.touch(mode=0o600)
    own.write_text((tmp_path / "stranger.key").read_text())
    stack = start_stack(
        llama,
        l2=False,
        l1_size_gb=0.125,
        server_flags=[
            *("--zmq-curve-server-key-file", str(tmp_path / "server.key")),
            *("--zmq-curve-client-keys-dir", str(allowed.parent)),
        ],
        extra_config={
            "lmcache.mp.curve_server_key_file": str(tmp_path / "server.pub"),
            "lmcache.mp.curve_client_key_file": str(own),
        },
    )
    prompt = sample_tokens(2048, seed=7)
    until(lambda: NOT_LET_IN in stack.engine.log())
    for _ in range(2):
        stranger = stack.engine.complete(prompt)
        assert stranger.cached_tokens == 0
    status = stack.server.status()
    assert (status["instances"], status["l1"]["objects"]) == ([], 0)

    own.write_text((tmp_path / "engine.key").read_text())  # read again for the next connection
    stack.wait_registered()
    # The scheduler has a connection of its own, which comes back in its own time.
    until(lambda: stack.engine.complete(prompt).cached_tokens == whole_chunks(len(prompt)))
    warm = stack.engine.complete(prompt)
    assert warm.cached_tokens == whole_chunks(len(prompt))
    assert warm.token_ids == stranger.token_ids

    said = stack.engine.log().count(NOT_LET_IN)
    allowed.unlink()
    until(lambda: stack.engine.log().count(NOT_LET_IN) > said)
    shut_out = stack.engine.complete(prompt)
    assert (shut_out.token_ids, shut_out.cached_tokens) == (warm.token_ids, 0)
    allowed.write_text((tmp_path / "engine.pub").read_text())
    stack.wait_registered()
    until(lambda: stack.engine.complete(prompt).cached_tokens == whole_chunks(len(prompt)))
    stack.wait_clean()
