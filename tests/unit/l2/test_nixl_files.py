"""NIXL itself: agents, the threads that they are on, and files moved by them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from lmcache import _native
from lmcache.clock import SystemClock
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapters import folder
from lmcache.l2.adapters.nixl_agent import Agent, AgentSettings, Range, refuse_missing_plugin
from lmcache.l2.adapters.nixl_files import NixlFiles, ranges_of, write_plainly
from lmcache.l2.adapters.nixl_lanes import Lanes
from lmcache.testing.frames import FrameMemory, keys
from services import nixl
from unit.l2.support import OneServer, run

T = TypeVar("T")

WHERE = "--l2-adapter 1 (nixl_store)"
POSIX = AgentSettings(WHERE, "POSIX", {})


@pytest.fixture(autouse=True)
def _installed() -> None:
    nixl.need()


def with_files(path: Path, test: Callable[[NixlFiles], Awaitable[T]], settings: AgentSettings = POSIX) -> T:
    async def whole() -> T:
        files = NixlFiles(str(path), Lanes("test", settings, 1), direct=False, clock=SystemClock())
        try:
            return await test(files)
        finally:
            await files.close()

    return asyncio.run(whole())


class Opened:
    """Files of a folder, open for reading and writing."""

    def __init__(self, path: Path, count: int) -> None:
        self.fds = [os.open(path / f"file-{at}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for at in range(count)]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def test_a_transfer_moves_exactly_its_ranges(tmp_path: Path) -> None:
    memory, target, opened = FrameMemory(4), FrameMemory(6), Opened(tmp_path, 4)
    for slot, key in enumerate(keys(4)):
        memory.fill(slot, key)
    agent = Agent(POSIX)
    assert agent.transfer_files("WRITE", ranges_of(memory.buffers), opened.fds) == [True] * 4
    assert agent.transfer_files("READ", ranges_of(target.buffers[1:5]), opened.fds) == [True] * 4
    assert target.buffers[1:5] == memory.buffers
    assert not any(target.buffers[0]) and not any(target.buffers[5])
    agent.close()
    opened.close()


def test_memory_and_files_of_the_settings_are_registered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = nixl.note_registrations(monkeypatch)
    memory, opened = FrameMemory(8), Opened(tmp_path, 4)
    region = Range(memory.address(0), 4 * memory.slot_bytes)  # the other half is outside
    agent = Agent(AgentSettings(WHERE, "POSIX", {}, region, files=opened.fds))
    for slot, key in enumerate(keys(8)):
        memory.fill(slot, key)
    for half in (memory.buffers[:4], memory.buffers[4:], memory.buffers[2:6]):
        before = [bytes(buffer) for buffer in half]
        assert agent.transfer_files("WRITE", ranges_of(half), opened.fds) == [True] * 4
        for buffer in half:
            buffer[:] = bytes(buffer.nbytes)
        assert agent.transfer_files("READ", ranges_of(half), opened.fds) == [True] * 4
        assert [bytes(buffer) for buffer in half] == before
    # Memory and files with the agent; then what lies outside, once for a transfer: none, four buffers, two.
    assert [count for _, count in noted] == [1, 4, 4, 4, 2, 2]
    agent.close()
    opened.close()


def test_one_bad_file_of_a_batch_costs_nothing_but_itself(tmp_path: Path) -> None:
    memory, opened = FrameMemory(4), Opened(tmp_path, 4)
    for slot, key in enumerate(keys(4)):
        memory.fill(slot, key)
    region = Range(memory.address(0), 4 * memory.slot_bytes)
    agent = Agent(AgentSettings(WHERE, "POSIX", {}, region, files=opened.fds[:2]))
    assert agent.transfer_files("WRITE", ranges_of(memory.buffers), opened.fds) == [True] * 4
    os.truncate(tmp_path / "file-1", 5000)
    assert agent.transfer_files("READ", ranges_of(memory.buffers), opened.fds) == [True, False, True, True]
    os.close(opened.fds[2])
    assert agent.transfer_files("READ", ranges_of(memory.buffers), opened.fds) == [True, False, False, True]
    assert agent.transfer_files("READ", ranges_of(memory.buffers[3:]), opened.fds[3:]) == [True]
    agent.close()
    for fd in (opened.fds[0], opened.fds[1], opened.fds[3]):
        os.close(fd)


@pytest.mark.parametrize(("backend", "needs"), [("HF3FS", "3FS"), ("GDS", "nvidia-fs"), ("GDS_MT", "nvidia-fs")])
def test_a_missing_plugin_or_driver_is_one_sentence(
    backend: str, needs: str, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = None
    try:
        agent = Agent(AgentSettings(WHERE, backend, {}))
    except ResourceError as error:
        assert "\n" not in str(error) and f'"{backend}"' in str(error)
    if agent is not None:
        pytest.skip(f"this machine can use {backend}")
    with pytest.raises(ResourceError) as caught:
        refuse_missing_plugin(WHERE, backend)
    sentence = str(caught.value)
    assert f'no usable plugin for "backend" "{backend}"' in sentence and needs in sentence and "\n" not in sentence


def test_what_cannot_be_a_frame_of_its_key_is_bad(tmp_path: Path) -> None:
    wanted, memory, target = keys(5), FrameMemory(5), FrameMemory(5)
    buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
    paths = [folder.object_path(str(tmp_path), key.namespace.digest.hex(), key.chunk_hash.hex()) for key in wanted]

    async def test(files: NixlFiles) -> None:
        written = await files.write(paths, [f"{path}.tmp" for path in paths], buffers)
        assert list(written.values) == [buffer.nbytes for buffer in buffers] and not any(written.errors)
        os.truncate(paths[1], 4096)
        os.unlink(paths[2])
        os.rename(paths[4], paths[3])
        os.mkfifo(paths[4])  # nobody ever writes to it
        for buffer in target.buffers:  # what an earlier use of the memory left is no frame
            buffer[:] = buffers[0]
        read = await files.read_frames(str(tmp_path), wanted, target.buffers)
        assert list(read.errors) == [0, errno.EBADMSG, errno.ENOENT, errno.EBADMSG, errno.EBADMSG]
        assert target.holds(0, wanted[0])

    with_files(tmp_path, test)


def test_a_write_ends_at_the_first_fault_and_leaves_no_other_file(tmp_path: Path) -> None:
    wanted, memory = keys(4), FrameMemory(4)
    buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
    paths = [str(tmp_path / "a" / f"{at}.data") for at in range(4)]
    temporary = [f"{path}.tmp" for path in paths]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "2.data").mkdir()  # nothing is renamed onto a folder

    async def test(files: NixlFiles) -> None:
        values, errors = await files.write(paths, temporary, buffers)
        assert list(errors) == [0, 0, errno.EISDIR, errno.ECANCELED] and list(values)[2:] == [-1, -1]
        (tmp_path / "a" / "2.data").rmdir()
        (tmp_path / "a" / "1.data.tmp").touch()  # somebody else's
        values, errors = await files.write(paths, temporary, buffers)
        assert list(errors) == [0, errno.EEXIST, errno.ECANCELED, errno.ECANCELED]
        assert sorted(os.listdir(tmp_path / "a")) == ["0.data", "1.data", "1.data.tmp"]

    with_files(tmp_path, test)


def test_folders_that_are_removed_while_they_are_made_cost_no_store(tmp_path: Path) -> None:
    (key,) = keys(1)
    buffers = [FrameMemory(1).fill(0, key)]
    over = threading.Event()

    def remove() -> None:
        while not over.wait(0.0002):
            with contextlib.suppress(OSError):
                (tmp_path / "a").rmdir()

    async def test(files: NixlFiles) -> None:
        remover = threading.Thread(target=remove)
        remover.start()
        try:
            for number in range(300):
                path = str(tmp_path / "a" / str(number) / "file.data")
                assert list((await files.write([path], [path + ".tmp"], buffers)).errors) == [0]
                await asyncio.to_thread(shutil.rmtree, tmp_path / "a" / str(number))
        finally:
            over.set()
            remover.join()

    with_files(tmp_path, test)


def test_a_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(OSError) as caught:
        write_plainly(fd, FrameMemory(1).buffers[0])
    os.close(fd)
    assert caught.value.errno == errno.ENOSPC


def test_a_cancelled_call_ends_when_its_transfer_has_ended(tmp_path: Path) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def slow(_: Agent) -> None:
        may_end.wait(30)
        ended.set()

    async def whole() -> None:
        lanes = Lanes("test", POSIX, 1)
        await lanes.open()
        task = asyncio.ensure_future(lanes.run(slow))
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        await lanes.close()
        with pytest.raises(AdapterError, match="closed"):
            await lanes.run(slow)

    asyncio.run(whole())


def test_a_backend_that_refuses_its_parameters_is_said_without_them(capfd: pytest.CaptureFixture[str]) -> None:
    async def whole() -> None:
        lanes = Lanes("test", AgentSettings(WHERE, "OBJ", {"secret_key": "planted-secret", "bucket": ""}), 1)
        try:
            await lanes.open()
        finally:
            await lanes.close()

    with pytest.raises(ResourceError) as caught:
        asyncio.run(whole())
    shown = str(caught.value) + repr(AgentSettings(WHERE, "OBJ", {"secret_key": "planted-secret"}))
    assert "cannot be used with these" in shown and "planted-secret" not in shown + "".join(capfd.readouterr())


def test_loading_nixl_does_not_load_torch() -> None:
    program = "import sys; from lmcache.l2.adapters.nixl_agent import load_bindings; load_bindings(''); "
    program += "sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


def test_buffer_addresses_are_what_ranges_name() -> None:
    memory = FrameMemory(2)
    assert ranges_of(memory.buffers)[1] == (_native.buffer_address(memory.buffers[1]), memory.slot_bytes)


def test_what_another_server_stored_is_found_when_it_is_asked_for(tmp_path: Path) -> None:
    """Also by a server whose adapter has nothing to do with NIXL."""
    params = {"file_path": str(tmp_path), "use_direct_io": "false"}
    by_nixl = {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": params}
    plain = {"type": "fs_native", "base_path": str(tmp_path), "io_engine": "posix"}

    async def whole() -> None:
        async with OneServer(by_nixl) as first, OneServer(by_nixl) as second, OneServer(plain) as third:
            assert await first.store(4) == [StoreOutcome.STORED] * 4
            for other in (second, third):
                assert other.runner.knows(keys(4)) == [False] * 4, "nobody told it"
                assert all(await other.runner.probe(keys(4)))
                assert await other.load(4) == [LoadOutcome.LOADED] * 4
                assert await other.load(4, seed=9) == [LoadOutcome.MISSING] * 4
            assert await third.store(2, seed=5) == [StoreOutcome.STORED] * 2
            assert await first.load(2, seed=5) == [LoadOutcome.LOADED] * 2

    run(whole)
