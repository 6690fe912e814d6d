import pickle
import socket as sockets
import threading
from typing import Any

import msgspec
import pytest
import zmq

from lmcache.environment import SYSTEM
from lmcache.errors import RemoteError, ResourceError
from lmcache.protocol.messages import ErrorCode
from lmcache.telemetry.metrics import Metrics
from lmcache.transport import wire
from lmcache.transport.deferred import Deferred
from lmcache.transport.rpc_server import Method, RpcServer
from unit.transport.support import Oddities, Text, connected, echo, raw_socket, serving

ID = b"\1\0\0\0\0\0\0\0"


def errors_counted(metrics: Metrics, code: str) -> float:
    return metrics.registry.get_sample_value("lmcache_mp_protocol_errors_total", {"code": code}) or 0.0


def test_the_codes_of_the_transport_are_codes_of_the_protocol() -> None:
    codes = {code.value for code in ErrorCode}
    assert {wire.BAD_REQUEST, wire.UNKNOWN_METHOD, wire.TOO_MANY, wire.SHUTTING_DOWN, wire.INTERNAL} <= codes


def test_an_answer_and_a_refusal() -> None:
    metrics = Metrics()
    with serving(Oddities(), metrics.rpc) as server, connected(server) as connection:
        assert echo(connection, "hello") == "hello"
        with pytest.raises(RemoteError, match="refused that") as refusal:
            connection.submit("refuse", Text("that"), Text, 5.0).result()
        assert refusal.value.code == "too_large"
        assert connection.submit("ping", Text(), Text, 5.0).result() == Text()  # answers are counted once they are sent
        value = metrics.registry.get_sample_value
        assert value("lmcache_mp_calls_total", {"method": "echo", "status": "ok"}) == 1
        assert value("lmcache_mp_calls_total", {"method": "refuse", "status": "too_large"}) == 1


def test_a_raising_handler_answers_internal_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with serving(Oddities(), metrics.rpc) as server, connected(server) as connection:
        with pytest.raises(RemoteError, match="failed to handle fail") as refusal:
            connection.submit("fail", Text("x"), Text, 5.0).result()
        assert refusal.value.code == "internal"
        assert echo(connection, "still here") == "still here"
    assert "ZeroDivisionError" in caplog.text
    assert errors_counted(metrics, "internal") == 1


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([ID, b"nonsense", b"\x90"], "unknown_method"),
        ([ID, b"m" * 100_000, b"\x90"], "unknown_method"),
        ([ID, b"\xff\xfe", b"\x90"], "unknown_method"),
        ([ID, b"", b""], "unknown_method"),
        ([ID, b"echo", b""], "bad_request"),
        ([ID, b"echo", b"\x81\xa4text\xa1x"], "bad_request"),
        ([ID, b"echo", b"\x91\x01"], "bad_request"),
        ([ID, b"echo", b"\x91\xa2\xff\xff"], "bad_request"),
        ([ID, b"echo", b"\x91\xdb\xff\xff\xff\xff"], "bad_request"),
        ([ID, b"echo", b"\x91" * 100_000], "bad_request"),
        ([ID, b"echo", b"\xdd\xff\xff\xff\xff"], "bad_request"),
        ([ID, b"echo", b"\xc1"], "bad_request"),
        ([ID, b"echo", pickle.dumps(print)], "bad_request"),
    ],
)
def test_what_has_a_call_id_is_answered_with_an_error(frames: Any, code: str) -> None:
    metrics = Metrics()
    with serving(Oddities(), metrics.rpc) as server, raw_socket(server) as raw:
        raw.send_multipart(frames)
        call_id, status, sentence = raw.recv_multipart()
        assert (call_id, status) == (ID, code.encode())
        assert len(msgspec.msgpack.decode(sentence, type=str)) <= wire.MAX_SENTENCE_CHARACTERS
        assert errors_counted(metrics, code) == 1
        raw.send_multipart([ID, b"echo", b"\x91\xa2ok"])
        assert raw.recv_multipart() == [ID, b"ok", b"\x91\xa2ok"]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"", b""],
        [ID],
        [ID, b"echo"],
        [ID, b"echo", b"\x90", b"more"],
        [b"\0" * 7, b"echo", b"\x90"],
        [b"\0" * 9, b"echo", b"\x90"],
        [ID] * 60,
        [pickle.dumps(print)],
    ],
    ids=lambda frames: f"{len(frames)} frames, first of {len(frames[0])} bytes",
)
def test_what_has_no_call_id_is_dropped_and_counted(frames: Any) -> None:
    metrics = Metrics()
    with serving(Oddities(), metrics.rpc) as server, raw_socket(server) as raw:
        raw.send_multipart(frames)
        raw.send_multipart([ID, b"echo", b"\x91\xa2ok"])
        assert raw.recv_multipart() == [ID, b"ok", b"\x91\xa2ok"]
        assert errors_counted(metrics, "dropped") == 1


