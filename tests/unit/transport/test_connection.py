import threading
import time

import pytest
import zmq

from lmcache.core import limits
from lmcache.environment import SYSTEM
from lmcache.errors import ProtocolError, ServerUnavailable
from lmcache.transport.connection import Connection
from manual_clock import ManualClock
from unit.transport.support import Oddities, Text, connected, echo, serving


def test_many_threads_share_a_connection() -> None:
    oddities = Oddities()
    with serving(oddities) as server, connected(server) as connection:
        held = [connection.submit("later", Text(str(number)), Text, 20.0) for number in range(8)]
        wrong: list[str] = []

        def call_often(name: str) -> None:
            for number in range(200):
                text = f"{name} {number}"
                if echo(connection, text) != text:
                    wrong.append(text)

        def wait_for(number: int) -> None:
            if held[number].result().text != f"answer {number}":
                wrong.append(f"held {number}")

        waiters = [threading.Thread(target=wait_for, args=(number,)) for number in range(8)]
        callers = [threading.Thread(target=call_often, args=(f"thread {number}",)) for number in range(4)]
        for thread in [*waiters, *callers]:
            thread.start()
        for thread in callers:
            thread.join(30.0)
        for number, deferred in enumerate(oddities.deferred):
            deferred.answer(Text(f"answer {number}"))
        for thread in waiters:
            thread.join(10.0)
        assert not any(thread.is_alive() for thread in [*waiters, *callers])
        assert wrong == []


def test_a_waiter_is_woken_when_another_thread_reads_its_answer() -> None:
    oddities = Oddities()
    with serving(oddities) as server, connected(server) as connection:
        slow = connection.submit("later", Text(), Text, 20.0)
        woken = threading.Event()
        waiter = threading.Thread(target=lambda: slow.wait(20.0) and woken.set())
        waiter.start()
        for _ in range(50):
            assert echo(connection, "x") == "x"
        assert oddities.arrived.wait(5.0)
        oddities.deferred[0].answer(Text("now"))
        while not woken.is_set() and waiter.is_alive():
            echo(connection, "reads the answer of the waiter, too")
        waiter.join(5.0)
        assert woken.is_set()


def test_wait_ends_at_its_own_bound_and_done_never_waits() -> None:
    with serving(Oddities()) as server, connected(server) as connection:
        call = connection.submit("later", Text(), Text, 20.0)
        assert not call.done()
        started = time.monotonic()
        assert not call.wait(0.05)
        assert time.monotonic() - started < 10.0
        assert not call.settled


def test_a_call_ends_at_its_deadline_and_its_late_answer_is_ignored() -> None:
    oddities = Oddities()
    troubles: list[Exception] = []
    with serving(oddities) as server:
        context = zmq.Context()
        connection = Connection(server.endpoint, context, SYSTEM.clock, on_trouble=troubles.append)
        call = connection.submit("later", Text(), Text, 0.05)
        with pytest.raises(ServerUnavailable, match="did not answer later in time"):
            call.result()
        assert [type(trouble) for trouble in troubles] == [ServerUnavailable]
        assert oddities.arrived.wait(5.0)
        oddities.deferred[0].answer(Text("late"))
        assert echo(connection, "next") == "next"
        connection.close()
        context.destroy(linger=0)


def test_calls_in_flight_are_limited_and_expired_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_IN_FLIGHT_PER_CLIENT", 3)
    clock = ManualClock()
    with serving(Oddities()) as server:
        context = zmq.Context()
        connection = Connection(server.endpoint, context, clock)
        for _ in range(3):
            connection.submit("later", Text(), Text, 5.0)
        with pytest.raises(ServerUnavailable, match="3 calls already wait"):
            connection.submit("later", Text(), Text, 5.0)
        clock.advance(6.0)
        assert echo(connection, "room") == "room"
        connection.close()
        context.destroy(linger=0)


def test_a_cancelled_call_wakes_who_waits_for_it() -> None:
    with serving(Oddities()) as server, connected(server) as connection:
        call = connection.submit("later", Text(), Text, 20.0)
        waiter = threading.Thread(target=call.wait, args=(20.0,))
        waiter.start()
        call.cancel()
        waiter.join(5.0)
        assert not waiter.is_alive()
        with pytest.raises(ServerUnavailable, match="given up"):
            call.result()


def test_when_the_server_goes_every_call_fails_at_once() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connection = Connection(f"tcp://127.0.0.1:{port}", context, SYSTEM.clock)
    watcher = threading.Thread(target=connection.wait_broken, args=(20.0,))
    call = connection.submit("echo", Text(), Text, 20.0)
    answered = connection.submit("echo", Text(), Text, 20.0)
    peer, *_ = router.recv_multipart()
    _, call_id, *_ = router.recv_multipart()
    connection.wait_established(5.0)
    watcher.start()
    router.send_multipart([peer, call_id, b"ok", b"\x91\xa4last"])
    router.close(linger=1000)
    watcher.join(5.0)
    assert "closed the connection" in connection.broken
    assert answered.result().text == "last"
    with pytest.raises(ServerUnavailable, match="closed the connection"):
        call.result()
    with pytest.raises(ServerUnavailable, match="closed the connection"):
        echo(connection, "x")
    connection.close()
    context.destroy(linger=0)


def test_a_waiting_call_fails_at_once_when_the_connection_is_closed() -> None:
    with serving(Oddities()) as server, connected(server) as connection:
        call = connection.submit("later", Text(), Text, 20.0)
        failed: list[str] = []

        def wait() -> None:
            try:
                call.result()
            except ServerUnavailable as error:
                failed.append(str(error))

        waiters = [threading.Thread(target=wait)]
        for thread in waiters:
            thread.start()
        connection.close()
        for thread in waiters:
            thread.join(5.0)
        assert failed == [f"The connection to {connection.endpoint} was closed."]


def test_nobody_listening_is_found_out_at_once() -> None:
    with serving(Oddities()) as server:
        endpoint = server.endpoint
    context = zmq.Context()
    connection = Connection(endpoint, context, SYSTEM.clock)
    started = time.monotonic()
    with pytest.raises(ServerUnavailable, match="Nothing answers"):
        connection.wait_established(20.0)
    assert time.monotonic() - started < 10.0
    connection.close()
    connection.close()
    context.destroy(linger=0)


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Oddities()) as server, connected(server) as connection:
        monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 1000)
        with pytest.raises(ProtocolError, match="beyond 1000 bytes"):
            echo(connection, "x" * 1000)


def test_an_answer_of_another_shape_is_a_protocol_error() -> None:
    class Number(Text, array_like=True):
        text: int = 0

    with serving(Oddities()) as server, connected(server) as connection:
        call = connection.submit("echo", Text("word"), Number, 5.0)
        with pytest.raises(ProtocolError, match="answer to echo cannot be read"):
            call.result()
