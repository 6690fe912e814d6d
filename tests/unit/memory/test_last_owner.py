"""The word of the L1 file that says which owner numbers were given out, when it is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.restart_compatibility import LAST_OWNER_WORD_OFFSET, RestartCompatibility
from lmcache.memory.server_memory import ServerMemory

CAPACITY = 1 << 20
COMPATIBILITY = RestartCompatibility(CAPACITY, 4096, 256, "blake3", bytes(32))
SIZE = COMPATIBILITY.first_offset + CAPACITY


@pytest.fixture
def name() -> Iterator[str]:
    name = f"lmcache-test-last-owner-{os.getpid()}"
    yield name
    if os.path.exists(f"/dev/shm/{name}"):
        os.unlink(f"/dev/shm/{name}")


def leave(name: str, last_owner: int | None = None) -> EngineMemory:
    """A server that gave out three numbers; the engine with the last one, which outlives it."""
    server = ServerMemory.create(name, SIZE, bytes(16), compatibility=COMPATIBILITY)
    server.grow(SIZE)
    engine = EngineMemory.attach(server.path, SIZE, bytes(16))
    numbers = [server.new_owner() for _ in range(3)]
    engine.lock_owner(numbers[0])
    engine.lock_owner(numbers[-1])
    if last_owner is not None:
        server.view(LAST_OWNER_WORD_OFFSET, 8)[:] = last_owner.to_bytes(8, "little")
    server.close()
    return engine


@pytest.mark.parametrize("word", [0, 1, 2, 3])
def test_a_word_that_is_too_small_gives_nobody_the_number_of_a_living_process(name: str, word: int) -> None:
    engine = leave(name, word)
    server = ServerMemory.recover(name, SIZE, b"2" * 16, COMPATIBILITY)
    assert server is not None
    try:
        owner = server.new_owner()
        assert owner == 4 and not server.owner_alive(owner)
    finally:
        engine.close()
        server.close()


@pytest.mark.parametrize("word", [2**64 - 1, 2**40, 2**32 + 3, 2**32 - 1, 2**31 + 1])
def test_numbers_that_would_run_out_are_not_gone_on_with(
    name: str, word: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Locks have 2^32 bytes: engines could not register any more."""
    engine = leave(name, word)
    assert ServerMemory.recover(name, SIZE, b"2" * 16, COMPATIBILITY) is None
    assert "its last owner number is damaged" in caplog.text
    server = ServerMemory.create(name, SIZE, b"2" * 16, compatibility=COMPATIBILITY)
    try:
        assert server.new_owner() == 1 and not server.owner_alive(1)
    finally:
        engine.close()
        server.close()
