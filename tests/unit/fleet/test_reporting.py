"""A server's side over real sockets: it joins and tells a real coordinator; one that is away, slow or hostile costs
nothing but a thread."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache.clock import SystemClock
from lmcache.core import limits
from lmcache.errors import ConfigError
from lmcache.fleet import event_batches, membership, reporter, reporting
from lmcache.fleet import messages as m
from lmcache.fleet.coordinator import CoordinatorProcess
from lmcache.fleet.events import EventIntake
from lmcache.fleet.join import FleetMember
from lmcache.fleet.membership import Member, MemberSettings
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.http.client import JSON_TYPE, HttpRefused, request
from lmcache.http.listener import MAX_CONNECTIONS, limited_sockets
from lmcache.telemetry.metrics import FleetMemberMetrics, Metrics
from polling import STALL_SECONDS, until
from unit.fleet.support import DictTier, told, truth

TOKEN = "a token of an operator"
BEAT_SECONDS = 0.05


@contextlib.contextmanager
def coordinator(port: int = 0, **settings: Any) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(CoordinatorSettings(host="127.0.0.1", port=port, controller_port=0, **settings))
    process.start()
    try:
        yield process
    finally:
        process.stop()


class Joined:
    """A server of dicts, in a fleet."""

    def __init__(self, url: str, name: str = "a", token: str = "", ring: int = 1000, **more: Any) -> None:
        self.tiers = [DictTier(ring=ring), DictTier("l2", "disk", ring=ring)]
        self.metrics: FleetMemberMetrics = Metrics().fleet
        self.members: Sequence[Member] = ()
        settings = MemberSettings(
            *(url, name, 8080, 5555),
            p2p_advertised_url=f"{name}:1",
            heartbeat_seconds=BEAT_SECONDS,
            flush_seconds=0.01,
            token=lambda: token,
            **more,
        )
        self.member = FleetMember(settings, self.tiers, self.metrics, SystemClock(), self._took)
        self.name = name

    def _took(self, members: Sequence[Member]) -> None:
        self.members = members

    def __enter__(self) -> Joined:
        self.member.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.member.stop()

    def is_told(self, process: CoordinatorProcess) -> bool:
        mine = {name: size for name, size in told(process.fleet.directory).items() if name[0] == self.name}
        return mine == truth(self.name, self.tiers)


def url_of(process: CoordinatorProcess) -> str:
    return f"http://127.0.0.1:{process.port}"


def test_changes_are_told_and_members_known() -> None:
    with coordinator() as process, Joined(url_of(process)) as server, Joined(url_of(process), "b") as other:
        server.tiers[0].add((0, 1), 4096)
        other.tiers[1].add((1, 2), 8192)
        until(lambda: server.is_told(process) and other.is_told(process))
        until(lambda: {member.p2p_advertised_url for member in server.members} == {"a:1", "b:1"})
        (entry,) = process.fleet.directory.list_keys("", "a", "", 0, 10)[0]
        assert process.fleet.directory.copies([entry.key]) == [(0, 2, "a", "l1")]  # of two ranks
        server.tiers[0].remove((0, 1))
        until(lambda: server.is_told(process))
        (disk,) = [usage for usage in process.fleet.directory.usage("b") if usage.place.tier == "l2"]
        assert (disk.used_bytes, disk.place.capacity_bytes) == (8192, 1 << 20)
        assert server.member.status()["joined"] is True
        other.member.stop()
        until(lambda: not process.fleet.instances.knows("b"))
        until(lambda: [member.instance_id for member in server.members] == ["a"])
        assert not [name for name in told(process.fleet.directory) if name[0] == "b"]


def test_a_coordinator_that_was_started_again_is_told_everything(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with coordinator() as process:
            server = stack.enter_context(Joined(url_of(process)))
            server.tiers[0].add((0, 1), 4096)
            until(lambda: server.is_told(process))
        server.tiers[0].add((0, 2), 4096)
        server.tiers[0].remove((0, 1))
        with coordinator(process.port) as process:
            until(lambda: server.is_told(process))
            until(lambda: process.fleet.intake.counts.resyncs == 1)


def test_a_checkpoint_spares_telling_everything(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"checkpoint_path": str(tmp_path / "directory")}
    with contextlib.ExitStack() as stack:
        with coordinator(**saved) as process:
            server = stack.enter_context(Joined(url_of(process)))
            for number in range(30):
                server.tiers[0].add((0, number), 4096)
            until(lambda: server.is_told(process) and process.fleet.intake.counts.resyncs == 1)
            resyncs = server.metrics.coordinator_resyncs._value.get()  # noqa: SLF001
        with coordinator(process.port, **saved) as process:
            assert process.fleet.directory.stats().records == 30
            server.tiers[0].add((1, 1), 4096)
            until(lambda: server.is_told(process))
        assert server.metrics.coordinator_resyncs._value.get() == resyncs  # noqa: SLF001


def capacities(process: CoordinatorProcess) -> dict[str, int]:
    return {usage.place.tier: usage.place.capacity_bytes for usage in process.fleet.directory.usage("a")}


def test_a_tier_may_be_as_large_as_anybody_has_it() -> None:
    with coordinator() as process:
        server = Joined(url_of(process))
        server.tiers[1].capacity = 1 << 60
        with server:
            server.tiers[0].add((0, 1), 4096)
            until(lambda: server.is_told(process) and capacities(process).get("l2") == 1 << 60)


def test_what_a_coordinator_will_never_take_is_left_out() -> None:
    """And nothing else is: that it is told again and again would help nobody."""
    with coordinator() as process:
        server = Joined(url_of(process))
        server.tiers[1].capacity = 1 << 63
        with server:
            server.tiers[1].add((0, 1), 4096)
            until(lambda: server.is_told(process) and process.fleet.intake.counts.resyncs)
            for number in range(10):
                server.tiers[0].add((0, number), 4096)
            until(lambda: server.is_told(process))
            assert process.fleet.intake.counts.gaps == 0
            assert capacities(process) == {"l1": 0, "l2": 0} and failures(server, "events") >= 1


def test_where_columns_are_refused_events_come_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an older coordinator in the place of the one that took them, or by a proxy."""
    columns: list[bool] = []
    apply = EventIntake.apply

    def noted(intake: EventIntake, batches: Sequence[m.Batch]) -> m.EventsAnswer:
        columns.extend(batch.objects is not None for batch in batches if batch.event_type == "store")
        return apply(intake, batches)

    monkeypatch.setattr(EventIntake, "apply", noted)
    with coordinator() as process, Joined(url_of(process)) as server:
        server.tiers[0].add((0, 1), 4096)
        until(lambda: server.is_told(process) and process.fleet.intake.counts.resyncs == 1)
        assert columns and all(columns)
        columns.clear()
        monkeypatch.setattr(event_batches, "_PACKED_DECODER", msgspec.json.Decoder(m.EventsRequest))
        server.tiers[0].add((0, 2), 4096)
        until(lambda: server.is_told(process) and process.fleet.intake.counts.resyncs == 2)
        server.tiers[0].add((0, 3), 4096)
        until(lambda: server.is_told(process))
        assert columns and not any(columns) and process.fleet.intake.counts.gaps == 0


