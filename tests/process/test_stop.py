"""A server that is asked to stop at any moment, once or twice: it ends in time, with the right code, and nothing stays.

TEST_STOP_ROUNDS and TEST_SEED: how many random moments, and which.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.client.transfer_mode import WantedTransfer
from lmcache.errors import LMCacheError
from lmcache.l1.store import L1Store
from lmcache.stop_signals import REPEAT_SECONDS, STOP_SECONDS
from lmcache.testing.processes import CacheServer, free_port, http_json
from polling import until
from process.commands import COMMAND_SECONDS, LMCACHE
from process.places import Place
from process.support import SmallEngine, server_within
from seeds import SEED

ROUNDS = int(os.environ.get("TEST_STOP_ROUNDS", "16"))
LAST_MOMENT_SECONDS = 2.0
CAUGHT_UP_GB = 1.25
HANGUP_IS_IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # and so in every child: under nohup
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if HANGUP_IS_IGNORED else [signal.SIGHUP]))
STACKS = {"PYTHONFAULTHANDLER": "1"}  # of every thread, in the log, after a crash or an abort


class StopPlace(Place):
    def server(self, *extra: str, **options: Any) -> CacheServer:
        return super().server(*extra, **{"environment": STACKS, **options})

    def ended(self, server: CacheServer, course: object) -> int:
        """The exit code of a server that was asked to stop."""
        try:
            code = server.popen.wait(STOP_SECONDS + 10)
        except subprocess.TimeoutExpired:
            os.kill(server.pid, signal.SIGABRT)
            server.popen.wait(10)
            raise AssertionError(f"{course}: the server hangs\n{server.log()[-6000:]}") from None
        # Ctrl-C before our first instruction is reported in the interpreter's own way.
        traceback = server.log().partition("Traceback")[2]
        assert not traceback or "KeyboardInterrupt" in traceback, f"{course}\n{server.log()[-6000:]}"
        assert "Fatal Python error" not in server.log(), f"{course}\n{server.log()[-6000:]}"
        return code


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StopPlace]:
    place = StopPlace(tmp_path)
    yield place
    place.close()


def takes_signals(pid: int) -> bool:
    """Whether the server's own handling stands; before that the interpreter has just begun."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has gone
        return False
    if "SigCgt:" not in status:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def waits(pid: int, number: signal.Signals) -> bool:
    """Whether the process has not yet taken a signal that was sent to it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has gone
        return False
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(signals >> (number - 1) & 1 for signals in pending)


class Traffic:
    """An engine and an operator who ask for all that can be asked for, for as long as there is an answer."""

    def __init__(self, place: StopPlace, seed: str) -> None:
        self._place = place
        self._seed = seed
        self._over = threading.Event()
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._engine, self._operator)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[random.Random], None]) -> None:
        source = random.Random(f"{self._seed}-{work.__name__}")
        while not self._over.is_set():
            with contextlib.suppress(LMCacheError, OSError, RuntimeError, http.client.HTTPException):
                work(source)
            self._over.wait(0.01)

    def _engine(self, source: random.Random) -> None:
        with contextlib.closing(SmallEngine(self._place.port, payload_bytes=1 << 18, heartbeat=0.2)) as engine:
            engine.start(1.0)
            while not self._over.is_set():
                number = source.randrange(40)
                tokens = engine.tokens(*range(number, number + source.randrange(1, 12)))
                engine.store(tokens)
                held = engine.lookup(f"r{number}", tokens, deadline_seconds=1.0)
                if held.chunks and not engine.read(held):
                    self.faults.append(f"a hit of {held.chunks} chunks was not what had been stored")
                engine.end(f"r{number}")

    def _operator(self, source: random.Random) -> None:
        port = self._place.http_port
        for method, path, body in (
            ("PUT", "/quota/tenant", {"limit_gb": 0.001 * source.random()}),
            ("GET", "/status", None),
            ("GET", "/metrics", None),
            ("GET", "/quota", None),
            ("POST", "/cache/clear", {"tier": source.choice(["l1", "l1", "l2", "all"])}),
        ):
            http_json(port, method, path, body, timeout_seconds=2.0)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_stop_at_a_random_moment(number: int, place: StopPlace, tmp_path_factory: pytest.TempPathFactory) -> None:
    seed = f"{SEED}-{number}"
    source = random.Random(seed)
    folder = tmp_path_factory.getbasetemp() / "stopped-l2"  # of all rounds: the next one finds what there is
    persists = source.random() < 0.5
    extra = ["--l1-persist"] if persists else []
    extra += source.choice([[], ["--eviction-policy", "IsolatedLRU"], ["--no-l1-use-lazy"]])
    adapter = {"type": "fs_native", "base_path": str(folder), "persist_enabled": source.random() < 0.8}
    extra += source.choice([[], ["--l2-adapter", json.dumps(adapter)], ["--l2-adapter", json.dumps(adapter)]])
    moment = source.choice([source.uniform(0, 0.6), source.uniform(0.3, 1.0), source.uniform(0, LAST_MOMENT_SECONDS)])
    serves = source.random() < 0.4  # counted from its first answer, else from its first instruction
    first = source.choice(SIGNALS)
    second = source.choice([None, *SIGNALS])
    between = source.choice([0.0, source.uniform(0, 0.02), source.uniform(0, 0.3)])
    course = f"seed {seed}: {first.name} after {moment:.3f} s of {'service' if serves else 'start'}, "
    course += f"{second and second.name} {between:.3f} s later, {extra}"
    if persists and number % 2:  # something to go on with, and to catch up with
        with place.server(*extra[:1]) as before:
            before.wait_ready()
            with SmallEngine(place.port, payload_bytes=1 << 18) as engine:
                engine.store(engine.tokens(*range(60)))
            before.kill()

    with place.server(*extra) as server, Traffic(place, seed) as traffic:
        if serves:
            server.wait_ready()
        time.sleep(moment)
        was_ready = takes_signals(server.pid)
        server.popen.send_signal(first)
        if second is not None:
            time.sleep(between)
            server.popen.send_signal(second)
        if not was_ready:  # a signal that met the beginning of the interpreter may be lost
            until(lambda: not server.alive() or takes_signals(server.pid))
            server.popen.send_signal(signal.SIGTERM)
        code = place.ended(server, course)
    assert not traffic.faults, f"{course}: {traffic.faults}"
    # Two that come at the same moment may change places.
    allowed = {0} if second is None else {0, 128 + first, 128 + second}
    if not was_ready:  # or end it in the interpreter's own way
        allowed |= {-first, -(second or first), 128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert code in allowed, f"{course}: exit code {code}\n{server.log()[-4000:]}"
    assert persists or not place.file.exists(), course
    if persists and was_ready and code >= 0 and place.file.exists():
        with place.server(*extra) as server:
            server.wait_ready()
            assert server.stop() == 0, server.log()


def test_a_stop_while_l1_catches_up_with_l2(place: StopPlace) -> None:
    """The verifying threads read L1 when it is to be given back. All of it is one batch, of several 100 ms."""
    extra = ["--l1-persist", "--l2-adapter", json.dumps({"type": "fs_native", "base_path": str(place.folder / "l2")})]
    with place.server("--l1-persist", "--no-l1-use-lazy", l1_size_gb=CAUGHT_UP_GB) as server:
        server.wait_ready()
        with SmallEngine(place.port, payload_bytes=15 << 20) as engine:
            engine.payload = lambda chunk_hash: chunk_hash * (engine.payload_bytes // len(chunk_hash))
            objects = int(CAUGHT_UP_GB * 64)
            assert engine.store(engine.tokens(*range(objects))) == objects
        server.kill()
    for wait_seconds in (0.0, 0.03):
        with place.server(*extra, l1_size_gb=CAUGHT_UP_GB) as server:
            until(lambda server=server: "fs_native_0: holds" in server.log() or not server.alive())
            time.sleep(wait_seconds)
            server.popen.send_signal(signal.SIGTERM)
            assert place.ended(server, wait_seconds) == 0, server.log()
        shutil.rmtree(place.folder / "l2")


def test_a_second_signal_while_l1_is_given_back(place: StopPlace) -> None:
    for between in (0.0, 0.02, 0.05):
        with place.server("--no-l1-use-lazy", l1_size_gb=0.5) as server:
            server.wait_ready()
            server.popen.send_signal(signal.SIGTERM)
            time.sleep(between)
            server.popen.send_signal(signal.SIGINT)
            # Two that come at the same moment may change places.
            assert place.ended(server, between) in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
        assert not place.file.exists()


def test_one_signal_that_is_sent_to_the_process_and_to_its_group_is_one(place: StopPlace) -> None:
    adapter = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 0.1}

    def met_within_the_time_of_a_repeat() -> bool:
        """The machine may stand still between the two."""
        with place.server("--l2-adapter", json.dumps(adapter), l1_size_gb=0.25) as server:
            server.wait_ready()
            with SmallEngine(place.port, payload_bytes=1 << 20) as engine:
                engine.store(engine.tokens(*range(60)))
                first_sent = time.monotonic()
                for _ in range(2):
                    server.popen.send_signal(signal.SIGTERM)
                    until(lambda: not waits(server.pid, signal.SIGTERM))  # two that wait are one
                if time.monotonic() - first_sent > REPEAT_SECONDS / 2:
                    return False
                assert place.ended(server, "repeated") == 0, server.log()
            assert "not in L2" not in server.log() and "second signal" not in server.log()
            return True

    until(met_within_the_time_of_a_repeat, 60)


TOLD = """
import time
from lmcache.stop_signals import StopSignals
signals = StopSignals(20.0)
print("ready", flush=True)
signals.stop_requested.wait()
print("told", flush=True)
time.sleep(3)
signals.close()
"""


def test_a_repeated_signal_is_one_also_where_the_machine_stands_still_between_them() -> None:
    def met_within_the_time_of_a_repeat() -> bool:
        with subprocess.Popen([sys.executable, "-c", TOLD], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            first_sent = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "told\n"
            process.send_signal(signal.SIGSTOP)
            stopped_seconds = time.monotonic() - first_sent
            process.send_signal(signal.SIGTERM)
            time.sleep(2 * REPEAT_SECONDS)
            process.send_signal(signal.SIGCONT)
            code = process.wait(60)
        if stopped_seconds > REPEAT_SECONDS / 2:
            return False
        assert code == 0
        return True

    until(met_within_the_time_of_a_repeat, 60)


CTRL_C, OTHER = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize("signals", [[CTRL_C], [CTRL_C, CTRL_C], [CTRL_C, OTHER]], ids=["one", "two", "other"])
def test_ctrl_c_while_l1_is_filled(place: StopPlace, signals: list[signal.Signals]) -> None:
    def met_while_filled() -> bool:
        """The machine may stand still until L1 is full: then the signal comes too late."""
        with place.server("--no-l1-use-lazy", l1_size_gb=2.0) as server:
            until(lambda: place.file.exists() or not server.alive())
            for number in signals:
                server.popen.send_signal(number)
                time.sleep(0.001)  # two at the same instant are one
            code = place.ended(server, signals)
            assert code in ({0} if len(signals) == 1 else {0, *(128 + number for number in signals)}), server.log()
        assert not place.file.exists()
        return "is ready" not in server.log()

    until(met_while_filled)


HANGING = """
import asyncio, threading
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter

