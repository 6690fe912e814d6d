"""A message loop with a few methods that do odd things, and raw access to its socket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec
import zmq

from lmcache.environment import SYSTEM
from lmcache.errors import RemoteError
from lmcache.telemetry.metrics import RpcMetrics
from lmcache.transport.connection import Connection
from lmcache.transport.deferred import Deferred
from lmcache.transport.peers import RpcLimits
from lmcache.transport.rpc_server import Method, RpcServer


class Text(msgspec.Struct, array_like=True):
    text: str = ""


class Oddities:
    """Handlers: what is deferred can be answered by the test."""

    def __init__(self) -> None:
        self.deferred: list[Deferred] = []
        self.arrived = threading.Event()

    def echo(self, message: Text) -> Text:
        return message

    def write_much(self, message: Text) -> Text:
        return Text("x" * int(message.text))

    def refuse(self, message: Text) -> Text:
        raise RemoteError("too_large", f"refused {message.text}")

    def fail(self, message: Text) -> Text:
        raise ZeroDivisionError(message.text)

    def later(self, message: Text) -> Deferred:
        deferred = Deferred()
        self.deferred.append(deferred)
        self.arrived.set()
        return deferred

    def methods(self) -> dict[str, Method]:
        at_once = {name: Method(Text, getattr(self, name)) for name in ("echo", "write_much", "refuse", "fail")}
        return at_once | {"later": Method(Text, self.later, may_defer=True), "ping": Method(Text, self.echo)}


@contextlib.contextmanager
def serving(oddities: Oddities, metrics: RpcMetrics | None = None, **limits: int) -> Iterator[RpcServer]:
    server = RpcServer("localhost", 0, SYSTEM.clock, metrics, RpcLimits(**limits))
    server.start(oddities.methods())
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def connected(server: RpcServer) -> Iterator[Connection]:
    context = zmq.Context()
    connection = Connection(server.endpoint, context, SYSTEM.clock)
    try:
        connection.wait_established(5.0)
        yield connection
    finally:
        connection.close()
        context.destroy(linger=0)


@contextlib.contextmanager
def raw_socket(server: RpcServer) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(server.endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def echo(connection: Connection, text: str) -> str:
    return connection.submit("echo", Text(text), Text, 5.0).result().text