def test_what_was_refused_for_a_while_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator() as process, Joined(url_of(process)) as server:
        until(lambda: process.fleet.intake.counts.resyncs)
        refused: list[str] = []

        def refuse(batches: Sequence[m.Batch]) -> m.EventsAnswer:
            refused.extend(batch.event_type for batch in batches)
            raise ConfigError("Not one of them.")

        with monkeypatch.context() as patch:
            patch.setattr(process.fleet.intake, "apply", refuse)
            server.tiers[0].add((0, 1), 4096)
            until(lambda: "store" in refused)
        monkeypatch.setattr(reporter, "_AFTER_REFUSAL_SECONDS", 0.0)
        until(lambda: server.is_told(process))


def test_a_server_learns_of_all_that_a_coordinator_knows() -> None:
    """However much each of them tells of itself."""
    count = (5 << 20) // limits.MAX_FLEET_METADATA_BYTES
    with coordinator(instance_timeout=3600.0) as process:
        metadata = {"text": "x" * (limits.MAX_FLEET_METADATA_BYTES - 100)}
        for number in range(count):
            process.fleet.instances.register(
                m.RegisterRequest("127.0.0.1", 1, f"server-{number}", metadata, f"h:{number}")
            )
        with Joined(url_of(process)) as server:
            until(lambda: len(server.members) == count + 1)
            assert {f"h:{number}" for number in range(count)} < {member.p2p_advertised_url for member in server.members}


