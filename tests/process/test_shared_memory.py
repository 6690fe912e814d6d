"""The name of shared memory belongs to one live server. Real processes, really killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.core.limits import MIB
from lmcache.errors import ConfigError, ResourceError, ServerUnavailable
from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.memory_limit import MemoryLimit, MemoryProbe
from lmcache.memory.server_memory import ServerMemory
from lmcache.testing.processes import stop_running
from polling import until
from support.small_machine import machine_with

SIZE = 4 * MIB
TOKEN = bytes(range(16))
OTHER_TOKEN = bytes(16)
DEADLINE_SECONDS = 20.0

CHILD_PRELUDE = """
import os, sys
from lmcache.errors import LMCacheError
from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.server_memory import ServerMemory
name, path, token = sys.argv[1], "/dev/shm/" + sys.argv[1], bytes(range(16))
def say(line):
    print(line, flush=True)
"""


class Child:
    """A Python process that says a line when it has got somewhere and then waits for input."""

    def __init__(self, body: str, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD_PRELUDE + body, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)

    def end(self) -> int:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        return self.process.returncode


SERVER = f"""
memory = ServerMemory.create(name, {SIZE}, token)
memory.grow({SIZE})
memory.view(4096, 5)[:] = b"hello"
say("ready")
sys.stdin.readline()
memory.close()
say("closed")
"""


@contextlib.contextmanager
def child(body: str, name: str) -> Iterator[Child]:
    running = Child(body, name)
    try:
        yield running
    finally:
        running.end()


@pytest.fixture
def name() -> Iterator[str]:
    name = f"lmcache_test_{os.getpid()}_{secrets.token_hex(4)}"
    yield name
    left = Path("/dev/shm") / name
    existed = left.exists()
    left.unlink(missing_ok=True)
    assert not existed, "the test left shared memory behind"


def test_a_second_server_is_refused_and_disturbs_nothing(name: str) -> None:
    with child(SERVER, name) as server:
        assert server.line() == "ready"
        with pytest.raises(ResourceError, match=f'"{name}" is in use by a running server .*--shm-name') as refusal:
            ServerMemory.create(name, SIZE, OTHER_TOKEN)
        assert f"process {server.process.pid}" in str(refusal.value)
        memory = EngineMemory.attach(f"/dev/shm/{name}", SIZE, TOKEN)
        assert bytes(memory.view(4096, 5)) == b"hello"
        memory.close()
        server.go_on()
        assert server.line() == "closed"
        assert not os.path.exists(f"/dev/shm/{name}")


def test_what_a_killed_server_left_is_replaced_while_engines_keep_their_mapping(name: str) -> None:
    with child(SERVER, name) as server:
        assert server.line() == "ready"
        engine = EngineMemory.attach(f"/dev/shm/{name}", SIZE, TOKEN)
        server.kill()
    assert os.path.exists(f"/dev/shm/{name}")
    with contextlib.closing(ServerMemory.create(name, SIZE, OTHER_TOKEN)) as successor:
        assert bytes(engine.view(4096, 5)) == b"hello"
        successor.grow(SIZE)
        assert bytes(successor.view(4096, 5)) == bytes(5)
        engine.view(4096, 5)[:] = b"late!"
        assert bytes(successor.view(4096, 5)) == bytes(5)
        with pytest.raises(ServerUnavailable, match="another server epoch"):
            EngineMemory.attach(f"/dev/shm/{name}", SIZE, TOKEN)
        engine.close()
    assert not os.path.exists(f"/dev/shm/{name}")


def test_a_server_that_was_replaced_does_not_remove_its_successor(name: str) -> None:
    first = ServerMemory.create(name, SIZE, TOKEN)
    os.unlink(first.path)  # what an operator may do
    second = ServerMemory.create(name, SIZE, OTHER_TOKEN)
    first.close()
    assert os.path.exists(second.path)
    EngineMemory.attach(second.path, SIZE, OTHER_TOKEN).close()
    second.close()
    second.close()


def test_many_servers_at_once_leave_one_owner(name: str) -> None:
    body = f"""
sys.stdin.readline()
try:
    memory = ServerMemory.create(name, {SIZE}, token)
except LMCacheError as error:
    say("refused")
else:
    say("owner")
