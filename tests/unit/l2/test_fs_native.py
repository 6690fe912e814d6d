"""fs_native on real folders: what it refuses, recovers, cleans and survives."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.limits import GIB, L2_BREAKER_OPEN_SECONDS, MAX_QUARANTINE_FILES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import ResourceError
from lmcache.l2.adapters import fs_native
from lmcache.l2.adapters.folder_lease import FolderLease
from lmcache.testing.frames import FrameMemory, keys, namespace
from manual_clock import ManualClock
from unit.l2.support import OneServer, eviction_order, run

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")


class Server(OneServer):
    def __init__(self, base: Path, clock: ManualClock | None = None, **settings: Any) -> None:
        super().__init__({"type": "fs_native", "base_path": str(base), **settings}, clock)


def data_files(base: Path) -> list[Path]:
    return sorted(path for path in base.rglob("*.data") if "quarantine" not in path.parts)


def disk_bytes(base: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [base, *base.rglob("*")])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB, full with 62 objects of 16 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_names_and_modes(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            await server.store(2)
            digest = namespace().digest.hex()
            hashes = [key.chunk_hash.hex() for key in keys(2)]
            assert data_files(tmp_path) == sorted(tmp_path / digest / h[:2] / f"{h}.data" for h in hashes)
            assert all(path.stat().st_mode & 0o007 == 0 for path in tmp_path.rglob("*"))
        assert not list(tmp_path.rglob("*.tmp")) and not list((tmp_path / ".lmcache" / "writers").iterdir())

    run(test)


# ---- recovery ------------------------------------------------------------------------------------------------------
def test_accounting_and_recency_survive_a_restart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_capacity_gb": 1, "eviction": {"eviction_policy": "LRU"}}

    async def test() -> None:
        async with Server(tmp_path, **settings) as server:
            await server.store(4, seed=1)
            await server.store(4, seed=2)
            await server.load(2, seed=1)
            before = server.runner.status()["used_bytes"]
        async with Server(tmp_path, **settings) as server:
            assert server.runner.status()["objects"] == 8
            assert server.runner.status()["used_bytes"] == before
            victims = eviction_order(server.runner.ledger)
            first, second = keys(4, 1), keys(4, 2)
            assert victims == [first[3], first[2], *second[::-1], first[1], first[0]]

    run(test)


def test_the_order_of_a_batch_does_not_depend_on_when_its_files_were_written(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            await server.store(8)
            times = [name.stat() for name in data_files(tmp_path)]
            assert all(info.st_mtime_ns == info.st_atime_ns for info in times)
            assert len({info.st_mtime_ns for info in times}) == 8

    run(test)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = [
        tmp_path / "README",
        tmp_path / ("a" * 64) / "aa" / f"{'ab' * 32}.dat",
        tmp_path / ("b" * 64) / "bb" / f"{'aa' * 32}.data",  # under the wrong fan-out
        tmp_path / "some.tmp",
        tmp_path / "data" / "x.data",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not ours")

    async def test() -> None:
        async with Server(tmp_path, persist_enabled=False) as server:
            await server.store()
            assert server.runner.status()["objects"] == 8
            await server.runner.clear()
            await server.store()
        assert [path.read_bytes() for path in foreign] == [b"not ours"] * len(foreign)
        assert len(data_files(tmp_path)) == 2  # the two foreign ones of that name

    run(test)


def test_a_namespace_that_nobody_can_name_counts_and_can_be_cleared(tmp_path: Path) -> None:
    nameless = tmp_path / ("c" * 64) / "ab" / f"{'ab' * 32}.data"
    nameless.parent.mkdir(parents=True)
    nameless.write_bytes(bytes(50_000))

    async def test() -> None:
        async with Server(tmp_path) as server:
            assert server.runner.status()["objects"] == 1
            assert server.runner.status()["used_bytes"] >= disk_bytes(tmp_path)
            assert await server.runner.clear() == (1, 53_248)
            assert not nameless.exists()

    run(test)


def test_a_sparse_file_hides_no_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            await server.store(4)
        sparse = tmp_path / ("c" * 64) / "ab" / f"{'ab' * 32}.data"
        sparse.parent.mkdir(parents=True)
        sparse.touch()
        os.truncate(sparse, 2 << 40)
        async with Server(tmp_path) as server:
            assert server.runner.status()["objects"] == 5

    run(test)


def test_what_is_moved_aside_does_not_hide_what_nobody_can_name(tmp_path: Path) -> None:
    nameless = tmp_path / ("c" * 64) / "ab" / f"{'ab' * 32}.data"
    nameless.parent.mkdir(parents=True)
    nameless.write_bytes(bytes(500_000))

    async def test() -> None:
        async with Server(tmp_path) as server:
            assert await server.store(1) == [StoreOutcome.STORED]
            (file,) = (path for path in data_files(tmp_path) if path != nameless)
            file.write_bytes(bytes(file.stat().st_size))
            assert await server.load(1) == [LoadOutcome.CORRUPT]
            assert server.runner.status()["used_bytes"] >= disk_bytes(tmp_path)

    run(test)


def test_temporary_files_of_the_dead_go_and_of_the_living_stay(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as living, Server(tmp_path, relative_tmp_dir="tmp"):
            await living.store(1)
            folder = data_files(tmp_path)[0].parent
            mine = folder / f".{'0' * 64}.{next(iter((tmp_path / '.lmcache/writers').iterdir())).name}.1.tmp"
            dead = [folder / f".{'0' * 64}.{'d' * 16}.1.tmp", tmp_path / "tmp" / f"{'e' * 16}.7.tmp"]
            theirs = folder / "their.tmp"
            # What kill -9 leaves: a writer's file that nobody locks.
            (tmp_path / ".lmcache" / "writers" / ("d" * 16)).write_bytes(os.uname().nodename.encode())
            for path in (mine, *dead, theirs):
                path.write_bytes(b"half")
            async with Server(tmp_path, relative_tmp_dir="tmp"):
                assert mine.exists() and theirs.exists()
                assert not any(path.exists() for path in dead)
                assert not (tmp_path / ".lmcache" / "writers" / ("d" * 16)).exists()

    run(test)


def test_a_silent_writer_of_another_host_counts_as_running_for_a_while(tmp_path: Path) -> None:
    writer = FolderLease(str(tmp_path), os.urandom)
    other = tmp_path / ".lmcache" / "writers" / ("f" * 16)
    other.write_bytes(b"another-host")
    assert writer.others() == {"f" * 16}
    os.utime(other, (time.time() - 3600, time.time() - 3600))
    assert writer.others() == set() and not other.exists()
    writer.close()
    writer.close()


# ---- several servers -----------------------------------------------------------------------------------------------
def test_servers_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_native, "WATCH_SECONDS", 0.02)

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def test() -> None:
        async with Server(tmp_path) as first, Server(tmp_path) as second:
            await first.store(4, seed=1)
            assert await second.runner.probe(keys(4, 1)) == [True] * 4  # found without a scan
            assert await second.load(4, seed=1) == [LoadOutcome.LOADED] * 4
            await first.store(4, seed=2)
            await until(lambda: second.runner.status()["objects"] == 8)  # found by the scan
            await second.store(4, seed=9)
            await until(lambda: first.runner.status()["objects"] == 12)  # it searches, as it knows that it is not alone
            await second.store(4, seed=3)
            files = {path: path.stat().st_ino for path in data_files(tmp_path)}
            first.runner.lost(keys(4, 3))
            assert await first.store(4, seed=3) == [StoreOutcome.ALREADY_THERE] * 4
            assert {path: path.stat().st_ino for path in data_files(tmp_path)} == files  # not written again
            await second.runner.clear()
            assert await first.load(4, seed=1) == [LoadOutcome.MISSING] * 4
            await until(lambda: first.runner.status()["objects"] == 0)

    run(test)


# ---- capacity ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["LRU", "noop"])
def test_the_cap_holds_on_the_disk(tmp_path: Path, policy: str) -> None:
    cap_bytes = 2 << 20
    eviction = {"eviction_policy": policy}

    async def test() -> None:
        for _ in range(2):  # the second server starts with a full folder
            async with Server(tmp_path, max_capacity_gb=cap_bytes / GIB, eviction=eviction) as server:
                for seed in range(12):
                    outcomes = await server.store(32, seed)
                    assert disk_bytes(tmp_path) <= cap_bytes
                if policy == "LRU":
                    assert outcomes == [StoreOutcome.STORED] * 32
                    assert await server.load(32, seed) == [LoadOutcome.LOADED] * 32
                else:
                    assert set(outcomes) == {StoreOutcome.FULL}
                assert server.runner.status()["used_bytes"] >= disk_bytes(tmp_path) - 4096
                assert disk_bytes(tmp_path) > cap_bytes * 0.4
        assert all(path.stat().st_size == FrameMemory(1).slot_bytes for path in data_files(tmp_path))

    run(test)


@as_root
def test_a_full_disk_is_said_once_and_ends(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        clock = ManualClock()
        async with Server(small_disk, clock) as server:
            stored = [await server.store(8, seed) for seed in range(20)]
            assert stored[0] == [StoreOutcome.STORED] * 8 and stored[-1] == [StoreOutcome.FULL] * 8
            for outcomes in stored:  # always a prefix
                assert outcomes == sorted(outcomes, key=lambda outcome: outcome is StoreOutcome.FULL)
            assert server.runner.status()["full"]
            server.runner.publish()
            assert server.metrics.registry.get_sample_value("lmcache_mp_l2_is_full", {"l2_name": "fs_native_0"}) == 1
            assert await server.load(8, 0) == [LoadOutcome.LOADED] * 8
            assert not list(small_disk.rglob("*.tmp"))
            for path in data_files(small_disk)[:40]:
                path.unlink()
            assert await server.store(8, 50) == [StoreOutcome.FULL] * 8  # not asked yet
            clock.advance(L2_BREAKER_OPEN_SECONDS)
            assert await server.store(8, 51) == [StoreOutcome.STORED] * 8
            sample = server.metrics.registry.get_sample_value
            assert sample("lmcache_mp_l2_full_total", {"l2_name": "fs_native_0"})
            server.runner.publish()
            assert sample("lmcache_mp_l2_is_full", {"l2_name": "fs_native_0"}) == 0
        said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1 and "no space left" in said[0]

    run(test)


# ---- what is refused -----------------------------------------------------------------------------------------------
def refusal(base: Path, **settings: Any) -> str:
    async def test() -> None:
        async with Server(base, **settings):
            pass

    with pytest.raises(ResourceError) as caught:
        asyncio.run(test())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@as_root
def test_a_read_only_folder_is_refused(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    message = refusal(small_disk)
    assert message == (
        f"--l2-adapter 1 (fs_native): cannot write to the folder {small_disk}: Read-only file system; "
        "make it writable for this user or choose another base_path."
    )


@as_root
def test_temporary_files_on_another_disk_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "tmp")], check=True)
    try:
        assert "Invalid cross-device link" in refusal(tmp_path, relative_tmp_dir="tmp")
        assert not list((tmp_path / "tmp").iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path / "tmp")], check=True)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file is not a folder; choose another base_path" in refusal(tmp_path / "file")
    assert "is not a folder" in refusal(tmp_path / "file" / "below")


@pytest.mark.parametrize("mode", [0o000, 0o555, 0o300])
def test_a_folder_without_permission_is_refused(tmp_path: Path, mode: int) -> None:
    """In a process without root's rights."""
    (tmp_path / "base").mkdir(mode=0o777)
    os.chmod(tmp_path / "base", mode)
    reaches = tmp_path
    while reaches != reaches.parent:
        os.chmod(reaches, 0o755)
        reaches = reaches.parent
        if reaches == Path("/tmp"):
            break
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        message = "no refusal"
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            message = refusal(tmp_path / "base")
        finally:
            os.write(write, message.encode())
            os._exit(0)
    os.close(write)
    message = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(child, 0)
    os.chmod(tmp_path / "base", 0o755)
    assert "cannot write to the folder" in message and "Permission denied" in message