def test_all_servers_may_come_at_once() -> None:
    """More of them than a server's own interface has places for."""
    with coordinator() as process, contextlib.ExitStack() as connections:
        place = ("127.0.0.1", process.port)
        waiting = [connections.enter_context(socket.create_connection(place)) for _ in range(MAX_CONNECTIONS + 44)]
        assert request(url_of(process), "GET", "/healthz")  # so all before it have their places
        for connection in waiting:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_there_are_no_more_places_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 40))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits_set.append(limit))
    with coordinator() as process, contextlib.ExitStack() as connections:
        assert limits_set == [(40, 40)] and caplog.text.count("There are places for 20 connections, not for 8192") == 1
        place = ("127.0.0.1", process.port)
        idle = [connections.enter_context(socket.create_connection(place, STALL_SECONDS)) for _ in range(21)]
        assert idle[0].recv(1) == b""  # the oldest of this host, closed
        assert request(url_of(process), "GET", "/healthz")
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)


def test_connections_are_accepted_a_few_at_a_time() -> None:
    """Those that lost their place are closed between: a burst took all descriptors before."""
    with contextlib.ExitStack() as closers:
        (listening,) = limited_sockets("127.0.0.1", [(0, "--port")])
        closers.callback(listening.close)
        for _ in range(20):
            closers.enter_context(socket.create_connection(listening.getsockname()))
        for count in (16, 4):
            for _ in range(count):
                closers.enter_context(listening.accept()[0])
            with pytest.raises(BlockingIOError):
                listening.accept()


def test_lost_changes_are_told_again() -> None:
    with coordinator() as process, Joined(url_of(process), ring=3) as server:
        until(lambda: server.member.status()["joined"])
        for number in range(200):
            server.tiers[0].add((0, number % 40), 4096 * (number + 1))
        until(lambda: server.is_told(process))


def test_after_a_fault_everything_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_AFTER_FAULT_SECONDS", 0.01)
    monkeypatch.setattr(reporter, "_FIRST_RESYNC_SECONDS", 0.01)
    with coordinator() as process, Joined(url_of(process)) as server:
        until(lambda: server.is_told(process) and process.fleet.intake.counts.resyncs == 1)
        faulty = threading.Event()

        def changes(cursor: int, most: int) -> Any:
            faulty.set()
            del server.tiers[0].changes
            raise RuntimeError("a fault of a tier")

        server.tiers[0].changes = changes
        until(faulty.is_set)
        server.tiers[0].add((0, 1), 4096)
        until(lambda: server.is_told(process) and process.fleet.directory.stats().records == 1)


def test_after_the_same_fault_again_everything_is_told_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "_AFTER_FAULT_SECONDS", 0.3)
    monkeypatch.setattr(reporter, "_FIRST_RESYNC_SECONDS", 0.1)
    faults: list[float] = []

    def changes(cursor: int, most: int) -> Any:
        faults.append(time.monotonic())
        raise RuntimeError("a fault of a tier")

    with coordinator() as process:
        server = Joined(url_of(process))
        server.tiers[0].changes = changes
        with server:
            until(lambda: len(faults) >= 4)
            assert server.metrics.coordinator_resyncs._value.get() >= 3  # noqa: SLF001
    waits = [later - earlier for earlier, later in itertools.pairwise(faults)]
    assert all(wait >= max(0.3, 0.1 * 2**number) for number, wait in enumerate(waits, 1)), waits
    assert caplog.text.count("By a fault") == 1


