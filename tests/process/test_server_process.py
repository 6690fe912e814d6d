"""A real server process: what it holds, what it refuses, what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lmcache.client.client import ClientState
from lmcache.errors import RemoteError, ServerUnavailable
from lmcache.memory.numa import online_nodes
from lmcache.protocol import messages as m
from lmcache.stop_signals import DRAIN_SECONDS
from lmcache.testing.processes import CacheServer, stop_running
from polling import until
from process.commands import COMMAND_SECONDS
from process.metric_traffic import controlled_adapter, tell_adapter, with_modules_of
from process.support import CALL_SECONDS, SmallEngine, unpack_slots

# What is ended at once, on a machine that stalls for seconds. Else it ends at a deadline of CALL_SECONDS or more.
AT_ONCE_SECONDS = 0.5 * CALL_SECONDS
L2_SECONDS = 3 * CALL_SECONDS  # the deadline of a backend that hangs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        yield server
        if server.alive():
            assert_idle(server)
            assert server.stop() == 0, server.log()
    assert not shm_of(server).exists()
    assert "Traceback" not in server.log()


def shm_of(server: CacheServer) -> Path:
    return Path("/dev/shm") / server.shm_name


def assert_idle(server: CacheServer) -> None:
    """No lease, reservation or session is left once every engine has gone. An engine waits for half a second until the
    server knows that it goes."""

    def held() -> list[Any]:
        status = server.status()
        names = ("sessions", "leases", "reservations", "instances", "session_bytes")
        in_l1 = ("leases", "leased_objects", "reservations", "staged", "quarantined_bytes")
        return [found for found in (*map(status.get, names), *map(status["l1"].get, in_l1)) if found]

    until(lambda: not held(), tell=held)
    status = server.status()
    assert status["l1"]["used_bytes"] + status["l1"]["free_bytes"] == status["l1"]["committed_bytes"]


def engine_in_a_process(server: CacheServer, folder: Path, script: str) -> subprocess.Popen[str]:
    """Another process with a registered SmallEngine called `engine`; it runs the script and says "done"."""
    program = "\n".join(
        [
            "import sys, time",
            f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})",
            "from process.support import *",
            f"engine = SmallEngine({server.port}, instance_id='other', heartbeat=0.1).start()",
            textwrap.dedent(script),
            "print('done', flush=True)",
            "time.sleep(600)",
        ]
    )
    path = folder / "engine.py"
    path.write_text(program)
    child = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline().strip() != "done":
        child.kill()
        child.wait()
        raise AssertionError("the engine's script failed")
    return child


# ---- store and retrieve ----------------------------------------------------------------------------------------------
def test_what_was_stored_comes_back_and_nothing_else(server: CacheServer) -> None:
    with SmallEngine(server.port) as engine:
        tokens = engine.tokens(1, 2, 3)
        assert engine.lookup("cold", tokens).chunks == 0
        assert engine.store(tokens) == 3
        warm = engine.lookup("warm", engine.tokens(1, 2, 3, 4))
        assert (warm.chunks, warm.miss_reason) == (3, "not_stored")
        assert engine.read(warm)
        assert engine.lookup("salted", tokens, salt="tenant").chunks == 0
        assert server.status()["leases"] == 1
        assert server.metric("lmcache_mp_lookup_hit_tokens_total") == 3 * 256


def test_leases_keep_objects_in_place_while_others_fill_l1(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.002) as server:  # 2 MiB: about 250 objects
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            engine.store(engine.tokens(1, 2, 3))
            held = engine.lookup("held", engine.tokens(1, 2, 3))
            for number in range(10, 40):
                engine.store(engine.tokens(*range(number * 100, number * 100 + 20)))
            assert server.status()["l1"]["evicted_objects"] > 0
            assert engine.read(held)
        assert_idle(server)


# ---- death -----------------------------------------------------------------------------------------------------------
def test_what_a_killed_engine_reserved_is_never_a_hit_and_its_memory_comes_back(
    server: CacheServer, tmp_path: Path
) -> None:
    child = engine_in_a_process(
        server,
        tmp_path,
        """
        tokens = engine.tokens(1, 2)
        hashes = engine.hashes(tokens)
        reply = engine.reserve(hashes)
        engine.fill(hashes, unpack_slots(reply.slots))  # everything but the commit
        engine.store(engine.tokens(7))
        engine.lookup("held", engine.tokens(7))
        """,
    )
    with SmallEngine(server.port) as engine:
        assert server.status()["reservations"] == 1
        child.kill()
        child.wait()
        until(lambda: len(server.status()["instances"]) == 1)
        until(lambda: not server.status()["l1"]["staged"] and not server.status()["leases"], tell=server.status)
        assert engine.lookup("r", engine.tokens(1, 2)).chunks == 0
        committed = engine.lookup("s", engine.tokens(7))
        assert committed.chunks == 1
        assert engine.read(committed)


def test_a_stopped_engine_keeps_its_reservation_until_it_goes_on(server: CacheServer, tmp_path: Path) -> None:
    child = engine_in_a_process(
        server, tmp_path, "hashes = engine.hashes(engine.tokens(1)); reply = engine.reserve(hashes)"
    )
    try:
        stop_running(child.pid)
        with SmallEngine(server.port) as engine:
            # Silent for far more than two heartbeats of 0.1 s, but its lock is held.
            time_when_swept_twice = time.monotonic() + 2.5
            until(lambda: time.monotonic() > time_when_swept_twice)
            status = server.status()
            assert {instance["instance_id"] for instance in status["instances"]} == {"other", engine.instance_id}
            assert status["reservations"] == 1
            assert engine.lookup("r", engine.tokens(1)).chunks == 0
    finally:
        child.kill()
        child.wait()
    until(lambda: not server.status()["instances"])


def test_a_client_comes_back_by_itself_when_the_server_was_killed_and_restarted(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as first, SmallEngine(first.port, heartbeat=0.2) as engine:
        engine.store(engine.tokens(1))
        waiting = engine.client.submit("lookup", m.Lookup(engine.instance_id, "r", "", 0, b""), 60.0)
        waiting.result()
        memory, token = engine.client.memory, engine.client.server_epoch
        first.kill()
        started = time.monotonic()
        until(lambda: engine.client.state is ClientState.UNAVAILABLE)
        with pytest.raises(ServerUnavailable):
            engine.lookup("s", engine.tokens(1))
        assert time.monotonic() - started < AT_ONCE_SECONDS
        with CacheServer(tmp_path, l1_size_gb=0.0625, port=first.port, shm_name=first.shm_name) as second:
            second.wait_ready()
            engine.client.connect(20.0)
            until(lambda: len(second.status()["instances"][:1]) == 1 and second.status()["instances"][0]["workers"])
            assert engine.client.server_epoch != token
            assert engine.client.memory is not memory
            assert engine.lookup("t", engine.tokens(1)).chunks == 0
            assert engine.store(engine.tokens(1)) == 1
            assert engine.read(engine.lookup("u", engine.tokens(1)))
            engine.close()
            assert_idle(second)
            assert second.stop() == 0
        assert not shm_of(second).exists()


def test_calls_that_wait_end_at_once_when_the_server_is_killed(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            server.pause()
            call = engine.client.submit("lookup", m.Lookup(engine.instance_id, "r", "", 0, engine.tokens(1)), 60.0)
            assert not call.wait(0.05)
            started = time.monotonic()
            server.kill()
            with pytest.raises(ServerUnavailable):
                call.result()
            assert time.monotonic() - started < AT_ONCE_SECONDS
    Path("/dev/shm", server.shm_name).unlink()  # killed, and nobody took the name again


def test_a_server_that_hangs_is_noticed_and_one_that_wakes_up_is_used_again(server: CacheServer) -> None:
    with SmallEngine(server.port, heartbeat=0.2) as engine:
        engine.store(engine.tokens(1))
        token = engine.client.server_epoch
        server.pause()
        try:
            until(lambda: engine.client.state is ClientState.UNAVAILABLE)
            started = time.monotonic()
            with pytest.raises(ServerUnavailable):
                engine.lookup("r", engine.tokens(1))
            assert time.monotonic() - started < AT_ONCE_SECONDS
        finally:
            server.resume()
        engine.client.connect(20.0)
        assert engine.client.server_epoch == token
        assert engine.lookup("s", engine.tokens(1)).chunks == 1


def test_a_second_server_with_the_same_memory_is_refused_and_the_first_unharmed(
    server: CacheServer, tmp_path: Path
) -> None:
    with SmallEngine(server.port) as engine:
        engine.store(engine.tokens(1))
        inode = shm_of(server).stat().st_ino
        with CacheServer(tmp_path, l1_size_gb=0.0625, shm_name=server.shm_name, log_name="second.log") as second:
            assert second.popen.wait(timeout=COMMAND_SECONDS) == 1
            lines = [line for line in second.log().splitlines() if "LMCache" not in line]
            assert len(lines) == 1
            assert server.shm_name in lines[0]
            assert "--shm-name" in lines[0]
        assert shm_of(server).stat().st_ino == inode
        held = engine.lookup("r", engine.tokens(1))
        assert held.chunks == 1
        assert engine.read(held)


def test_a_busy_port_is_one_sentence(server: CacheServer, tmp_path: Path) -> None:
    with CacheServer(
        tmp_path, l1_size_gb=0.0625, port=server.port, shm_name=f"{server.shm_name}-2", log_name="second.log"
    ) as second:
        assert second.popen.wait(timeout=COMMAND_SECONDS) == 1
        assert f"Cannot listen on 127.0.0.1:{server.port} because it is in use" in second.log()
        assert "Traceback" not in second.log()
        assert not shm_of(second).exists()


def test_a_server_that_crashes_says_where_its_threads_were(tmp_path: Path) -> None:
    with CacheServer(tmp_path) as server:
        server.wait_ready()
        server.signal_group(signal.SIGSEGV)
        assert server.popen.wait(timeout=30) == -signal.SIGSEGV
        assert "Segmentation fault" in server.log() and "server.py" in server.log()
        shm_of(server).unlink()


def test_what_a_killed_server_left_is_reclaimed(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as first:
        first.wait_ready()
        first.kill()
        assert shm_of(first).exists()
        with CacheServer(tmp_path, l1_size_gb=0.0625, shm_name=first.shm_name) as second:
            second.wait_ready()
            assert second.stop() == 0
        assert not shm_of(first).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ordered_end_is_quick_and_clean_while_an_engine_is_there(tmp_path: Path, number: int) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            engine.store(engine.tokens(1))
            engine.lookup("r", engine.tokens(1))
            started = time.monotonic()
            os.kill(server.pid, number)
            assert server.popen.wait(timeout=20) == 0
            assert time.monotonic() - started < DRAIN_SECONDS  # nothing is drained, nobody is waited for
            assert not shm_of(server).exists()
            assert "failed" not in server.log()
            until(lambda: engine.client.state is ClientState.UNAVAILABLE)


# ---- long work -------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def hanging_l2(folder: Path, payload_bytes: int, tokens: Sequence[int]) -> Iterator[tuple[CacheServer, SmallEngine]]:
    """A server whose L2 alone has the chunks, and hangs until `tell_adapter` says otherwise; and an engine."""
    extra = ["--l2-adapter", controlled_adapter(folder, L2_SECONDS)]
    with CacheServer(folder, l1_size_gb=0.0625, extra=extra, environment=with_modules_of(folder)) as server:
        server.wait_ready()
        with SmallEngine(server.port, payload_bytes=payload_bytes) as engine:
            engine.store(engine.tokens(*tokens))
            until(lambda: all(adapter["objects"] >= len(tokens) for adapter in server.status()["l2"]["adapters"]))
            server.clear("l1")
            tell_adapter(folder, load="hangs")
            yield server, engine
        assert_idle(server)


def test_pings_are_answered_while_lookups_wait_for_a_slow_l2(tmp_path: Path) -> None:
    chunks = range(100, 116)
    with hanging_l2(tmp_path, 64 * 1024, chunks) as (server, engine):
        calls = [
            engine.client.submit(
                "lookup",
                m.Lookup(engine.instance_id, f"r{number}", "", 0, engine.tokens(*chunks), deadline_seconds=L2_SECONDS),
                L2_SECONDS,
            )
            for number in range(50)
        ]
        until(lambda: server.status()["l2"]["adapters"][0]["loads_in_flight"])
        for _ in range(20):
            assert engine.client.call("ping", m.Ping(), CALL_SECONDS).ready
        assert not any(call.done() for call in calls)  # a loop that waited for the adapter would have answered one
        tell_adapter(tmp_path)
        replies = [call.result() for call in calls]
        assert max(reply.chunks for reply in replies) == len(chunks)
        for number, reply in enumerate(replies):
            assert engine.read(reply)
            engine.end(f"r{number}")


def test_a_lookup_is_answered_at_its_deadline(tmp_path: Path) -> None:
    chunks = range(1, 5)
    with hanging_l2(tmp_path, 256 * 1024, chunks) as (server, engine):
        started = time.monotonic()
        reply = engine.lookup("r", engine.tokens(*chunks), deadline_seconds=0.3)
        assert time.monotonic() - started < AT_ONCE_SECONDS
        assert (reply.chunks, reply.miss_reason) == (0, "l2_deadline")
        tell_adapter(tmp_path)
        until(lambda: server.status()["l1"]["leases"] == 0 and server.status()["l1"]["staged"] == 0)


# ---- frugality -------------------------------------------------------------------------------------------------------
def test_an_idle_server_is_small_and_sleeps(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=4.0, extra=["--l1-init-size-gb", "0.0625"]) as server:
        server.wait_ready()
        with SmallEngine(server.port):
            status = Path(f"/proc/{server.pid}/status").read_text()
            resident_kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if "kB" in line}
            beside_l1_kib = resident_kib["VmRSS"] - resident_kib["RssShmem"]
            assert beside_l1_kib < 100 * 1024
            maps = Path(f"/proc/{server.pid}/maps").read_text()
            assert not [name for name in ("torch", "numpy", "transformers") if f"/{name}/" in maps]
            # L1 is being prepared at first; then there must be nothing to do (the benchmark measures closer).
            until(lambda: cpu_fraction(server.pid, over_seconds=2.0) < 0.01)


def cpu_fraction(pid: int, over_seconds: float) -> float:
    before = cpu_seconds(pid)
    time.sleep(over_seconds)
    return (cpu_seconds(pid) - before) / over_seconds


def cpu_seconds(pid: int) -> float:
    """Of all threads."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def test_a_client_of_another_protocol_version_is_refused(server: CacheServer) -> None:
    with SmallEngine(server.port) as engine:
        with pytest.raises(RemoteError, match="upgrade the older side") as refusal:
            engine.client.call("hello", m.Hello(99, "from the future"), CALL_SECONDS)
        assert refusal.value.code == "unsupported_version"