@pytest.mark.parametrize(
    "raw_bytes",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\0" * 4096,
        b"\xff\0\0\0\0\0\0\0\0\x7f\3\0NULL" + b"\0" * 48,  # a greeting, then the end
        b"\xff\0\0\0\0\0\0\0\0\x7f\3\0NULL" + b"\0" * 48 + b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER" + b"\xff" * 99,
    ],
)
def test_bytes_that_are_no_zmq_end_only_their_own_connection(raw_bytes: Any) -> None:
    with serving(Oddities()) as server, connected(server) as connection:
        port = int(server.endpoint.rpartition(":")[2])
        with sockets.create_connection(("127.0.0.1", port), timeout=5.0) as raw:
            raw.sendall(raw_bytes)
            assert echo(connection, "while it is open") == "while it is open"
        assert echo(connection, "after") == "after"


@pytest.mark.parametrize(
    "frames",
    [[ID, b"echo", b"x" * 10_001], [ID, b"echo"] + [b"x" * 500] * 30, [ID] * 20_000],
    ids=["one frame", "all frames", "too many frames"],
)
def test_a_message_beyond_the_limit_ends_only_its_own_connection(frames: Any) -> None:
    with (
        serving(Oddities(), message_bytes=10_000) as server,
        connected(server) as connection,
        raw_socket(server) as raw,
    ):
        raw.setsockopt(zmq.RECONNECT_IVL, -1)
        raw.setsockopt(zmq.LINGER, 0)
        raw.send_multipart(frames)
        with pytest.raises(zmq.Again):
            raw.setsockopt(zmq.RCVTIMEO, 300)
            raw.recv_multipart()
        assert echo(connection, "y" * 9_000) == "y" * 9_000


def test_a_client_may_not_take_the_name_of_another() -> None:
    with serving(Oddities()) as server, raw_socket(server) as first:
        first.send_multipart([ID, b"later", b"\x90"])
        context = zmq.Context()
        thief = context.socket(zmq.DEALER)
        thief.setsockopt(zmq.LINGER, 0)
        thief.setsockopt(zmq.ROUTING_ID, b"\0weird")  # ids that begin with zero are ZMQ's own
        thief.connect(server.endpoint)
        thief.send_multipart([ID, b"echo", b"\x90"])
        first.send_multipart([ID, b"echo", b"\x91\xa4mine"])
        assert first.recv_multipart() == [ID, b"ok", b"\x91\xa4mine"]
        context.destroy(linger=0)


def test_deferred_answers_come_in_any_order_and_once() -> None:
    oddities = Oddities()
    with serving(oddities) as server, connected(server) as connection:
        calls = [connection.submit("later", Text(str(number)), Text, 5.0) for number in range(3)]
        assert echo(connection, "not held up") == "not held up"
        for number in (2, 0, 1):
            assert not calls[number].done()
            assert oddities.deferred[number].answer(Text(f"answer {number}"))
            assert not oddities.deferred[number].answer(Text("another"))
            assert calls[number].result().text == f"answer {number}"


def test_an_answer_given_before_the_handler_returns() -> None:
    def at_once(message: Text) -> Deferred:
        deferred = Deferred()
        deferred.answer(Text("early " + message.text))
        return deferred

    server = RpcServer("localhost", 0, SYSTEM.clock)
    server.start({"echo": Method(Text, at_once, may_defer=True)})
    try:
        with connected(server) as connection:
            assert echo(connection, "bird") == "early bird"
    finally:
        server.stop()


