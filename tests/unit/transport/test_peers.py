"""What clients can make the server hold, and for how long, over real sockets."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lmcache.environment import SYSTEM
from lmcache.errors import RemoteError
from lmcache.telemetry.metrics import Metrics
from lmcache.transport import peers
from lmcache.transport.deferred import Bulk
from lmcache.transport.peer import Peer
from lmcache.transport.peers import RpcLimits
from lmcache.transport.rpc_server import RpcServer
from polling import until
from unit.transport.support import Oddities, Text, connected, echo, serving

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(48)
READY = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
KIB = 1024


@contextlib.contextmanager
def serving_at(path: Path, **limits: int) -> Iterator[RpcServer]:
    server = RpcServer(f"ipc://{path}", 0, SYSTEM.clock, Metrics().rpc, RpcLimits(**limits))
    server.start(Oddities().methods())
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def raw_connection(server: RpcServer, beginning: bytes = GREETING + READY) -> Iterator[socket.socket]:
    port = int(server.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as raw:
        raw.sendall(beginning)
        yield raw


def call(method: bytes, text: str, number: int = 1) -> bytes:
    payload = msgspec.msgpack.encode([text])
    return b"\1\x08" + struct.pack("<Q", number) + bytes([1, len(method)]) + method + long_frame(payload)


def long_frame(payload: bytes) -> bytes:
    return b"\2" + struct.pack(">Q", len(payload)) + payload


def hung_up(raw: socket.socket) -> bool:
    """Reads until the server has closed the connection; False if it does not within the socket's timeout."""
    try:
        while raw.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def counted(metrics: Metrics, code: str) -> float:
    return metrics.registry.get_sample_value("lmcache_mp_protocol_errors_total", {"code": code}) or 0.0


def test_the_oldest_unfinished_message_goes_when_all_are_too_large() -> None:
    metrics = Metrics()
    with (
        serving(Oddities(), metrics.rpc, unfinished_bytes=300 * KIB) as server,
        connected(server) as honest,
        raw_connection(server) as first,
        raw_connection(server) as second,
    ):
        first.sendall(call(b"echo", "x" * 200 * KIB)[: 150 * KIB])
        assert echo(honest, "a") == "a"
        second.sendall(call(b"echo", "y" * 200 * KIB)[: 190 * KIB])
        assert hung_up(first)
        assert echo(honest, "z" * 200 * KIB) == "z" * 200 * KIB  # what honest clients make is younger
        assert counted(metrics, "closed") >= 1


def test_a_slow_message_arrives_whole() -> None:
    text = "x" * 200 * KIB
    with serving(Oddities(), unfinished_bytes=300 * KIB) as server, raw_connection(server) as raw:
        message = call(b"echo", text)
        for start in range(0, len(message), 7 * KIB):
            raw.sendall(message[start : start + 7 * KIB])
        raw.settimeout(10.0)
        got = b""
        while text.encode() not in got:
            got += raw.recv(1 << 16)


def test_connections_are_limited() -> None:
    metrics = Metrics()
    with serving(Oddities(), metrics.rpc, connections=2) as server, connected(server) as honest:
        assert echo(honest, "served") == "served"
        with connected(server) as other, contextlib.ExitStack() as beyond:
            assert echo(other, "served") == "served"
            assert hung_up(beyond.enter_context(raw_connection(server, b"")))
            assert echo(honest, "served") == "served"
            assert counted(metrics, "refused") >= 1
        until(lambda: answers(server))


@pytest.mark.parametrize(
    "beginning",
    [b"", GREETING + READY, GREETING + READY + call(b"refuse", "x")],
    ids=["no handshake", "no call", "a refused call"],
)
def test_connections_that_call_nothing_keep_nobody_out(beginning: bytes) -> None:
    metrics = Metrics()
    with (
        serving(Oddities(), metrics.rpc, connections=4) as server,
        connected(server) as honest,
        contextlib.ExitStack() as many,
    ):
        assert echo(honest, "served") == "served"
        silent = [many.enter_context(raw_connection(server, beginning)) for _ in range(8)]
        late = many.enter_context(connected(server))
        assert echo(late, "late") == "late"
        assert all(map(hung_up, silent[:5]))  # the oldest of them
        assert echo(honest, "still served") == "still served"
        assert counted(metrics, "closed") >= 5 and counted(metrics, "refused") == 0


