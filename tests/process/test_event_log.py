"""Servers that tell a coordinator what they have by a stream of a real Valkey: what goes wrong there costs a resync."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.fleet.event_log import DEFAULT_STREAM, EventLogSettings
from lmcache.fleet.events import EventIntake
from lmcache.fleet.messages import Batch, EventsAnswer
from lmcache.testing.processes import CacheServer, CoordinatorProcess, free_port
from polling import until
from process.support import SmallEngine
from process.test_fleet import become, joined, member, places
from services.redis import Valkey
from unit.fleet.test_reporting import Joined, coordinator, url_of

PASSWORD = "short"
pytest.importorskip("redis")


class LoggedFleet:
    """A Valkey, a coordinator and servers: each may be ended and started again at its address."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.password_file = folder / "password"
        self.password_file.write_text(PASSWORD)
        self.log_port, self.coordinator_port = free_port(), free_port()
        self.starts = 0
        self.valkey = self.start_valkey()

    def start_valkey(self) -> Valkey:
        self.starts += 1
        folder = self.folder / f"valkey-{self.starts}"
        self.valkey = self._stack.enter_context(Valkey(folder, port=self.log_port, password=PASSWORD))
        self.valkey.wait_ready()
        return self.valkey

    def options(self, prefix: str, stream: str = DEFAULT_STREAM) -> list[str]:
        words = [f"--{prefix}event-transport", "valkey", f"--{prefix}valkey-url", f"redis://127.0.0.1:{self.log_port}"]
        words += [f"--{prefix}valkey-password-file", str(self.password_file)]
        return [*words, f"--{prefix}valkey-stream", stream]

    def start_coordinator(self, *extra: str) -> CoordinatorProcess:
        self.starts += 1
        options = ["--instance-timeout", "30", *self.options(""), *extra]
        coordinator = CoordinatorProcess(
            self.folder, port=self.coordinator_port, extra=options, log_name=f"coordinator-{self.starts}.log"
        )
        self.coordinator = self._stack.enter_context(coordinator)
        self.coordinator.wait_ready()
        return coordinator

    def start_server(self, name: str) -> tuple[CacheServer, SmallEngine]:
        started = member(self.folder, name, self.coordinator, *self.options("coordinator-"))
        server = self._stack.enter_context(started)
        server.wait_ready()
        return server, self._stack.enter_context(SmallEngine(server.port))

    def stream_length(self) -> int:
        return int(self.valkey.call("XLEN", DEFAULT_STREAM))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LoggedFleet]:
    with contextlib.ExitStack() as stack:
        yield LoggedFleet(tmp_path, stack)


def resyncs(server: CacheServer) -> float:
    return server.metric("lmcache_mp_coordinator_resyncs_total")


def failures(server: CacheServer) -> float:
    return server.metric("lmcache_mp_coordinator_failures_total", 'call="events"')


def still_serves(engine: SmallEngine, request: str, *chunks: int) -> bool:
    wanted = engine.tokens(*chunks)
    engine.store(wanted)
    found = engine.lookup(request, wanted)
    whole = found.chunks == len(chunks) and engine.read(found)
    engine.end(request)
    return whole


def test_the_directory_follows_by_the_log_alone(fleet: LoggedFleet) -> None:
    coordinator = fleet.start_coordinator()
    (first, one_engine), (second, other_engine) = fleet.start_server("a"), fleet.start_server("b")
    one_engine.store(one_engine.tokens(1, 2, 3))
    other_engine.store(other_engine.tokens(1, 2))
    become(coordinator, [["a", "b"], ["a", "b"], ["a"]])
    first.clear("l1")
    become(coordinator, [["b"], ["b"], []])
    assert fleet.stream_length() >= 4 and not failures(first) + failures(second)
    assert second.stop() == 0
    become(coordinator, [[], [], []])
    assert coordinator.stop() == 0 and "Traceback" not in coordinator.log() + first.log()


