import contextlib
import errno
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from lmcache.client import Client
from lmcache.client import client as client_module
from lmcache.client.client import ClientState
from lmcache.client.engine_environment import EngineEnvironment
from lmcache.environment import SYSTEM
from lmcache.errors import ConfigError, RemoteError, ServerUnavailable
from lmcache.protocol import messages as m
from lmcache.transport.connection import Connection
from lmcache.transport.rpc_server import Method, RpcServer
from polling import until
from support.network import network_to

INSTANCE = m.RegisterInstance("engine", "model", 1, 1, 10.0)
WORKER = m.RegisterWorker("engine", 0, 0, ["ab" * 16], [4096])


class FakeServer:
    """Answers as a server would, and remembers who is registered."""

    def __init__(self, port: int = 0, token: bytes = b"a" * 16, protocol_version: int = 1) -> None:
        self.token = token
        self.protocol_version = protocol_version
        self.registered: dict[tuple[str, int], int] = {}
        self.registrations = self.hellos = 0
        self.pings: list[m.Ping] = []
        self.refuse: RemoteError | None = None
        self.changed = threading.Condition()
        self.rpc = RpcServer("localhost", port, SYSTEM.clock)
        handlers = {
            "hello": self.hello,
            "ping": self.ping,
            "noop": lambda message: m.Empty(),
            "register_instance": lambda message: self.register(message.instance_id, -1),
            "register_worker": lambda message: self.register(message.instance_id, message.worker_id),
            "unregister": self.unregister,
            "end_session": self.end_session,
        }
        self.rpc.start({name: Method(m.METHODS[name][0], handler) for name, handler in handlers.items()})
        self.port = int(self.rpc.endpoint.rpartition(":")[2])

    def hello(self, message: Any) -> Any:
        self.hellos += 1
        return m.HelloReply(self.protocol_version, "test", self.token, 256, "blake3", ["shm"], "", 0, 300.0, 600.0)

    def ping(self, message: Any) -> Any:
        with self.changed:
            self.pings.append(message)
            self.changed.notify_all()
        return m.PingReply(self.token, (message.instance_id, message.worker_id) in self.registered)

    def register(self, instance_id: Any, worker_id: Any) -> Any:
        if self.refuse is not None:
            raise self.refuse
        with self.changed:
            self.registrations += 1
            self.registered[instance_id, worker_id] = self.registrations
            self.changed.notify_all()
        return m.RegisterReply(self.registrations)

    def unregister(self, message: Any) -> Any:
        self.registered.pop((message.instance_id, message.worker_id), None)
        return m.Empty()

    def end_session(self, message: Any) -> NoReturn:
        raise RemoteError(m.ErrorCode.UNKNOWN_INSTANCE, "register first")

    def wait_for(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10.0)

    def stop(self) -> None:
        self.rpc.stop()


@contextlib.contextmanager
def a_client(port: int, **more: Any) -> Iterator[Any]:
    client = Client(f"tcp://127.0.0.1:{port}", map_memory=False, **more)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


def test_connect_call_close(server: FakeServer) -> None:
    with a_client(server.port) as client:
        assert client.state is ClientState.CONNECTING
        hello = client.connect(5.0)
        assert (hello.chunk_tokens, client.server_epoch) == (256, b"a" * 16)
        assert client.state is ClientState.READY
        assert client.call("noop", m.Empty(), 5.0) == m.Empty()
        pending = client.submit("noop", m.Empty(), 5.0)
        assert pending.wait(5.0)
        assert pending.done()
        assert pending.result() == m.Empty()
    assert client.state is ClientState.CLOSED
    client.close()
    with pytest.raises(ServerUnavailable):
        client.call("noop", m.Empty(), 5.0)


def test_register_and_unregister(server: FakeServer) -> None:
    with a_client(server.port) as client:
        assert client.owner("engine") is None
        assert client.register(INSTANCE, 5.0) == client.owner("engine")
        assert client.register(WORKER, 5.0) == client.owner("engine", 0)
        assert set(server.registered) == {("engine", -1), ("engine", 0)}
    assert server.registered == {}