def answers(server: RpcServer) -> bool:
    with contextlib.suppress(OSError), raw_connection(server, GREETING + READY + call(b"echo", "x")) as raw:
        raw.settimeout(0.2)
        got = b""
        while b"ok" not in got:
            data = raw.recv(1 << 16)
            if not data:
                return False
            got += data
        return True
    return False


def test_many_engines_wait_for_a_server_that_has_not_begun(tmp_path: Path) -> None:
    server = RpcServer(f"ipc://{tmp_path}/socket", 0, SYSTEM.clock)
    with contextlib.ExitStack() as many:
        many.callback(server.stop)
        for _ in range(300):
            raw = many.enter_context(socket.socket(socket.AF_UNIX))
            raw.setblocking(False)
            raw.connect(f"{tmp_path}/socket")  # BlockingIOError where too many wait


def test_a_handshake_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_HANDSHAKE_SECONDS", 0.05)
    with serving(Oddities()) as server, connected(server) as honest:
        for beginning in (b"", GREETING[:5], GREETING, GREETING + READY[:9]):
            with raw_connection(server, beginning) as raw:
                assert hung_up(raw)
        with raw_connection(server) as established:
            established.settimeout(0.3)
            assert not hung_up(established)
        assert echo(honest, "still here") == "still here"


def test_who_takes_no_answers_is_not_listened_to_and_goes_on_when_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not lose the connection: it only waits for itself."""
    monkeypatch.setattr(peers, "_ENOUGH_UNSENT_BYTES", 64 * KIB)
    calls, answer_bytes = 60, 1 << 20
    with serving(Oddities()) as server, connected(server) as honest, raw_connection(server) as raw:
        raw.sendall(
            b"".join(call(b"write_much", str(answer_bytes), number) for number in range(calls))
        )  # arrive at once
        assert echo(honest, "beside it") == "beside it"
        taken = 0
        while taken < calls * answer_bytes:
            data = raw.recv(1 << 20)
            assert data
            taken += len(data)


def test_answers_that_nobody_takes_end_the_connection() -> None:
    metrics, oddities = Metrics(), Oddities()
    with (
        serving(oddities, metrics.rpc, unsent_bytes_per_connection=20 << 20) as server,
        connected(server) as honest,
        raw_connection(server) as raw,
    ):
        for number in range(40):
            raw.sendall(call(b"later", "", number))
        until(lambda: len(oddities.deferred) == 40)
        for deferred in oddities.deferred:
            deferred.answer(Text("x" * (1 << 20)))
        until(lambda: counted(metrics, "closed") == 1)
        assert echo(honest, "served") == "served"


def test_all_answers_that_nobody_takes_are_limited_together() -> None:
    metrics, oddities = Metrics(), Oddities()
    with (
        serving(oddities, metrics.rpc, unsent_bytes=30 << 20) as server,
        connected(server) as honest,
        raw_connection(server) as first,
        raw_connection(server) as second,
    ):
        for raw in (first, second):
            before = len(oddities.deferred)
            for number in range(25):
                raw.sendall(call(b"later", "", number))
            until(lambda before=before: len(oddities.deferred) == before + 25)
            for deferred in oddities.deferred[before:]:
                deferred.answer(Text("x" * (1 << 20)))
            assert echo(honest, "served") == "served"
        until(lambda: counted(metrics, "closed") == 1)
        assert hung_up(first)


def test_deferred_calls_of_one_connection_are_limited() -> None:
    """A call beyond the limit is refused before it begins: nothing goes on for which nobody waits."""
    oddities = Oddities()
    with (
        serving(oddities, deferred_calls_per_connection=2) as server,
        connected(server) as greedy,
        connected(server) as other,
    ):
        calls = [greedy.submit("later", Text(), Text, 20.0) for _ in range(3)]
        with pytest.raises(RemoteError) as refusal:
            calls[2].result()
        assert refusal.value.code == "too_many"
        assert len(oddities.deferred) == 2
        assert echo(greedy, "at once") == "at once"
        beside = other.submit("later", Text(), Text, 20.0)
        until(lambda: len(oddities.deferred) == 3)
        assert not beside.done()


def test_answers_that_wait_take_the_memory_that_is_counted() -> None:
    """However small they are."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        peer = Peer(ours, "slow", 1 << 20)
        tracemalloc.start()
        try:
            for number in range(60_000):
                peer.queue_answer(struct.pack("<Q", number), b"ok", b"\x90" if number % 2 else Bulk(bytearray(b"x")))
                if number % 16 == 0:
                    peer.flush()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peer.unsent_bytes > 500 * KIB
        assert held_bytes < 2 * peer.unsent_bytes
        theirs.settimeout(10.0)
        got = b""
        while peer.unsent_bytes:
            got += theirs.recv(1 << 20)
            peer.flush()
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                got += theirs.recv(1 << 20)
        answers = got[len(GREETING) :]
        assert len(answers) == 60_000 * 17
        numbers = [struct.unpack_from("<Q", answers, at + 2)[0] for at in range(0, len(answers), 17)]
        assert numbers == list(range(60_000))


