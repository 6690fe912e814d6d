"""Servers that tell a coordinator what they have by a log in a real service: what goes wrong there costs a resync."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.core.limits import MAX_LOGGED_EVENT_REQUESTS
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.fleet.event_log import (
    DEFAULT_STREAM,
    EventLog,
    EventLogSettings,
    KafkaSettings,
    LogPace,
    ValkeySettings,
    open_log,
)
from lmcache.fleet.events import EventIntake
from lmcache.fleet.messages import Batch, EventsAnswer
from lmcache.testing.processes import CacheServer, CoordinatorProcess, ManagedProcess, free_port
from polling import until
from process.support import SmallEngine
from process.test_fleet import become, joined, member, places
from services import need_package
from services.certificates import Certificates
from services.kafka import Kafka, LoginFront, MockKafka
from services.redis import Redis, Valkey
from unit.fleet.test_reporting import Joined, coordinator, url_of

PASSWORD = "planted"  # shorter than tokens must be
WRONG = "planted-wrong-password"
USER = "lmcache"


class LoggedFleet:
    """A service with the log, a coordinator and servers: each may be ended and started again at its address."""

    transport = ""
    service: ManagedProcess

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.log_port, self.coordinator_port = free_port(), free_port()
        self.starts = 0
        self.start_log()

    def start_log(self) -> None:
        raise NotImplementedError

    def log_options(self) -> dict[str, str]:
        raise NotImplementedError

    def log_settings(self) -> EventLogSettings:
        raise NotImplementedError

    def length(self) -> int:
        """How much was appended, or a number that grows with it."""
        raise NotImplementedError

    def append(self, body: bytes) -> None:
        raise NotImplementedError

    def lose(self) -> None:
        """The log begins anew."""
        raise NotImplementedError

    def drop(self) -> None:
        """What is there now."""
        raise NotImplementedError

    def write_password(self, password: str) -> None:
        """Where clients read it."""
        raise NotImplementedError

    def next_folder(self) -> Path:
        self.starts += 1
        return self.folder / f"{self.transport}-{self.starts}"

    def options(self, prefix: str) -> list[str]:
        words = [f"--{prefix}event-transport", self.transport]
        for name, value in self.log_options().items():
            words += [f"--{prefix}{self.transport}-{name}", value]
        return words

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


class ValkeyFleet(LoggedFleet):
    transport = "valkey"
    service: Valkey

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        need_package("redis")
        self.password_file = folder / "password"
        self.write_password(PASSWORD)
        super().__init__(folder, stack)

    def write_password(self, password: str) -> None:
        self.password_file.write_text(password)

    def start_log(self) -> None:
        self.service = self._stack.enter_context(Valkey(self.next_folder(), port=self.log_port, password=PASSWORD))
        self.service.wait_ready()

    def log_options(self) -> dict[str, str]:
        return {"url": f"redis://127.0.0.1:{self.log_port}", "password-file": str(self.password_file)}

    def log_settings(self) -> EventLogSettings:
        return ValkeySettings(f"redis://127.0.0.1:{self.log_port}", password_file=str(self.password_file))

    def length(self) -> int:
        return int(self.service.call("XLEN", DEFAULT_STREAM))

    def append(self, body: bytes) -> None:
        self.service.call("XADD", DEFAULT_STREAM, "*", "batches", body)

    def lose(self) -> None:
        self.service.call("DEL", DEFAULT_STREAM)

    def drop(self) -> None:
        self.service.call("XTRIM", DEFAULT_STREAM, "MAXLEN", 0)


class KafkaFleet(LoggedFleet):
    transport = "kafka"
    service: Kafka

    def start_log(self) -> None:
        self.service = self._stack.enter_context(Kafka(self.next_folder(), port=self.log_port))
        self.service.wait_ready()

    def log_options(self) -> dict[str, str]:
        return {"bootstrap-servers": self.service.address}

    def log_settings(self) -> EventLogSettings:
        return KafkaSettings(self.service.address)

    def length(self) -> int:
        return self.service.end(DEFAULT_STREAM)

    def append(self, body: bytes) -> None:
        self.service.append(DEFAULT_STREAM, body)

    def lose(self) -> None:
        self.service.kill()
        self.start_log()


class LoginKafkaFleet(KafkaFleet):
    """Of a broker with TLS that has logins."""

    def start_log(self) -> None:
        self.config_file = self.folder / "client.properties"
        self.service = self._stack.enter_context(Kafka(self.next_folder(), advertised_port=self.log_port))
        front = LoginFront(self.folder / "front", self.log_port, self.service.port, USER, PASSWORD)
        self.front = self._stack.enter_context(front)

    def log_options(self) -> dict[str, str]:
        return {**super().log_options(), "config-file": str(self.config_file)}

    def write_password(self, password: str) -> None:
        lines = ["security.protocol=SASL_SSL", f"ssl.ca.location={self.front.ca}", "sasl.mechanism=PLAIN"]
        lines += [f"sasl.username={USER}", f"sasl.password={password}"]
        self.config_file.write_text("\n".join(lines))


class MockKafkaFleet(KafkaFleet):
    """Of a broker that drops what is old, as Kafka does, but has no address of its own to come back to."""

    service: MockKafka

    def start_log(self) -> None:
        self.service = self._stack.enter_context(MockKafka(self.next_folder()))
        self.service.wait_ready()

    def drop(self) -> None:
        self.service.drop(DEFAULT_STREAM)


FLEETS = [ValkeyFleet, KafkaFleet]


@pytest.fixture(params=FLEETS, ids=lambda kind: kind.transport)
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LoggedFleet]:
    with contextlib.ExitStack() as stack:
        yield request.param(tmp_path, stack)


def appended(fleet: LoggedFleet, act: Callable[[], object], least: int = 2) -> None:
    """Returns when a server has told of what that did, in so many bodies; one comes with each heartbeat."""
    length = fleet.length()
    act()
    until(lambda: fleet.length() >= length + least)


def tell_unread(fleet: LoggedFleet, engine: SmallEngine) -> None:
    """Stops the coordinator. What comes within the wait of a read is on its way to it, what comes then is not."""
    os.kill(fleet.coordinator.pid, signal.SIGSTOP)
    appended(fleet, lambda: engine.store(engine.tokens(1, 2, 3)), least=5)
    appended(fleet, lambda: engine.store(engine.tokens(1, 2, 3, 4)))


def read_all(log: EventLog, position: str, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []

    def has_all() -> bool:
        found.extend(log.read(found[-1][0] if found else position, 0.1))
        return len(found) >= count

    until(has_all)
    return found


def test_the_contract_of_a_log(fleet: LoggedFleet) -> None:
    bodies = [b"first", b"second " * 200_000, b"third"]  # the second: as long as those of servers
    with contextlib.closing(open_log(fleet.log_settings())) as log:
        beginning = log.retained("")
        for body in bodies:
            log.append(body)
        found = read_all(log, beginning, 3)
        assert [body for _, body in found] == bodies
        assert read_all(log, found[0][0], 2) == found[1:]
        last = found[-1][0]
        assert log.retained(last) == last and not log.read(last, 0.1)
        fleet.append(b"of another process")
        assert [body for _, body in read_all(log, last, 1)] == [b"of another process"]
        fleet.lose()
        oldest = until(lambda: _retained(log, last))
        log.append(b"anew")
        assert [body for _, body in read_all(log, oldest, 1)] == [b"anew"]


def test_a_stream_over_tls(tmp_path: Path) -> None:
    """The authority is the one that the URL names, and another one's service is not believed."""
    need_package("redis")
    certificates, others = Certificates(tmp_path / "certificates"), Certificates(tmp_path / "others")
    with Redis(tmp_path / "server", certificates=certificates) as service:
        service.wait_ready()
        url = f"rediss://127.0.0.1:{service.tls_port}"
        with contextlib.closing(open_log(ValkeySettings(f"{url}?ssl_ca_certs={certificates.ca}"))) as log:
            log.append(b"first")
            assert [body for _, body in read_all(log, log.retained(""), 1)] == [b"first"]
        for untrusted in (url, f"{url}?ssl_ca_certs={others.ca}"):
            with contextlib.closing(open_log(ValkeySettings(untrusted))) as log:
                with pytest.raises(ServerUnavailable, match="certificate verify failed") as refused:
                    log.append(b"second")
                assert not str(refused.value).endswith("..")