class Hanging(Adapter):
    '''Begins, and then stands still in threads that the interpreter would wait for.'''
    def __init__(self, opens=True, blocks=False): self.opens, self.blocks = opens, blocks
    def stand_still(self): return asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    async def open(self, inventory):
        if not self.opens: await self.stand_still()
        inventory.complete()
    async def store(self, keys, buffers):
        if self.blocks: threading.Event().wait()
        await self.stand_still()
    async def load(self, keys, buffers): await self.stand_still()
    async def probe(self, keys): return [None] * len(keys)
    async def delete(self, keys, *, corrupt=False): return [False] * len(keys)
    async def clear(self): return 0, 0
    async def close(self): await self.stand_still()
"""


def hanging(place: StopPlace, **parameters: object) -> tuple[list[str], dict[str, str]]:
    (place.folder / "hanging_adapter.py").write_text(HANGING)
    adapter = {
        "type": "plugin",
        "module_path": "hanging_adapter",
        "class_name": "Hanging",
        "adapter_params": parameters,
    }
    path = os.pathsep.join(filter(None, [str(place.folder), os.environ.get("PYTHONPATH")]))
    return ["--l2-adapter", json.dumps(adapter)], {**STACKS, "PYTHONPATH": path}


def test_a_stop_while_a_backend_hangs(place: StopPlace) -> None:
    extra, environment = hanging(place)
    with place.server(*extra, environment=environment) as server:
        server.wait_ready()
        with SmallEngine(place.port) as engine:
            engine.store(engine.tokens(1))
            until(lambda: server.status()["l2"]["adapters"][0]["stores_in_flight"] == 1)
            started = time.monotonic()
            server.popen.send_signal(signal.SIGTERM)
            assert place.ended(server, "hanging store") == 1
            assert time.monotonic() - started < STOP_SECONDS
        assert "are left behind" in server.log()
    assert not place.file.exists()


@pytest.mark.slow  # STOP_SECONDS
def test_a_stop_while_a_backend_blocks_the_storage_loop(place: StopPlace) -> None:
    extra, environment = hanging(place, blocks=True)
    with place.server(*extra, environment=environment) as server:
        server.wait_ready()
        with SmallEngine(place.port) as engine:
            engine.store(engine.tokens(1))
            server.popen.send_signal(signal.SIGTERM)
            assert place.ended(server, "blocking store") == 1
    assert not place.file.exists()


def test_nobody_can_call_any_more_when_l1_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loops = {"lmcache-rpc", "lmcache-http", "lmcache-events", "storage", "lmcache-payload_0"}
    seen: list[set[str]] = []

    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()} & loops

    def look(store: L1Store, **options: bool) -> None:
        seen.append(names())
        close(store, **options)

    close = L1Store.close
    monkeypatch.setattr(L1Store, "close", look)
    name = f"lmcache-test-{os.getpid()}-order"
    adapter = {"type": "fs_native", "base_path": str(tmp_path / "l2")}
    with server_within(shm_name=name, lookup_hash_log_dir=str(tmp_path), l2_adapter=[adapter]) as server:
        port = int(server.status()["rpc_endpoint"].rpartition(":")[2])
        with SmallEngine(port, transfer=WantedTransfer.SOCKET) as engine:
            assert engine.store(engine.tokens(1)) == 1
        assert names() == loops
    assert seen == [set()]


def test_a_stop_while_a_backend_does_not_open(place: StopPlace) -> None:
    extra, environment = hanging(place, opens=False)
    with place.server(*extra, environment=environment) as server:
        until(lambda: place.file.exists() or not server.alive())
        started = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert place.ended(server, "hanging open") == 0
        assert time.monotonic() - started < STOP_SECONDS
        assert "is ready" not in server.log()
    assert not place.file.exists()


def test_a_server_that_is_the_first_process_of_a_container(place: StopPlace) -> None:
    """To that one the kernel delivers only signals that it handles."""
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a PID namespace")
    command = [*LMCACHE, "server", "--l1-size-gb", "0.0625", "--eviction-policy", "LRU"]
    command += ["--port", "0", "--http-port", "0", "--prometheus-port", "0", "--shm-name", place.name]
    for moment in (0.2, 0.5, 1.5):
        with subprocess.Popen([*container, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as outside:
            try:
                children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
                first = int(until(lambda children=children: children.read_text().split())[0])
                until(lambda first=first: takes_signals(first))
                time.sleep(moment)
                os.kill(first, signal.SIGTERM)
                assert outside.wait(STOP_SECONDS) == 0
            finally:
                outside.kill()
        assert not place.file.exists()


@pytest.mark.skipif(HANGUP_IS_IGNORED, reason="SIGHUP is ignored here")
@pytest.mark.parametrize("moment", ["ready", "starting"])
def test_a_terminal_that_is_closed_ends_the_server(place: StopPlace, moment: str) -> None:
    ours, terminal = pty.openpty()
    command = [*LMCACHE, "server", "--l1-size-gb", "0.0625", "--eviction-policy", "LRU"]
    command += ["--port", "0", "--http-port", "0", "--prometheus-port", "0", "--shm-name", place.name]
    server = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command], stdin=terminal, stdout=terminal, stderr=terminal
    )
    try:
        os.close(terminal)
        if moment == "starting":
            until(lambda: place.file.exists())
        else:
            seen = b""
            while b"is ready" not in seen:
                seen += os.read(ours, 4096)
        os.close(ours)
        assert server.wait(STOP_SECONDS) == 0
    finally:
        server.kill()
        server.wait()
    until(lambda: not place.file.exists())


def test_what_nohup_starts_outlives_its_terminal(place: StopPlace) -> None:
    with place.server(program=("-c", NOHUP)) as server:
        server.wait_ready()
        server.popen.send_signal(signal.SIGHUP)
        assert server.status()["uptime_seconds"] > 0
        assert server.stop() == 0
    assert not place.file.exists()


NOHUP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from lmcache.cli.main import main
sys.exit(main())
"""