def test_a_log_that_is_lost_costs_one_resync(fleet: LoggedFleet) -> None:
    """Servers serve meanwhile."""
    coordinator = fleet.start_coordinator()
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1, 2))
    become(coordinator, [["a"], ["a"], []])
    os.kill(coordinator.pid, signal.SIGSTOP)  # what comes first now is on its way to it, what comes then is not
    for last in (3, 4):
        length = fleet.stream_length()
        engine.store(engine.tokens(*range(1, last + 1)))
        until(lambda: fleet.stream_length() > length + 1)  # noqa: B023
    fleet.valkey.kill()
    os.kill(coordinator.pid, signal.SIGCONT)
    assert still_serves(engine, "meanwhile", 7, 8)
    until(lambda: failures(server) > 0)
    before = resyncs(server)
    fleet.start_valkey()
    until(lambda: places(coordinator, chunks=(1, 2, 3, 4)) == [["a"]] * 4)
    until(lambda: places(coordinator, chunks=(7, 8)) == [["a"], ["a"]])
    assert resyncs(server) == before + 1
    until(lambda: coordinator.metric_at(coordinator.port, "lmcache_mp_coordinator_event_log_failures_total") > 0)
    assert "Servers' events cannot be read" in coordinator.log() and "Traceback" not in coordinator.log()


