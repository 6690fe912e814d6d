"""The log as the first partition of a topic of Kafka, read by offsets that the coordinator keeps itself.

Its client is librdkafka, whose threads hold the connections: a call here waits for what they report, within a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from lmcache.core.address import host_and_port
from lmcache.core.limits import MAX_FLEET_EVENT_BYTES, MAX_LOGGED_EVENT_REQUESTS
from lmcache.core.secret_file import read_private_text
from lmcache.errors import ConfigError, ServerUnavailable
from lmcache.fleet.event_log import KafkaSettings

_PARTITION = 0  # a log has one order
_ASK_SECONDS = 5.0
_LOOK_SECONDS = 2.5  # for each of two questions
_REPORT_SECONDS = 2.0  # until librdkafka has said that the time for a body is over
_BODIES_AT_ONCE = 8
_MAX_CONFIG_BYTES = 64 * 1024
_LOGIN = ("sasl.username", "sasl.password")
_NO_TOPIC = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
_COMMON = {
    "log_level": 0,  # of its own log on stderr; what it reports as errors is said here
    "reconnect.backoff.max.ms": 1000,
}
_OF_PRODUCER = {
    "message.timeout.ms": round(_ASK_SECONDS * 1000),
    "message.max.bytes": MAX_FLEET_EVENT_BYTES,  # before compression; brokers take 1 MB after it by default
    "compression.type": "zstd",
    "linger.ms": 0,
}
_OF_CONSUMER = {
    "enable.auto.commit": False,
    "auto.offset.reset": "error",  # `retained` says where to go on
    "queued.max.messages.kbytes": 16 * 1024,  # read ahead
}
_OWN = {"bootstrap.servers", "group.id", "logger", "default.topic.config", *_COMMON, *_OF_PRODUCER, *_OF_CONSUMER}


class KafkaLog:
    def __init__(self, settings: KafkaSettings) -> None:
        servers = [server.strip().removeprefix("tcp://") for server in settings.bootstrap_servers.split(",")]
        for server in servers:
            host_and_port(f"Each server of {settings.option}bootstrap-servers", server)
        if not settings.topic:
            raise ConfigError(f"{settings.option}topic must be the name of a topic, got ''.")
        self._settings = settings
        self._servers = ",".join(servers)
        self._properties = self._read_properties()
        self._client(Producer, {})  # tries the properties, and connects to nobody
        self._reason = ""  # of the last fault that librdkafka reported
        self._position = ""  # behind what the consumer gave; "" where it is to be told

    def append(self, body: bytes) -> None:
        self._reason = ""
        reports: list[KafkaError | None] = []
        producer: Producer = self._producer
        with self._faults(producer):
            producer.produce(
                self._settings.topic, body, partition=_PARTITION, on_delivery=lambda error, _: reports.append(error)
            )
            producer.flush(_ASK_SECONDS + _REPORT_SECONDS)
            if not reports or reports[0] is not None:
                raise KafkaException(reports[0] if reports else KafkaError(KafkaError._TIMED_OUT))

    def read(self, position: str, wait_seconds: float) -> Sequence[tuple[str, bytes]]:
        if not position.isdecimal():
            return ()  # of another log
        consumer: Consumer = self._consumer
        found: list[tuple[str, bytes]] = []
        with self._faults(consumer):
            if position != self._position:
                consumer.assign([TopicPartition(self._settings.topic, _PARTITION, int(position))])
                self._position = position
            while len(found) < _BODIES_AT_ONCE:
                message = consumer.poll(0.0 if found else wait_seconds)
                if message is None or self._ends(message.error(), found):
                    break
                self._position = str(message.offset() + 1)
                found.append((self._position, message.value() or b""))
        return found

    def _ends(self, error: KafkaError | None, found: Sequence[object]) -> bool:
        """Whether there is nothing to read because of that. KafkaException where nothing else would show it."""
        if error is None:
            return False
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._position = ""  # nothing more comes from there
        elif not found and error.code() not in _NO_TOPIC:
            self._reason = ""
            raise KafkaException(error)
        return True

    def retained(self, position: str) -> str:
        """A topic may be kept for long: who has no position there needs no more than the last of it."""
        topic = self._settings.topic
        consumer: Consumer = self._consumer
        with self._faults(consumer):
            # Who leads the partition must be known, else the offsets are those of an unknown partition.
            error = consumer.list_topics(topic, timeout=_LOOK_SECONDS).topics[topic].error
            self._reason = ""
            if error is None:
                oldest, end = consumer.get_watermark_offsets(TopicPartition(topic, _PARTITION), timeout=_LOOK_SECONDS)
            elif error.code() in _NO_TOPIC:
                oldest = end = 0
            else:
                raise KafkaException(error)
        if position.isdecimal() and oldest <= int(position) <= end:
            return position
        return str(max(oldest, end - MAX_LOGGED_EVENT_REQUESTS))

    def close(self) -> None:
        if "_consumer" in self.__dict__:
            self._consumer.close()

    @cached_property
    def _producer(self) -> Producer:
        return self._client(Producer, {**self._connection, **_OF_PRODUCER})

    @cached_property
    def _consumer(self) -> Consumer:
        return self._client(Consumer, {**self._connection, **_OF_CONSUMER, "group.id": self._settings.group_id})

    @property
    def _connection(self) -> dict[str, Any]:
        return {"bootstrap.servers": self._servers, "error_cb": self._take_fault}

    def _client(self, kind: Callable[[dict[str, Any]], Any], own: dict[str, Any]) -> Any:
        try:
            return kind({**self._properties, **_COMMON, **own})
        except (KafkaException, TypeError) as error:  # the binding has properties that are no text
            raise ConfigError(f"{self._config_flag} {self._settings.config_file}: {_text(error)}.") from None

    def _take_fault(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._reason:
            self._reason = error.str()

    @contextmanager
    def _faults(self, client: Any) -> Iterator[None]:
        """Reads the file anew: another login there counts for the next connection."""
        properties = self._read_properties()
        login = [properties.get(name, "") for name in _LOGIN]
        try:
            if login != [self._properties.get(name, "") for name in _LOGIN]:
                client.set_sasl_credentials(*login)
                self._properties = properties
            yield
        except (KafkaException, BufferError) as error:  # the latter where a body does not fit librdkafka's queue
            reason = self._reason or _text(error)
            raise ServerUnavailable(f"The events at {self._servers} cannot be reached: {reason}.") from None

    @property
    def _config_flag(self) -> str:
        return f"{self._settings.option}config-file"

    def _read_properties(self) -> dict[str, Any]:
        """Lines of name=value; what begins with # is passed over. ConfigError without what a line holds, which may be
        secret."""
        path = self._settings.config_file
        properties = {}
        text = read_private_text(path, self._config_flag, _MAX_CONFIG_BYTES) if path else ""
        for number, line in enumerate(text.splitlines(), 1):
            name, separator, value = (part.strip() for part in line.partition("="))
            if not name or name.startswith("#"):
                continue
            if not separator:
                raise ConfigError(
                    f"{self._config_flag} {path} must have name=value in line {number}, or a # before it."
                )
            if name in _OWN:
                raise ConfigError(
                    f"{self._config_flag} {path} sets {name} in line {number}, which is not to be chosen."
                )
            properties[name] = value
        return properties


def _text(error: Exception) -> str:
    return str(error.args[0].str()) if isinstance(error, KafkaException) else str(error)
