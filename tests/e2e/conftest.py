from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama with 8 KiB of KV a token."""
    pytest.importorskip("vllm")
    from lmcache.testing.tiny_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Starts a server and an engine; only one pair runs at a time."""
    running: list[Stack] = []

    def start(model: Path, **options: Any) -> Stack:
        for previous in running:
            previous.close()
        running.clear()
        stack = Stack(model, tmp_path_factory.mktemp("stack"), **options)
        running.append(stack)
        return stack

    yield start
    for stack in running:
        stack.close()
