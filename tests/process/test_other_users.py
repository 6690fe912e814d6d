"""What another user of the machine can do about L1, by a process of that user: nothing that is trusted."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache.core.limits import MIB
from lmcache.errors import ResourceError, ServerUnavailable
from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.header import HEADER_BYTES, Header
from lmcache.memory.server_memory import ServerMemory, refuse_unusable

SIZE_BYTES = 4 * MIB
EPOCH = bytes(range(16))
OURS, THEIRS = 12_001, 12_002
NAME = f"lmcache-test-users-{os.getpid()}"
PATH = Path("/dev/shm", NAME)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")


def as_user(uid: int, action: Callable[[], object]) -> None:
    """Runs it in a process of that user, and fails as it fails."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            action()
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as failure:
        text = failure.read()
    os.waitpid(pid, 0)
    assert not text, text


@pytest.fixture(autouse=True)
def no_file() -> Iterator[None]:
    yield
    PATH.unlink(missing_ok=True)


def plant(mode: int) -> None:
    """A file of the other user that looks exactly like the memory of a server."""
    PATH.write_bytes(Header(SIZE_BYTES, EPOCH, os.getpid()).pack())
    os.truncate(PATH, SIZE_BYTES)
    os.chmod(PATH, mode)


def test_l1_can_be_neither_read_nor_replaced_by_another_user() -> None:
    owned: list[ServerMemory] = []
    as_user(OURS, lambda: owned.append(ServerMemory.create(NAME, SIZE_BYTES, EPOCH)) or os._exit(0))
    assert PATH.stat().st_uid == OURS

    def meddle() -> None:
        for act in (
            lambda: os.open(PATH, os.O_RDONLY),
            lambda: os.open(PATH, os.O_RDWR),
            lambda: os.unlink(PATH),
            lambda: os.rename(PATH, PATH.with_suffix(".stolen")),
            lambda: os.chmod(PATH, 0o666),
            lambda: os.truncate(PATH, 0),
        ):
            with pytest.raises(PermissionError):
                act()
        with pytest.raises(ServerUnavailable, match="Permission denied"):
            EngineMemory.attach(str(PATH), SIZE_BYTES, EPOCH)

    as_user(THEIRS, meddle)
    as_user(OURS, lambda: EngineMemory.attach(str(PATH), SIZE_BYTES, EPOCH))


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_file_that_another_user_has_planted_is_used_by_nobody(mode: int) -> None:
    as_user(THEIRS, lambda: plant(mode))
    assert PATH.stat().st_size > HEADER_BYTES

    def start_and_attach() -> None:
        for start in (
            lambda: refuse_unusable(NAME, SIZE_BYTES, hugepages=False),
            lambda: ServerMemory.create(NAME, SIZE_BYTES, EPOCH),
        ):
            with pytest.raises(ResourceError, match="choose another --shm-name"):
                start()
        said = "belongs to user 12002" if mode == 0o666 else "Permission denied"
        with pytest.raises(ServerUnavailable, match=said):
            EngineMemory.attach(str(PATH), SIZE_BYTES, EPOCH)

    as_user(OURS, start_and_attach)


def test_a_link_that_another_user_has_planted_is_not_followed() -> None:
    target = PATH.with_suffix(".target")
    try:
        as_user(OURS, lambda: ServerMemory.create(target.name, SIZE_BYTES, EPOCH) and os._exit(0))
        as_user(THEIRS, lambda: os.symlink(target, PATH))

        def start_and_attach() -> None:
            with pytest.raises(ResourceError, match="symbolic link"):
                ServerMemory.create(NAME, SIZE_BYTES, EPOCH)
            with pytest.raises(ServerUnavailable, match="symbolic link"):
                EngineMemory.attach(str(PATH), SIZE_BYTES, EPOCH)

        as_user(OURS, start_and_attach)
        assert target.exists()
    finally:
        target.unlink(missing_ok=True)