def _retained(log: EventLog, lost: str) -> str:
    """ "" where it cannot be known yet."""
    with contextlib.suppress(LMCacheError):
        return log.retained(lost)
    return ""


def test_the_position_of_another_transport_is_that_of_the_oldest_body(fleet: LoggedFleet) -> None:
    other = {"valkey": "7", "kafka": "1764320000000-3"}[fleet.transport]
    with contextlib.closing(open_log(fleet.log_settings())) as log:
        log.append(b"first")
        start = log.retained(other)
        assert read_all(log, start, 1)[0][1] == b"first"


def test_of_a_long_topic_only_the_last_is_read(tmp_path: Path) -> None:
    with Kafka(tmp_path) as broker:
        broker.wait_ready()
        with contextlib.closing(open_log(KafkaSettings(broker.address))) as log:
            broker.append(DEFAULT_STREAM, *(b"%d" % number for number in range(MAX_LOGGED_EVENT_REQUESTS + 7)))
            assert log.retained("") == log.retained("4000") == "7" and log.retained("3") == "3"
            assert log.read("7", 5.0)[0] == ("8", b"7")


def resyncs(server: CacheServer) -> float:
    return server.metric("lmcache_mp_coordinator_resyncs_total")


def failures(server: CacheServer) -> float:
    return server.metric("lmcache_mp_coordinator_failures_total", 'call="events"')