def test_a_server_that_tells_much_does_not_push_out_what_is_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is slower than the servers, and a log that keeps little."""
    monkeypatch.setattr("lmcache.fleet.valkey_log.MAX_LOGGED_EVENT_REQUESTS", 100)
    monkeypatch.setattr("lmcache.fleet.valkey_log._BODIES_AT_ONCE", 1)
    monkeypatch.setattr("lmcache.fleet.fleet.MAX_LOGGED_EVENT_REQUESTS", 100)
    for module in ("fleet", "event_log"):
        monkeypatch.setattr(f"lmcache.fleet.{module}.MAX_TOLD_LOG_REQUESTS", 3)
    monkeypatch.setattr("lmcache.fleet.event_batches.REPORTED_ENTRIES", 2)
    monkeypatch.setattr("lmcache.fleet.event_log._ASK_SECONDS", 0.02)
    apply = EventIntake.apply

    def apply_slowly(intake: EventIntake, batches: Sequence[Batch]) -> EventsAnswer:
        time.sleep(0.003)
        return apply(intake, batches)

    monkeypatch.setattr(EventIntake, "apply", apply_slowly)
    with contextlib.ExitStack() as stack:
        valkey = stack.enter_context(Valkey(tmp_path, port=free_port()))
        valkey.wait_ready()
        valkey.call("CONFIG", "SET", "stream-node-max-entries", "10")  # it drops whole nodes
        url = f"redis://127.0.0.1:{valkey.port}"
        process = stack.enter_context(coordinator(event_transport="valkey", valkey_url=url))
        by_log: dict[str, Any] = {"event_transport": "valkey", "event_log": EventLogSettings(url)}
        servers = [Joined(url_of(process), name, **by_log) for name in ("a", "b")]
        for server in servers:
            for number in range(600):
                server.tiers[0].add((number % 4, number), 4096)
            stack.enter_context(server)
        until(lambda: all(server.is_told(process) for server in servers))
        until(lambda: process.fleet.intake.counts.resyncs == len(servers))
        assert not process.fleet.intake.counts.gaps


def test_a_wrong_password_keeps_nobody_from_serving(fleet: LoggedFleet) -> None:
    """And the right one, once the file has it, is enough."""
    fleet.password_file.write_text("wrong")
    coordinator = fleet.start_coordinator()
    server, engine = fleet.start_server("a")
    assert still_serves(engine, "first", 1, 2, 3)
    until(lambda: joined(coordinator) == {"a"} and failures(server) > 0)
    assert "Events do not reach the coordinator" in server.log() and "cannot be reached" in coordinator.log()
    assert "wrong" not in server.log().replace("wrong pass", "").replace("WRONGPASS", "")
    assert places(coordinator) == [[], [], []]
    fleet.password_file.write_text(PASSWORD)
    become(coordinator, [["a"], ["a"], ["a"]])
    assert not resyncs(server)


def test_a_checkpoint_says_where_to_go_on(fleet: LoggedFleet, tmp_path: Path) -> None:
    saved = "--checkpoint-path", str(tmp_path / "directory")
    coordinator = fleet.start_coordinator(*saved)
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1, 2))
    become(coordinator, [["a"], ["a"], []])
    before = resyncs(server)
    coordinator.stop()
    engine.store(engine.tokens(1, 2, 3))
    length = fleet.stream_length()
    until(lambda: fleet.stream_length() > length + 1)
    coordinator = fleet.start_coordinator(*saved)
    become(coordinator, [["a"], ["a"], ["a"]])
    assert resyncs(server) == before
    assert coordinator.metric_at(coordinator.port, "lmcache_mp_coordinator_gaps_total") == 0
    coordinator.stop()
    fleet.valkey.call("DEL", DEFAULT_STREAM)
    server.clear("l1")
    coordinator = fleet.start_coordinator(*saved)
    become(coordinator, [[], [], []])
    # And a log that went back in time, behind the position.
    fleet.valkey.call("XADD", DEFAULT_STREAM, f"{2**53}-1", "batches", "no batches")
    until(lambda: coordinator.metric_at(coordinator.port, "lmcache_mp_coordinator_event_log_failures_total") >= 1)
    fleet.valkey.call("DEL", DEFAULT_STREAM)
    engine.store(engine.tokens(1))
    become(coordinator, [["a"], [], []])
    assert "is no body of events" in coordinator.log()


def test_a_log_that_hangs_holds_nobody_up(fleet: LoggedFleet) -> None:
    coordinator = fleet.start_coordinator()
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1, 2, 3))
    become(coordinator, [["a"], ["a"], ["a"]])
    os.kill(fleet.valkey.pid, signal.SIGSTOP)
    try:
        assert still_serves(engine, "meanwhile", 7, 8)
        assert places(coordinator) == [["a"], ["a"], ["a"]]
        assert server.stop() == 0
        until(lambda: not joined(coordinator))
    finally:
        os.kill(fleet.valkey.pid, signal.SIGCONT)


def test_a_coordinator_that_reads_no_log_is_said(fleet: LoggedFleet) -> None:
    fleet.coordinator = CoordinatorProcess(fleet.folder, port=fleet.coordinator_port)
    with fleet.coordinator as coordinator:
        coordinator.wait_ready()
        server, _ = fleet.start_server("a")
        until(lambda: "reads no events by valkey" in server.log())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--valkey-url must be redis://HOST:PORT[/DATABASE], rediss:// for TLS or unix:///PATH, got ''"),
        (["--valkey-url", "redis://:secret@h:1"], "--valkey-url must not hold a password"),
        (["--valkey-url", "redis://h:1?password=secret"], "--valkey-url must not have a query, got 'password'"),
        (["--valkey-url", "redis://user@h:1"], "--valkey-url names a user: --valkey-password-file must"),
        (["--valkey-url", "redis://h:1", "--valkey-password-file", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_options_that_are_refused(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--host", "127.0.0.1", "--port", "0", "--controller-port", "0", "--event-transport", "valkey"]
    assert main(["coordinator", *options, *words]) == 2
    error = capfd.readouterr().err
    assert sentence in error and "secret" not in error


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lmcache.fleet.valkey_log", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    options = ["--coordinator-url", "http://h", "--coordinator-event-transport", "valkey"]
    options += ["--coordinator-valkey-url", "redis://h:1"]
    assert main(["config", "check", "--l1-size-gb", "0.01", "--eviction-policy", "LRU", *options]) == 2
    assert "pip install 'lmcache[valkey]'" in capsys.readouterr().err