def test_a_scheduler_maps_nothing_ahead(server: CacheServer) -> None:
    """It holds a lock of L1 and copies nothing; the pages would cost it time and tables."""
    with SmallEngine(server.port):
        assert "l1-mapper" not in {thread.name for thread in threading.enumerate()}


def test_slots_lie_inside_the_memory_and_apart(server: CacheServer) -> None:
    with SmallEngine(server.port) as engine:
        hashes = engine.hashes(engine.tokens(*range(50)))
        reply = engine.reserve(hashes)
        slots = sorted(unpack_slots(reply.slots))
        assert engine.client.hello is not None
        assert slots[0] >= 4096
        assert slots[-1] + 8192 <= engine.client.hello.shm_bytes
        assert all(second - first >= 8192 for first, second in pairwise(slots))
        assert engine.commit(reply.reservation, bytes(50)) == 0


@contextlib.contextmanager
def full_pipe(path: Path) -> Iterator[None]:
    """Whatever is written there has to wait."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        for size_bytes in (4096, 1):
            with pytest.raises(BlockingIOError):
                while True:
                    os.write(reader, bytes(size_bytes))
        yield
    finally:
        os.close(reader)


def test_a_server_whose_log_nobody_reads_goes_on_and_ends(tmp_path: Path) -> None:
    with full_pipe(tmp_path / "server.log"), CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()  # its ready line waits, too
        for _ in range(3):
            with SmallEngine(server.port) as engine:  # each comes and goes with a log line
                engine.store(engine.tokens(1))
        until(lambda: server.status()["instances"] == [])
        assert server.stop() == 0


def test_a_server_whose_log_nobody_reads_can_crash(tmp_path: Path) -> None:
    with full_pipe(tmp_path / "server.log"), CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        server.signal_group(signal.SIGSEGV)
        assert server.popen.wait(timeout=30) == -signal.SIGSEGV
        shm_of(server).unlink()


def test_a_server_without_stderr_serves(tmp_path: Path) -> None:
    options = ["--l1-size-gb", "0.0625", "--eviction-policy", "LRU", "--port", "0", "--http-port", "0"]
    options += ["--http-host", "127.0.0.1", "--shm-name", f"lmcache-test-quiet-{os.getpid()}"]
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "lmcache.cli.main", "server", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "is ready" in server.stdout.readline()
        finally:
            server.terminate()
        assert server.wait(20) == 0


def test_on_which_nodes_l1_lies_is_said_at_the_start(tmp_path: Path) -> None:
    node = online_nodes()[-1]
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=["--l1-numa", f"bind:{node}"]) as server:
        server.wait_ready()
        (said,) = until(lambda: [line for line in server.log().splitlines() if "NUMA" in line])
        assert f"L1 {shm_of(server)} is bound to NUMA nodes {node}; the machine has " in said
        maps = Path(f"/proc/{server.pid}/numa_maps").read_text().splitlines()
        assert {line.split()[1] for line in maps if "file=/dev/shm/" in line} == {f"bind:{node}"}
        with SmallEngine(server.port) as engine:
            assert engine.store(engine.tokens(1, 2)) == 2
        assert server.stop() == 0