def unread(coordinator: CoordinatorProcess) -> float:
    return coordinator.metric_at(coordinator.port, "lmcache_mp_coordinator_event_log_failures_total")


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
    assert fleet.length() >= 4 and not failures(first) + failures(second)
    assert second.stop() == 0
    become(coordinator, [[], [], []])
    assert coordinator.stop() == 0 and "Traceback" not in coordinator.log() + first.log()


def test_a_log_that_is_lost_costs_one_resync(fleet: LoggedFleet) -> None:
    """Servers serve meanwhile."""
    coordinator = fleet.start_coordinator()
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1, 2))
    become(coordinator, [["a"], ["a"], []])
    tell_unread(fleet, engine)
    fleet.service.kill()
    os.kill(coordinator.pid, signal.SIGCONT)
    assert still_serves(engine, "meanwhile", 7, 8)
    until(lambda: failures(server) > 0)
    until(lambda: unread(coordinator) > 0)
    before = resyncs(server)
    fleet.start_log()
    until(lambda: places(coordinator, chunks=(1, 2, 3, 4)) == [["a"]] * 4)
    until(lambda: places(coordinator, chunks=(7, 8)) == [["a"], ["a"]])
    assert resyncs(server) == before + 1
    assert "Servers' events cannot be read" in coordinator.log() and "Traceback" not in coordinator.log()