def test_deferred_calls_are_limited() -> None:
    oddities = Oddities()
    with serving(oddities, deferred_calls=2) as server, connected(server) as connection:
        calls = [connection.submit("later", Text(), Text, 5.0) for _ in range(3)]
        with pytest.raises(RemoteError) as refusal:
            calls[2].result()
        assert refusal.value.code == "too_many"
        assert len(oddities.deferred) == 2  # it has not begun
        oddities.deferred[0].answer(Text("first"))
        assert calls[0].result().text == "first"
        again = connection.submit("later", Text(), Text, 5.0)
        assert echo(connection, "x") == "x"
        assert not again.done()


def test_what_is_deferred_at_the_end_is_answered() -> None:
    oddities = Oddities()
    with serving(oddities) as server, connected(server) as connection:
        call = connection.submit("later", Text(), Text, 5.0)
        assert oddities.arrived.wait(5.0)
        server.stop()
        with pytest.raises(RemoteError) as refusal:
            call.result()
        assert refusal.value.code == "shutting_down"


def test_draining_refuses_everything_but_ping() -> None:
    with serving(Oddities()) as server, connected(server) as connection:
        server.drain()
        assert connection.submit("ping", Text("you there"), Text, 5.0).result().text == "you there"
        with pytest.raises(RemoteError) as refusal:
            echo(connection, "x")
        assert refusal.value.code == "shutting_down"


def test_timers_and_posted_work_run_on_the_loop_and_faults_stay_there(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Oddities()) as server:
        ran: list[str] = []
        finished = threading.Event()

        def plan() -> None:
            assert threading.current_thread().name == "lmcache-rpc"
            cancelled = [server.call_later(0.005, lambda: ran.append("cancelled")) for _ in range(3000)]
            server.call_later(0.02, lambda: (ran.append("second"), finished.set()))  # type: ignore[arg-type]
            server.call_later(0.01, lambda: ran.append("first"))
            server.call_later(0.0, lambda: 1 // 0)  # type: ignore[arg-type]
            for timer in cancelled:
                timer.cancel()

        server.post(lambda: 1 // 0)  # type: ignore[arg-type]
        server.post(plan)
        assert finished.wait(5.0)
        assert ran == ["first", "second"]
        assert server.responsive(5.0)
    assert "ZeroDivisionError" in caplog.text


def test_a_busy_port_is_refused_with_a_sentence() -> None:
    with serving(Oddities()) as server:
        port = int(server.endpoint.rpartition(":")[2])
        with pytest.raises(ResourceError, match=f"Cannot listen on localhost:{port} because it is in use"):
            RpcServer("localhost", port, SYSTEM.clock)


def test_an_address_that_is_not_here_is_refused_with_a_sentence() -> None:
    with pytest.raises(ResourceError, match=r"Cannot listen on 203\.0\.113\.1:0 because"):
        RpcServer("203.0.113.1", 0, SYSTEM.clock)


def test_stop_is_idempotent_even_without_start() -> None:
    server = RpcServer("localhost", 0, SYSTEM.clock)
    server.stop()
    server.stop()


def test_an_answer_that_another_thread_gave_before_the_end_is_sent() -> None:
    oddities = Oddities()
    with serving(oddities) as server, connected(server) as connection:
        pending = connection.submit("later", Text(), Text, 5.0)
        assert oddities.arrived.wait(5.0)
        stands_still, goes_on = threading.Event(), threading.Event()
        server.post(lambda: (stands_still.set(), goes_on.wait(5.0)))  # type: ignore[arg-type]
        assert stands_still.wait(5.0)
        oddities.deferred[0].answer(Text("found"))
        posted = threading.Event()  # which is how `stop` wakes the loop
        real_post = server.post
        server.post = lambda action: (real_post(action), posted.set())
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert posted.wait(5.0)
        goes_on.set()
        assert pending.result() == Text("found")
        stopping.join()