sys.stdin.readline()
"""
    # The file of a dead server lies there too, so that all of them race to replace it.
    with child(SERVER, name) as dead:
        assert dead.line() == "ready"
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(child(body, name)) for _ in range(5)]
        for racer in racers:
            racer.go_on()
        answers = [racer.line() for racer in racers]
    assert sorted(answers) == ["owner", *["refused"] * 4]
    ServerMemory.create(name, SIZE, TOKEN).close()


def test_mode_is_private(name: str) -> None:
    old_mask = os.umask(0)
    try:
        memory = ServerMemory.create(name, SIZE, TOKEN)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(os.stat(memory.path).st_mode) == 0o600
    memory.close()


def test_a_foreign_file_is_never_touched(name: str) -> None:
    path = Path("/dev/shm") / name
    for content in (b"", b"somebody's data" * 1000):
        path.write_bytes(content)
        with pytest.raises(ResourceError, match="not L1 memory of this user; remove it or choose another --shm-name"):
            ServerMemory.create(name, SIZE, TOKEN)
        assert path.read_bytes() == content
        path.unlink()
    target = path.with_name(name + "_target")
    target.write_bytes(b"precious")
    path.symlink_to(target)
    with pytest.raises(ResourceError, match="symbolic link"):
        ServerMemory.create(name, SIZE, TOKEN)
    with pytest.raises(ServerUnavailable, match="cannot open"):
        EngineMemory.attach(str(path), SIZE, TOKEN)
    assert target.read_bytes() == b"precious"
    path.unlink()
    target.unlink()


@pytest.mark.parametrize("bad_name", ["", ".", "..", "a/b", "../etc", "n\0ul", "x" * 300])
def test_a_name_cannot_leave_its_folder(bad_name: str) -> None:
    with pytest.raises(ConfigError, match="plain file name"):
        ServerMemory.create(bad_name, SIZE, TOKEN)


def test_more_than_the_machine_has_is_refused_before_anything_is_made(name: str) -> None:
    with pytest.raises(ResourceError, match=r"L1 needs .* GiB, but .* leaves .* GiB; choose a smaller --l1-size-gb"):
        ServerMemory.create(name, 1 << 45, TOKEN)
    assert not os.path.exists(f"/dev/shm/{name}")


def test_growth_stops_with_a_sentence_when_memory_runs_out(name: str, tmp_path: Path) -> None:
    memory = ServerMemory.create(name, 256 * MIB, TOKEN, probe=machine_with(tmp_path, 256))
    try:
        machine_with(tmp_path, 100)
        memory.grow(64 * MIB)
        machine_with(tmp_path, 10)
        with pytest.raises(
            ResourceError, match=r"growing L1 .* needs 0\.06 GiB, but this machine's memory leaves 0\.01"
        ):
            memory.grow(256 * MIB)
        assert memory.committed_bytes == 64 * MIB
        assert os.stat(memory.path).st_blocks * 512 == 64 * MIB
    finally:
        memory.close()


class Unasked(MemoryProbe):
    """Knows of no limit, so that only fallocate itself can refuse."""

    def available_limits(self, directory: Path) -> Iterator[MemoryLimit]:
        return iter(())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_file_system_is_an_error_and_never_sigbus(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount here")
    try:
        with pytest.raises(ResourceError, match=f"but {folder} leaves 0.01 GiB; .*enlarge it"):
            ServerMemory.create("l1", 16 * MIB, TOKEN, directory=folder)
        memory = ServerMemory.create("l1", 7 * MIB, TOKEN, directory=folder, probe=Unasked())
        (folder / "other").write_bytes(bytes(4 * MIB))  # somebody else takes the room
        with pytest.raises(ResourceError, match="cannot grow beyond 0 MiB: No space left on device"):
            memory.grow(7 * MIB)
        memory.grow(2 * MIB)
        memory.view(0, 2 * MIB)[4096:] = bytes([7]) * (2 * MIB - 4096)
        memory.close()
        assert os.listdir(folder) == ["other"]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_attaching_checks_what_it_is_given(name: str) -> None:
    with contextlib.closing(ServerMemory.create(name, SIZE, TOKEN)) as memory:
        with pytest.raises(ServerUnavailable, match="another server epoch"):
            EngineMemory.attach(memory.path, SIZE, OTHER_TOKEN)
        with pytest.raises(ServerUnavailable, match="another server epoch"):
            EngineMemory.attach(memory.path, SIZE + 4096, TOKEN)
        with pytest.raises(ServerUnavailable, match="No such file"):
            EngineMemory.attach(memory.path + "_not", SIZE, TOKEN)
        memory.view(0, 1)[0] ^= 0xFF
        with pytest.raises(ServerUnavailable, match="not shared memory of this version"):
            EngineMemory.attach(memory.path, SIZE, TOKEN)
        memory.view(0, 1)[0] ^= 0xFF
        with pytest.raises(ValueError, match="not inside"):
            memory.view(SIZE - 1, 2)


ENGINE = f"""
memory = EngineMemory.attach(path, {SIZE}, token)
memory.lock_owner(5)
say("locked")
sys.stdin.readline()
memory.unlock_owner(5)
say("unlocked")
sys.stdin.readline()
"""


def test_a_worker_counts_as_running_while_its_byte_is_locked(name: str) -> None:
    with contextlib.closing(ServerMemory.create(name, SIZE, TOKEN)) as memory:
        assert not memory.owner_alive(5)
        with child(ENGINE, name) as engine:
            assert engine.line() == "locked"
            assert [memory.owner_alive(owner) for owner in (4, 5, 6)] == [False, True, False]
            with (
                contextlib.closing(EngineMemory.attach(memory.path, SIZE, TOKEN)) as other,
                pytest.raises(ResourceError, match="owner 5"),
            ):
                other.lock_owner(5)
            assert memory.owner_alive(5)
            engine.go_on()
            assert engine.line() == "unlocked"
            assert not memory.owner_alive(5)


def test_a_killed_worker_is_known_to_be_gone(name: str) -> None:
    with contextlib.closing(ServerMemory.create(name, SIZE, TOKEN)) as memory, child(ENGINE, name) as engine:
        assert engine.line() == "locked"
        engine.kill()
        assert not memory.owner_alive(5)


def test_a_worker_that_hangs_is_still_alive(name: str) -> None:
    with contextlib.closing(ServerMemory.create(name, SIZE, TOKEN)) as memory, child(ENGINE, name) as engine:
        assert engine.line() == "locked"
        stop_running(engine.process.pid)
        assert memory.owner_alive(5)


def test_two_attachments_in_one_process_are_two_workers(name: str) -> None:
    with contextlib.closing(ServerMemory.create(name, SIZE, TOKEN)) as memory:
        first = EngineMemory.attach(memory.path, SIZE, TOKEN)
        second = EngineMemory.attach(memory.path, SIZE, TOKEN)
        first.lock_owner(1)
        second.lock_owner(2)
        second.close()
        assert (memory.owner_alive(1), memory.owner_alive(2)) == (True, False)
        first.close()
        assert not memory.owner_alive(1)


FORKER = """
if "serve" in sys.argv[1]:
    memory = ServerMemory.create(name, SIZE, token)