def test_a_start_that_fails_leaves_nothing(place: StopPlace) -> None:
    """Whatever had begun by then: memory, adapters, loops."""
    with place.server() as first:
        first.wait_ready()
        other = f"{place.name}-2"
        with place.server(http_port=free_port()) as second:  # the port of the first
            assert second.popen.wait(COMMAND_SECONDS) == 1
        folder = place.folder / "file"
        folder.write_text("")
        adapter = ["--l2-adapter", json.dumps({"type": "fs_native", "base_path": str(folder)})]
        options = ["--port", "0", "--http-port", "0", "--prometheus-port", "0", "--shm-name", other, *adapter]
        command = [*LMCACHE, "server", "--l1-size-gb", "0.1"]
        command += ["--eviction-policy", "LRU", *options]
        assert subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS).returncode in (1, 2)
        assert not (Path("/dev/shm") / other).exists()
        assert first.stop() == 0
    assert not place.file.exists()


FORKING = """
import os, signal, time
from lmcache.stop_signals import StopSignals
signals = StopSignals()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"!")
    time.sleep(60)
    os._exit(0)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], signals.stop_requested.wait(0.2))
os.kill(os.getpid(), signal.SIGTERM)
print(signals.stop_requested.wait(10))
"""


HOLDING = """
import logging, sys
from lmcache.stop_signals import StopSignals
from lmcache.telemetry.logs import configure_logs
configure_logs("INFO")
signals = StopSignals()
handler = logging.getLogger("lmcache").handlers[0]
held = {"handler": handler.acquire, "logging": getattr(logging, "_acquireLock", None) or logging._lock.acquire}
if sys.argv[1] in held:
    held[sys.argv[1]]()
print("holds it", flush=True)
while True:
    if sys.argv[1] == "event":
        signals.stop_requested.wait(0)
"""


@pytest.mark.parametrize(
    ("held", "processes", "second"),
    [
        ("handler", 1, signal.SIGTERM),
        ("handler", 1, signal.SIGINT),
        ("logging", 1, signal.SIGINT),
        ("event", 8, signal.SIGINT),
    ],
)
def test_a_second_signal_ends_a_process_whatever_its_main_thread_holds(
    held: str, processes: int, second: signal.Signals
) -> None:
    """A lock of the log, or that of the event which says that the server is to stop: taken and given back all the time,
    so that a signal meets it in some of several processes."""
    command = [sys.executable, "-c", HOLDING, held]
    for _ in range(processes):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "holds it\n"
                process.send_signal(signal.SIGTERM)
                until(lambda process=process: not waits(process.pid, signal.SIGTERM))
                # One that is equal counts only once it can be no repetition of the first.
                until(lambda process=process: process.poll() or process.send_signal(second))
                assert process.returncode in (128 + second, 128 + signal.SIGTERM)
            finally:
                process.kill()


def test_what_is_sent_to_a_forked_child_is_not_for_the_server() -> None:
    """A child shares the descriptors of its parent, the one that signals are written to included."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == [f"{signal.SIGTERM:d} False", "True"], done.stderr
