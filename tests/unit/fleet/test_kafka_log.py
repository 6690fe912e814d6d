"""What a consumer of Kafka reports in place of bodies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import ServerUnavailable
from lmcache.fleet.event_log import KafkaSettings, open_log
from services import need_package

need_package("confluent_kafka")
from confluent_kafka import KafkaError  # noqa: E402

OUT_OF_RANGE = -140  # as librdkafka reports it


class Told:
    """A consumer that gives what it was told to."""

    def __init__(self, *given: KafkaError | bytes) -> None:
        self._given = list(enumerate(given))
        self.assigned: list[int] = []

    def assign(self, places: list[Any]) -> None:
        self.assigned += [place.offset for place in places]

    def poll(self, seconds: float) -> Any:
        if not self._given:
            return None
        offset, given = self._given.pop(0)
        fault = given if isinstance(given, KafkaError) else None
        return SimpleNamespace(error=lambda: fault, offset=lambda: offset, value=lambda: given)


def log_of(monkeypatch: pytest.MonkeyPatch, consumer: Told) -> Any:
    monkeypatch.setattr("lmcache.fleet.kafka_log.Consumer", lambda properties: consumer)
    return open_log(KafkaSettings("h:1"))


def test_a_topic_that_may_not_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    consumer = Told(refused, b"first", refused)
    log = log_of(monkeypatch, consumer)
    with pytest.raises(ServerUnavailable, match=r"The events at h:1 cannot be reached: .*[Aa]uthorization failed"):
        log.read("0", 0.0)
    assert log.read("0", 0.0) == [("2", b"first")] and log.read("2", 0.0) == []
    assert consumer.assigned == [0]


def test_a_place_that_is_gone_is_read_again_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Told(KafkaError(OUT_OF_RANGE), KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), b"third")
    log = log_of(monkeypatch, consumer)
    assert [log.read("0", 0.0) for _ in range(3)] == [[], [], [("3", b"third")]]
    assert consumer.assigned == [0, 0]


def test_a_body_that_does_not_fit_the_queue_of_the_client_is_said(tmp_path: Path) -> None:
    properties = tmp_path / "kafka.properties"
    properties.write_text("queue.buffering.max.kbytes=1\n")
    properties.chmod(0o600)
    log = open_log(KafkaSettings("127.0.0.1:1", config_file=str(properties)))
    with pytest.raises(ServerUnavailable, match="cannot be reached: Local: Queue full"):
        log.append(bytes(4096))
