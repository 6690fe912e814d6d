"""The word of the L1 file that says which owner numbers were given out, when it is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lmcache.memory.inheritance import LAST_OWNER_WORD_OFFSET, Inheritance
from lmcache.memory.shared_memory import SharedMemory

CAPACITY = 1 << 20
HEIR = Inheritance(CAPACITY, 4096, 256, "blake3", bytes(32))
SIZE = HEIR.first_offset + CAPACITY


@pytest.fixture
def name() -> Iterator[str]:
    name = f"lmcache-test-last-owner-{os.getpid()}"
    yield name
    if os.path.exists(f"/dev/shm/{name}"):
        os.unlink(f"/dev/shm/{name}")


def leave(name: str, last_owner: int | None = None) -> SharedMemory:
    """A server that gave out three numbers; the engine with the last one, which outlives it."""
    server = SharedMemory.create(name, SIZE, bytes(16), heir=HEIR)
    server.grow(SIZE)
    engine = SharedMemory.attach(server.path, SIZE, bytes(16))
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
    server = SharedMemory.take_over(name, SIZE, b"2" * 16, HEIR)
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
    assert SharedMemory.take_over(name, SIZE, b"2" * 16, HEIR) is None
    assert "its last owner number is damaged" in caplog.text
    server = SharedMemory.create(name, SIZE, b"2" * 16, heir=HEIR)
    try:
        assert server.new_owner() == 1 and not server.owner_alive(1)
    finally:
        engine.close()
        server.close()
