"""A worker in every transfer mode, for the tests that have PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmcache.integration.engine import storer
from lmcache.memory.server_memory import ServerMemory

if TYPE_CHECKING:
    from unit.integration.engine.workers import Worker


@pytest.fixture
def memory() -> Iterator[ServerMemory]:
    from unit.integration.engine.workers import EPOCH, MEMORY_BYTES

    shared = ServerMemory.create(f"lmcache-test-worker-{os.getpid()}", MEMORY_BYTES, EPOCH)
    shared.grow(MEMORY_BYTES)
    yield shared
    shared.close()
    assert not Path(shared.path).exists()


@pytest.fixture(params=["shm", "socket", "gpu shm", "gpu socket"])
def mode(request: pytest.FixtureRequest) -> str:
    """All transfer modes come to the same, wherever KV lies."""
    if request.param.startswith("gpu"):
        request.getfixturevalue("fake_cuda")
    return str(request.param)


@pytest.fixture
def worker(memory: ServerMemory, mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    from unit.integration.engine.workers import Worker

    monkeypatch.setattr(storer, "_RETRY_SECONDS", 0.05)
    made = Worker(memory, mode)
    yield made
    made.side.close()