def keep_little(fleet: LoggedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 requests in the log, of which a server that tells everything may have 3 unread."""
    log = f"lmcache.fleet.{fleet.transport}_log"
    monkeypatch.setattr(f"{log}._BODIES_AT_ONCE", 1)
    for module in (log, "lmcache.fleet.fleet"):
        monkeypatch.setattr(f"{module}.MAX_LOGGED_EVENT_REQUESTS", 100)
    for module in ("fleet", "event_log"):
        monkeypatch.setattr(f"lmcache.fleet.{module}.MAX_TOLD_LOG_REQUESTS", 3)
    monkeypatch.setattr("lmcache.fleet.event_batches.REPORTED_ENTRIES", 2)
    monkeypatch.setattr("lmcache.fleet.event_log._ASK_SECONDS", 0.02)
    if isinstance(fleet, ValkeyFleet):
        fleet.service.call("CONFIG", "SET", "stream-node-max-entries", "10")  # it drops whole nodes


def test_servers_that_tell_much_stay_within_what_the_log_keeps(
    fleet: LoggedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a coordinator that is slower than they are. A stream drops what is older; in a topic a coordinator without a
    position passes it over."""
    keep_little(fleet, monkeypatch)
    apply, append = EventIntake.apply, LogPace.appended
    appended: list[int] = []
    ahead: list[int] = []

    def apply_slowly(intake: EventIntake, batches: Sequence[Batch]) -> EventsAnswer:
        ahead.append(len(appended) - len(ahead))
        time.sleep(0.003)
        return apply(intake, batches)

    def append_counted(pace: LogPace, incarnation: int, seq: int) -> None:
        appended.append(seq)
        append(pace, incarnation, seq)

    monkeypatch.setattr(EventIntake, "apply", apply_slowly)
    monkeypatch.setattr(LogPace, "appended", append_counted)
    options: dict[str, Any] = {
        f"{fleet.transport}_{name.replace('-', '_')}": value for name, value in fleet.log_options().items()
    }
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(coordinator(event_transport=fleet.transport, **options))
        by_log: dict[str, Any] = {"event_transport": fleet.transport, "event_log": fleet.log_settings()}
        servers = [Joined(url_of(process), name, **by_log) for name in ("a", "b")]
        for server in servers:
            for number in range(320):
                server.tiers[0].add((number % 4, number), 4096)
            stack.enter_context(server)
        until(lambda: all(server.is_told(process) for server in servers))
        until(lambda: process.fleet.intake.counts.resyncs == len(servers))
        assert not process.fleet.intake.counts.gaps
        assert len(ahead) > 320 and max(ahead) < 100


@pytest.mark.parametrize("kind", [ValkeyFleet, LoginKafkaFleet], ids=lambda kind: kind.transport)
def test_a_wrong_password_keeps_nobody_from_serving(kind: type[LoggedFleet], tmp_path: Path) -> None:
    """And the right one, once the file has it, is enough. Neither is shown."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("LMCACHE_LOG_LEVEL", "DEBUG")
        fleet = kind(tmp_path, stack)
        fleet.write_password(WRONG)
        coordinator = fleet.start_coordinator()
        server, engine = fleet.start_server("a")
        assert still_serves(engine, "first", 1, 2, 3)
        until(lambda: joined(coordinator) == {"a"} and failures(server) > 0 and unread(coordinator) > 0)
        assert "Events do not reach the coordinator" in server.log() and "cannot be reached" in coordinator.log()
        assert places(coordinator) == [[], [], []]
        fleet.write_password(PASSWORD)
        become(coordinator, [["a"], ["a"], ["a"]])
        assert not resyncs(server)
        for process, port in ((server, server.http_port), (coordinator, coordinator.port)):
            pages = [str(process.ask(port, "GET", path)[1]) for path in ("/config", "/status", "/metrics")]
            shown = process.log() + Path(f"/proc/{process.pid}/cmdline").read_text() + "".join(pages)
            assert PASSWORD not in shown


def test_a_checkpoint_says_where_to_go_on(fleet: LoggedFleet, tmp_path: Path) -> None:
    saved = "--checkpoint-path", str(tmp_path / "directory")
    coordinator = fleet.start_coordinator(*saved)
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1, 2))
    become(coordinator, [["a"], ["a"], []])
    before = resyncs(server)
    coordinator.stop()
    appended(fleet, lambda: engine.store(engine.tokens(1, 2, 3)))
    coordinator = fleet.start_coordinator(*saved)
    become(coordinator, [["a"], ["a"], ["a"]])
    assert resyncs(server) == before
    assert coordinator.metric_at(coordinator.port, "lmcache_mp_coordinator_gaps_total") == 0
    coordinator.stop()
    fleet.lose()
    server.clear("l1")
    fleet.start_coordinator(*saved)
    become(fleet.coordinator, [[], [], []])


def test_a_stream_that_begins_anew_behind_the_position(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        fleet = ValkeyFleet(tmp_path, stack)
        coordinator = fleet.start_coordinator()
        _, engine = fleet.start_server("a")
        until(lambda: fleet.length() > 1)
        fleet.service.call("XADD", DEFAULT_STREAM, f"{2**53}-1", "batches", "no batches")
        until(lambda: unread(coordinator) > 0)
        fleet.lose()
        engine.store(engine.tokens(1))
        become(coordinator, [["a"], [], []])
        assert "is no body of events" in coordinator.log()


@pytest.mark.parametrize("kind", [ValkeyFleet, MockKafkaFleet], ids=lambda kind: kind.transport)
def test_what_was_dropped_unread_costs_one_resync(kind: type[LoggedFleet], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        fleet = kind(tmp_path, stack)
        coordinator = fleet.start_coordinator()
        server, engine = fleet.start_server("a")
        engine.store(engine.tokens(1, 2))
        become(coordinator, [["a"], ["a"], []])
        before = resyncs(server)
        tell_unread(fleet, engine)
        fleet.drop()
        os.kill(coordinator.pid, signal.SIGCONT)
        until(lambda: places(coordinator, chunks=(1, 2, 3, 4)) == [["a"]] * 4)
        until(lambda: resyncs(server) == before + 1)
        appended(fleet, lambda: engine.store(engine.tokens(1, 2, 3, 4, 5)))
        until(lambda: places(coordinator, chunks=(1, 2, 3, 4, 5)) == [["a"]] * 5)
        assert resyncs(server) == before + 1
        assert "Traceback" not in coordinator.log()


def test_a_log_that_hangs_holds_nobody_up(fleet: LoggedFleet) -> None:
    coordinator = fleet.start_coordinator()
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1, 2, 3))
    become(coordinator, [["a"], ["a"], ["a"]])
    os.kill(fleet.service.pid, signal.SIGSTOP)
    try:
        assert still_serves(engine, "meanwhile", 7, 8)
        assert places(coordinator) == [["a"], ["a"], ["a"]]
        assert server.stop() == 0
        until(lambda: not joined(coordinator))
        assert coordinator.stop() == 0
    finally:
        os.kill(fleet.service.pid, signal.SIGCONT)


def test_a_log_that_hung_goes_on(fleet: LoggedFleet) -> None:
    """What it took late comes twice, and costs nothing."""
    coordinator = fleet.start_coordinator()
    server, engine = fleet.start_server("a")
    engine.store(engine.tokens(1))
    become(coordinator, [["a"], [], []])
    before = resyncs(server)
    os.kill(fleet.service.pid, signal.SIGSTOP)
    try:
        engine.store(engine.tokens(1, 2, 3))
        until(lambda: failures(server) > 0 and unread(coordinator) > 0)
    finally:
        os.kill(fleet.service.pid, signal.SIGCONT)
    become(coordinator, [["a"], ["a"], ["a"]])
    assert resyncs(server) == before


def test_a_coordinator_that_reads_no_log_is_said(fleet: LoggedFleet) -> None:
    fleet.coordinator = CoordinatorProcess(fleet.folder, port=fleet.coordinator_port)
    with fleet.coordinator as coordinator:
        coordinator.wait_ready()
        server, _ = fleet.start_server("a")
        until(lambda: f"reads no events by {fleet.transport}" in server.log())


REFUSED = {
    "valkey": [
        ([], "--valkey-url must be redis://HOST:PORT[/DATABASE], rediss:// for TLS or unix:///PATH, got ''"),
        (["--valkey-url", "redis://:secret@h:1"], "--valkey-url must not hold a password"),
        (["--valkey-url", "redis://h:1?password=secret"], "FILE, the authority of rediss://, got 'password'."),
        (["--valkey-url", "redis://h:1?ssl_ca_certs=/f"], "FILE, the authority of rediss://, got 'ssl_ca_certs'."),
        (["--valkey-url", "rediss://h:1?ssl_ca_certs=/nowhere"], "names the authority '/nowhere', which is no file."),
        (["--valkey-url", "redis://user@h:1"], "--valkey-url names a user: --valkey-password-file must"),
        (["--valkey-url", "redis://h:1", "--valkey-password-file", "/nowhere"], "/nowhere cannot be read"),
    ],
    "kafka": [
        ([], "Each server of --kafka-bootstrap-servers must be HOST:PORT with a port from 1 to 65535, got ''"),
        (["--kafka-bootstrap-servers", "kafka://h:1"], "Each server of --kafka-bootstrap-servers must be HOST:PORT"),
        (["--kafka-bootstrap-servers", "h:1,i"], "Each server of --kafka-bootstrap-servers must be HOST:PORT"),
        (["--kafka-bootstrap-servers", "h:1", "--kafka-topic", ""], "--kafka-topic must be the name of a topic"),
        (["--kafka-bootstrap-servers", "h:1", "--kafka-config-file", "/nowhere"], "/nowhere cannot be read"),
    ],
}
PACKAGES = {"valkey": "redis", "kafka": "confluent_kafka"}


@pytest.mark.parametrize(
    ("transport", "words", "sentence"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_options_that_are_refused(
    transport: str, words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    need_package(PACKAGES[transport])
    options = ["--host", "127.0.0.1", "--port", "0", "--controller-port", "0", "--event-transport", transport]
    assert main(["coordinator", *options, *words]) == 2
    error = capfd.readouterr().err
    assert sentence in error and "secret" not in error


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sasl.password secret", "must have name=value in line 1, or a # before it"),
        ("# TLS\n\nacks=1\nauto.offset.reset=latest\nsasl.password=secret", "sets auto.offset.reset in line 4"),
        ("sasl.pasword=secret", 'No such configuration property: "sasl.pasword"'),
        ("security.protocol=tls\nsasl.password=secret", 'Invalid value "tls" for configuration property'),
        ("delivery.report.only.error=true", "Expected delivery.report.only.error to be bool type"),
        ("security.protocol=ssl\nssl.ca.location=/nowhere", "ssl.ca.location failed"),
    ],
)
def test_properties_that_are_refused(
    text: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    need_package("confluent_kafka")
    path = tmp_path / "client.properties"
    path.write_text(text)
    words = ["--coordinator-event-transport", "kafka", "--coordinator-kafka-bootstrap-servers", "h:1"]
    words += ["--coordinator-url", "http://h", "--coordinator-kafka-config-file", str(path)]
    assert main(["config", "check", "--l1-size-gb", "0.01", "--eviction-policy", "LRU", *words]) == 2
    error = capfd.readouterr().err
    assert f"--coordinator-kafka-config-file {path}" in error and sentence in error and "secret" not in error


@pytest.mark.parametrize(
    ("transport", "words"), [("valkey", ["url", "redis://h:1"]), ("kafka", ["bootstrap-servers", "h:1"])]
)
def test_a_package_that_is_missing_is_named(
    transport: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, f"lmcache.fleet.{transport}_log", raising=False)
    monkeypatch.setitem(sys.modules, PACKAGES[transport], None)
    options = ["--coordinator-url", "http://h", "--coordinator-event-transport", transport]
    options += [f"--coordinator-{transport}-{words[0]}", words[1]]
    assert main(["config", "check", "--l1-size-gb", "0.01", "--eviction-policy", "LRU", *options]) == 2
    error = capsys.readouterr().err
    assert f"pip install 'lmcache[{transport}]'" in error and PACKAGES[transport].replace("_", "-") in error