else:
    memory = EngineMemory.attach(path, SIZE, token)
    memory.lock_owner(5)
child = os.fork()
if child == 0:
    memory.close()
    say(str(os.getpid()))
    os.read(0, 1)
    os._exit(0)
sys.stdin.readline()
""".replace("SIZE", str(SIZE))


def test_a_forked_child_keeps_no_lock_of_a_dead_worker(name: str) -> None:
    with (
        contextlib.closing(ServerMemory.create(name, SIZE, TOKEN)) as memory,
        child(FORKER, name) as engine,
    ):
        forked = int(engine.line())
        assert memory.owner_alive(5)
        engine.kill()
        try:
            assert os.path.exists(f"/proc/{forked}")
            until(lambda: not memory.owner_alive(5))
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_forked_child_neither_removes_nor_keeps_a_servers_memory(name: str) -> None:
    name += "_serve"
    with child(FORKER, name) as server:
        forked = int(server.line())
        with pytest.raises(ResourceError, match="in use by a running server"):
            ServerMemory.create(name, SIZE, TOKEN)
        server.kill()
        try:
            assert os.path.exists(f"/dev/shm/{name}")
            ServerMemory.create(name, SIZE, TOKEN).close()
        finally:
            os.kill(forked, signal.SIGKILL)


def test_views_outlive_close(name: str) -> None:
    memory = ServerMemory.create(name, SIZE, TOKEN)
    view = memory.view(4096, 4)
    memory.close()
    view[:] = b"fine"
    assert bytes(view) == b"fine"
    assert not os.path.exists(memory.path)