def test_without_a_server_calls_fail_at_once_and_nothing_waits() -> None:
    gone = FakeServer()
    gone.stop()
    with a_client(gone.port) as client:
        client.start()
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(ServerUnavailable):
                client.call("noop", m.Empty(), 60.0)
            assert time.monotonic() - started < 10.0
        with pytest.raises(ServerUnavailable, match="Nothing answers"):
            client.connect(0.5)


def test_a_server_that_comes_later_is_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lmcache")
    gone = FakeServer()
    gone.stop()
    with a_client(gone.port) as client:
        client.declare(INSTANCE)
        client.start()
        until(lambda: client.state is ClientState.UNAVAILABLE)
        server = FakeServer(gone.port)
        client.connect(10.0)
        server.wait_for(lambda: ("engine", -1) in server.registered)
        server.stop()
    messages = [record.message for record in caplog.records if record.name == "lmcache.client"]
    assert sum("unavailable" in message for message in messages) <= 2
    assert sum("Connected" in message for message in messages) == 1


def test_a_new_incarnation_is_met_before_anything_is_registered() -> None:
    first = FakeServer()
    met = []

    def meet(client: Any) -> None:
        met.append((client.server_epoch, len(first.registered)))
        client.declare(WORKER)

    with a_client(first.port, on_new_server=meet) as client:
        client.declare(INSTANCE)
        client.connect(5.0)
        first.wait_for(lambda: len(first.registered) == 2)
        assert met == [(b"a" * 16, 0)]
        first.stop()
        first.registered.clear()
        until(lambda: client.state is ClientState.UNAVAILABLE)
        second = FakeServer(first.port, b"b" * 16)
        client.connect(10.0)
        second.wait_for(lambda: len(second.registered) == 2)
        assert met == [(b"a" * 16, 0), (b"b" * 16, 0)]
    second.stop()


def test_the_same_server_seen_again_is_no_new_incarnation(server: FakeServer) -> None:
    met = []
    with (
        network_to(server.port) as network,
        a_client(network.port, on_new_server=lambda client: met.append(client.server_epoch)) as client,
    ):
        client.register(INSTANCE, 5.0)
        hello = client.hello
        network.drop()
        until(lambda: client.state is ClientState.UNAVAILABLE)
        client.connect(10.0)
        assert client.call("noop", m.Empty(), 5.0) == m.Empty()
        assert client.hello is hello
        assert len(met) == server.registrations == 1