# ---- files that are not what their name says -----------------------------------------------------------------------
def damage(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    if kind == "link":
        path.rename(path.with_suffix(".aside"))
        path.symlink_to(path.with_suffix(".aside"))
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(
            {"truncated": whole[:-4096], "header only": whole[:4096], "empty": b"", "short": whole[:100]}[kind]
        )


@pytest.mark.parametrize("kind", ["truncated", "header only", "empty", "short", "link", "folder"])
def test_what_cannot_be_a_frame_is_moved_aside(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            await server.store(3)
            bad = keys(3)[1]
            path = tmp_path / bad.namespace.digest.hex() / bad.chunk_hash.hex()[:2] / f"{bad.chunk_hash.hex()}.data"
            damage(path, kind)
            assert await server.load(3) == [LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.LOADED]
            assert not os.path.lexists(path) and len(list((tmp_path / "quarantine").iterdir())) == 1
            assert await server.load(3) == [LoadOutcome.LOADED, LoadOutcome.MISSING, LoadOutcome.LOADED]
            assert await server.store(3) == [
                StoreOutcome.ALREADY_THERE,
                StoreOutcome.STORED,
                StoreOutcome.ALREADY_THERE,
            ]
            assert await server.load(3) == [LoadOutcome.LOADED] * 3
        assert sum("corrupt" in record.message for record in caplog.records) == 1

    run(test)


def test_quarantine_is_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        async with Server(tmp_path) as server:
            for seed in range(3):
                await server.store(40, seed)
                await server.runner.corrupted(keys(40, seed), "test")
            assert len(list((tmp_path / "quarantine").iterdir())) == MAX_QUARANTINE_FILES
            assert server.runner.status()["used_bytes"] >= disk_bytes(tmp_path) - 4096

    run(test)


def test_frames_of_a_server_with_another_alignment_are_read(tmp_path: Path) -> None:
    key = keys(1)[0]
    small, large = FrameMemory(1), FrameMemory(1, align_bytes=65536)

    async def test() -> None:
        async with Server(tmp_path) as server:
            await server.runner.store([key], [large.fill(0, key)], lambda: None)
            assert await server.runner.load([key], small.buffers, lambda: None) == [LoadOutcome.LOADED]
            assert small.holds(0, key)
            await server.runner.clear()
            await server.runner.store([key], [small.fill(0, key)], lambda: None)
            assert await server.runner.load([key], large.buffers, lambda: None) == [LoadOutcome.LOADED]
            assert large.holds(0, key)

    run(test)


def test_o_direct_that_cannot_be_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Server(tmp_path, use_odirect=True) as server:
            await server.store(4)
            assert server.runner.status()["buffered_fallbacks"] == 0
            odd = [buffer[16 : 16 + 8192] for buffer in server.memory.buffers[:4]]
            for _ in range(3):
                await server.runner.load(keys(4), odd, lambda: None)
            assert server.runner.status()["buffered_fallbacks"] == 12
        assert sum("O_DIRECT" in record.message for record in caplog.records) == 1

    run(test)


def test_kill_in_the_middle_of_a_batch_leaves_a_prefix(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from lmcache.l2.adapter_types import build, parse_adapter
        from lmcache.testing.adapter_contract import RecordingInventory
        from lmcache.testing.frames import FrameMemory, keys

        async def main():
            spec = {"type": "fs_native", "base_path": sys.argv[1], "use_odirect": True}
            adapter = build(parse_adapter(spec, 0)).adapter
            await adapter.open(RecordingInventory())
            memory = FrameMemory(64, 1 << 20)
            wanted = keys(64)
            buffers = [memory.fill(i, key) for i, key in enumerate(wanted)]
            print("ready", flush=True)
            await adapter.store(wanted, buffers)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    lengths = []
    for wanted in (3, 20, 45):
        base = tmp_path / str(wanted)
        base.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(Path(fs_native.__file__).parents[3])}
        with subprocess.Popen(
            [sys.executable, "-c", program, str(base)], stdout=subprocess.PIPE, env=environment
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            deadline = time.monotonic() + 30
            while len(data_files(base)) < wanted and time.monotonic() < deadline:
                time.sleep(0.0005)
            child.send_signal(signal.SIGKILL)
        stored = {path.stem for path in data_files(base)}
        lengths.append(len(stored))
        assert stored == {key.chunk_hash.hex() for key in keys(64)[: len(stored)]}
        assert all(path.stat().st_size == (1 << 20) + 4096 for path in data_files(base))

        async def restart(base: Path = base) -> None:
            async with Server(base) as server:
                assert not list(base.rglob("*.tmp"))
                assert server.runner.status()["objects"] == lengths[-1]

        run(restart)
    assert min(lengths) < 64


def test_a_namespace_is_named_by_any_of_its_files(tmp_path: Path) -> None:
    """After a power cut the youngest files of a folder may have no content."""

    async def test() -> None:
        async with Server(tmp_path) as server:
            assert await server.store(64) == [StoreOutcome.STORED] * 64
        for file in data_files(tmp_path)[:32]:
            file.write_bytes(bytes(file.stat().st_size))
        async with Server(tmp_path) as server:
            assert server.runner.status()["objects"] == 64
            assert (await server.load(64)).count(LoadOutcome.LOADED) == 32

    run(test)


def test_what_nobody_can_name_does_not_fill_the_folder_for_ever(tmp_path: Path) -> None:
    """As a power cut, or a later version of the header, leaves a namespace."""
    spec = {
        "type": "fs_native",
        "base_path": str(tmp_path),
        "max_capacity_gb": (2 << 20) / GIB,
        "eviction": {"eviction_policy": "LRU"},
    }

    async def test() -> None:
        async with OneServer(spec) as server:
            for seed in range(16):
                await server.store(8, seed)
        for file in data_files(tmp_path):
            file.write_bytes(bytes(file.stat().st_size))
        async with OneServer(spec) as server:
            assert await server.store(8, seed=99) == [StoreOutcome.STORED] * 8

    run(test)