def test_without_the_token_nobody_gets_in(tmp_path: Path) -> None:
    """From this host one may; the wrong token is refused wherever it comes from."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with coordinator(admin_token_file=str(file)) as process:
        with Joined(url_of(process), token="not that token of an operator") as server:
            server.tiers[0].add((0, 1), 4096)
            until(lambda: failures(server, "heartbeat") >= 2)
            assert not server.member.status()["joined"] and not process.fleet.instances.all()
        with Joined(url_of(process), token=TOKEN) as server:
            server.tiers[0].add((0, 1), 4096)
            until(lambda: server.is_told(process) and process.fleet.directory.stats().records == 1)


def failures(joined: Joined, call: str) -> float:
    return float(joined.metrics.coordinator_failures.labels(call)._value.get())  # noqa: SLF001


Answer = Callable[[str, str], tuple[int, bytes]]


@contextlib.contextmanager
def hostile(answer: Answer) -> Iterator[str]:
    """A coordinator that answers what it likes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.command, self.path)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def joins_then(body: bytes) -> Answer:
    def answer(method: str, path: str) -> tuple[int, bytes]:
        return 200, b'{"instance_id":"a","re_registered":false}' if path == "/instances" and method == "POST" else body

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        lambda method, path: (500, b"no"),
        lambda method, path: (404, b"{}"),
        lambda method, path: (200, b""),
        lambda method, path: (200, b'{"a":' * 100_000),
        lambda method, path: (200, b"[1,2,3]"),
        lambda method, path: (302, b"elsewhere"),
        joins_then(b'{"applied":"all","duplicates":null}'),
        joins_then(b"x" * (8 << 20)),
        joins_then(b'{"instances":[{"instance_id":5}],"members":"many"}'),
    ],
)
def test_wrong_answers_are_counted_and_no_more(answer: Answer) -> None:
    with hostile(answer) as url, Joined(url) as server:
        server.tiers[0].add((0, 1), 4096)
        until(lambda: failures(server, "heartbeat") + failures(server, "events") >= 2)
        assert not server.members


def test_of_a_refusal_without_end_a_sentence_is_kept() -> None:
    """As a pin keeps why a server does not hold it."""
    answer = json.dumps({"error": "no " * (1 << 20)}).encode()
    with hostile(lambda method, path: (500, answer)) as url, pytest.raises(HttpRefused) as refused:
        request(url, "GET", "/")
    assert str(refused.value) == ("no " * (1 << 20))[: limits.MAX_REASON_CHARACTERS]


def test_who_asks_for_everything_again_and_again_is_told_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def answer(method: str, path: str) -> tuple[int, bytes]:
        if path == "/events":
            asked.append(time.monotonic())
            return 200, b'{"applied":0,"duplicates":0,"stale":1,"resync":["a"]}'
        return joins_then(b'{"instances":[],"members":1}')(method, path)

    monkeypatch.setattr(reporter, "_FIRST_RESYNC_SECONDS", 0.1)
    with hostile(answer) as url, Joined(url) as server:
        until(lambda: len(asked) >= 5)
        waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
        assert all(wait >= 0.1 * 2**number for number, wait in enumerate(waits, 1)), waits
        until(lambda: server.member.status()["joined"])


def test_who_forgets_a_server_again_and_again_is_told_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, path: str) -> tuple[int, bytes]:
        if path == "/events":
            return 200, b'{"applied":1,"duplicates":0,"stale":0}'
        return (404, b"{}") if method == "PUT" else joins_then(b'{"instances":[],"members":1}')(method, path)

    monkeypatch.setattr(reporter, "_FIRST_RESYNC_SECONDS", 0.5)
    began = time.monotonic()
    with hostile(answer) as url, Joined(url) as server:
        until(lambda: float(server.metrics.coordinator_resyncs._value.get()) >= 3)  # noqa: SLF001
        assert time.monotonic() - began >= 1.0 + 2.0


def test_a_coordinator_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and is silent."""
    monkeypatch.setattr(membership, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(membership.Coordinator.ask, "__defaults__", (None, 0.2, JSON_TYPE))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with Joined(f"http://127.0.0.1:{silent.getsockname()[1]}") as server:
            until(lambda: failures(server, "heartbeat") >= 2)
            began = time.monotonic()
        assert time.monotonic() - began < 5.0 + STALL_SECONDS


def test_an_incarnation_goes_on_above_what_is_known() -> None:
    """Also where the clock of a server was set back."""
    with coordinator() as process:
        process.fleet.intake.restore({"a": type(process.fleet.intake.stream("a"))(1 << 50, 7)})
        with Joined(url_of(process)) as server:
            server.tiers[0].add((0, 1), 4096)
            until(lambda: server.is_told(process) and process.fleet.directory.stats().records == 1)
            assert process.fleet.intake.stream("a").incarnation > 1 << 50
            assert json.dumps(server.member.status())