def test_a_process_without_file_descriptors_for_a_moment_connects_later(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    descriptors_left = threading.Event()

    def connection(*arguments: Any) -> Connection:
        if not descriptors_left.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return Connection(*arguments)

    with a_client(server.port, environment=EngineEnvironment(connection=connection)) as client:
        client.declare(INSTANCE)
        client.start()
        until(lambda: client.state is ClientState.UNAVAILABLE)
        with pytest.raises(ServerUnavailable, match="Too many open files"):
            client.call("noop", m.Empty(), 5.0)
        descriptors_left.set()
        until(lambda: client.owner("engine") is not None)
    assert "The LMCache client failed and tries again" in caplog.text


def test_a_server_that_forgot_gets_the_registration_again(server: FakeServer) -> None:
    with a_client(server.port, heartbeat_interval_seconds=0.05) as client:
        previous = client.register(INSTANCE, 5.0)
        server.registered.clear()
        server.wait_for(lambda: ("engine", -1) in server.registered)
        until(lambda: client.owner("engine") not in (None, previous))


def test_a_call_of_an_unknown_instance_makes_the_client_look_at_once(server: FakeServer) -> None:
    with a_client(server.port, heartbeat_interval_seconds=60.0) as client:
        client.register(INSTANCE, 5.0)
        server.registered.clear()
        with pytest.raises(RemoteError, match="register first"):
            client.call("end_session", m.EndSession("engine", "r"), 5.0)
        server.wait_for(lambda: ("engine", -1) in server.registered)


def test_a_call_says_why_from_the_moment_that_the_server_is_gone(server: FakeServer) -> None:
    said: list[str] = []

    class CallsMeanwhile(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is unavailable" in record.getMessage():
                with pytest.raises(ServerUnavailable) as caught:
                    client.call("noop", m.Empty(), 1.0)
                said.append(str(caught.value))

    handler = CallsMeanwhile()
    logging.getLogger("lmcache").addHandler(handler)
    with a_client(server.port) as client:
        client.connect(5)
        server.rpc.stop()
        (sentence,) = until(lambda: said)
    assert "closed the connection" in sentence


def test_beats_tell_how_far_counts_have_grown(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_SECONDS", 60.0)  # what was not answered in time is told again
    counts = [5, 5]
    client = Client(f"localhost:{server.port}", heartbeat_interval_seconds=0.05, map_memory=False)
    client.report(lambda: tuple(counts))  # what they were before, another client has told
    counts[:] = [8, 6]
    client.start()
    until(lambda: server.pings)  # of nobody that is registered: it is told again
    client.register(INSTANCE, 10.0)
    client.register(WORKER, 10.0)
    until(lambda: any(ping.worker_id == 0 for ping in server.pings))
    counts[:] = [8, 9, 2]

    def told() -> list[list[int]]:
        return [ping.counts for ping in list(server.pings) if ping.instance_id and any(ping.counts)]

    until(lambda: len(told()) == 2, tell=told)
    seen = len(server.pings)
    until(lambda: len(server.pings) > seen + 4)
    assert told() == [[3, 1], [0, 3, 2]]
    client.close()


def test_another_token_in_a_ping_means_another_server(server: FakeServer) -> None:
    met = []
    with a_client(
        server.port, heartbeat_interval_seconds=0.05, on_new_server=lambda client: met.append(client.server_epoch)
    ) as client:
        client.register(INSTANCE, 5.0)
        server.token = b"c" * 16
        until(lambda: met == [b"a" * 16, b"c" * 16] and client.state is ClientState.READY)
        assert server.registrations == 2


def test_a_refused_registration_is_raised_and_tried_again(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.refuse = RemoteError(m.ErrorCode.LAYOUT_CONFLICT, "another engine is there")
    with a_client(server.port, heartbeat_interval_seconds=0.05) as client:
        with pytest.raises(RemoteError, match="another engine") as refusal:
            client.register(INSTANCE, 5.0)
        assert refusal.value.code == "layout_conflict"
        until(lambda: client.state is ClientState.READY)
        # The name is somebody else's: a call in it would be taken for theirs.
        with pytest.raises(ServerUnavailable, match="another engine"):
            client.submit("noop", m.Empty(), 5.0)
        server.refuse = None
        server.wait_for(lambda: ("engine", -1) in server.registered)
        until(lambda: client.owner("engine") is not None)
        client.call("noop", m.Empty(), 5.0)
    assert caplog.text.count("refused a registration") == 1


def test_another_protocol_version_is_said_at_once() -> None:
    server = FakeServer(protocol_version=99)
    with a_client(server.port) as client:
        started = time.monotonic()
        with pytest.raises(Exception, match="speaks protocol version 99"):
            client.connect(30.0)
        assert time.monotonic() - started < 15.0
    server.stop()


def test_that_a_server_came_back_with_another_protocol_version_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    first = FakeServer()
    with a_client(first.port) as client:
        client.connect(10.0)
        port = first.port
        first.stop()
        until(lambda: client.state is ClientState.UNAVAILABLE)
        second = FakeServer(port=port, protocol_version=99)
        until(lambda: "speaks protocol version 99" in caplog.text)
        tried = second.hellos
        until(lambda: second.hellos > tried)
        second.stop()
    assert caplog.text.count("speaks protocol version 99") == 1


def test_a_fault_in_the_callback_does_not_end_the_keeper(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    faults = [ZeroDivisionError("first time")]

    def meet(client: Any) -> None:
        if faults:
            raise faults.pop()

    with a_client(server.port, on_new_server=meet) as client:
        client.connect(10.0)
        assert client.state is ClientState.READY
    assert "failed and tries again" in caplog.text


@pytest.mark.parametrize("url", ["tcp://127.0.0.1", "http://127.0.0.1:5"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Client(url)


def test_a_server_that_comes_back_after_a_while_is_found_soon() -> None:
    """However long it was away: what it waits for its engines, they compute."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20.0)
        with a_client(listening.getsockname()[1]) as client:
            client.start()
            attempts: list[float] = []
            while len(attempts) < 12:  # each is a server that goes away at once; the first pauses are short
                listening.accept()[0].close()
                attempts.append(time.monotonic())
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)][4:]
    assert min(pauses) < 0.5, pauses