def test_who_takes_no_answers_and_shuts_its_socket_is_let_go(tmp_path: Path) -> None:
    """The kernel reports the end of a Unix socket's peer for as long as that is watched."""
    path = tmp_path / "socket"
    with serving_at(path, connections=1) as server, socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10.0)
        raw.connect(str(path))
        raw.sendall(GREETING + READY + call(b"write_much", str(18 << 20)))
        while len(raw.recv(4 * KIB)) < 4 * KIB:  # until the answer comes, of which most waits
            pass
        assert server.responsive(10.0)
        raw.shutdown(socket.SHUT_RDWR)

        def another_is_served() -> bool:
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(10.0)
                other.connect(str(path))
                with contextlib.suppress(ConnectionError):
                    other.sendall(GREETING + READY + call(b"echo", "x"))
                    return bool(other.recv(1))
                return False

        until(another_is_served)


@pytest.mark.parametrize("name", ["a", "\0", "\0ab"])
def test_a_client_may_have_a_name_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving_at(tmp_path / "socket"), socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10.0)
        raw.bind(name)
        raw.connect(str(tmp_path / "socket"))
        raw.sendall(GREETING + READY)
        assert raw.recv(1)
    assert "fault" not in caplog.text


def test_what_a_peer_sent_goes_with_it_though_a_call_of_it_waits() -> None:
    """A deferred call keeps its peer; what had arrived of the next message would be held, and counted by nobody."""
    oddities = Oddities()
    with serving(oddities) as server, connected(server) as honest:
        before = bytes_of_large_frames()
        for number in range(8):
            with raw_connection(server) as raw:
                raw.sendall(call(b"later", "") + call(b"echo", "x" * (16 << 20))[: 15 << 20])
                until(lambda number=number: len(oddities.deferred) == number + 1)
        assert echo(honest, "x") == "x"
        until(lambda: bytes_of_large_frames() - before < 40 << 20)


def bytes_of_large_frames() -> int:
    """What the server maps for them; what malloc keeps of the client's own strings is not counted."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) << 10


def test_who_announces_more_than_there_is_memory_for_goes_alone(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    begun = call(b"echo", "x" * (18 << 20))[: 70 * KIB]
    with serving(Oddities(), metrics.rpc) as server, connected(server) as honest, contextlib.ExitStack() as many:
        assert echo(honest, "x") == "x"
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        previous = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), previous[1]))
        try:
            raws = [many.enter_context(raw_connection(server, GREETING + READY + begun)) for _ in range(6)]
            until(lambda: counted(metrics, "closed") >= 3)
            assert echo(honest, "x") == "x"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, previous)
        assert hung_up(raws[-1])
    assert "fault" not in caplog.text
    assert "no memory for a frame of" in caplog.text


def test_a_busy_peer_is_not_the_one_that_waits_longest() -> None:
    """It is always in the midst of some message, and yet ends each."""
    with (
        serving(Oddities(), unfinished_bytes=500 * KIB) as server,
        raw_connection(server) as busy,
        raw_connection(server) as hostile,
        raw_connection(server) as third,
    ):
        message = call(b"echo", "x" * 40 * KIB)
        begun, rest = message[: 20 * KIB], message[20 * KIB :]
        busy.sendall(begun)
        until(lambda: unfinished(server) > 10 * KIB)
        hostile.sendall(call(b"echo", "y" * 200 * KIB)[: 190 * KIB])
        until(lambda: unfinished(server) > 200 * KIB)
        busy.sendall(rest + begun)
        taken(busy, 40 * KIB)
        third.sendall(call(b"echo", "z" * 400 * KIB)[: 390 * KIB])
        assert hung_up(hostile)
        busy.sendall(rest)
        taken(busy, 40 * KIB)


def taken(raw: socket.socket, size_bytes: int) -> None:
    while size_bytes > 0:
        data = raw.recv(1 << 16)
        assert data
        size_bytes -= len(data)


def unfinished(server: RpcServer) -> int:
    return server.peers.unfinished.size_bytes
