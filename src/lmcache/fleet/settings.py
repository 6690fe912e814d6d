"""What a coordinator is started with."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache.fleet.event_log import (
    DEFAULT_GROUP,
    DEFAULT_STREAM,
    HTTP,
    KAFKA,
    EventLogSettings,
    KafkaSettings,
    ValkeySettings,
)


@dataclass(frozen=True)
class CoordinatorSettings:
    """Empty paths: none. Times are in seconds."""

    host: str = "0.0.0.0"
    port: int = 9300
    controller_port: int = 9000
    instance_timeout: float = 30.0
    health_check_interval: float = 10.0
    chunk_size: int = 256
    hash_algorithm: str = "blake3"
    checkpoint_path: str = ""
    checkpoint_interval: float = 60.0
    metadata_path: str = ""
    timeout_keep_alive: int = 10
    admin_token_file: str = ""
    disable_metrics: bool = False
    event_transport: str = HTTP
    valkey_url: str = ""
    valkey_stream: str = DEFAULT_STREAM
    valkey_password_file: str = ""
    kafka_bootstrap_servers: str = ""
    kafka_topic: str = DEFAULT_STREAM
    kafka_config_file: str = ""
    kafka_group_id: str = DEFAULT_GROUP

    @property
    def event_log(self) -> EventLogSettings | None:
        """None: events come over HTTP alone."""
        if self.event_transport == HTTP:
            return None
        if self.event_transport == KAFKA:
            return KafkaSettings(
                self.kafka_bootstrap_servers, self.kafka_topic, self.kafka_config_file, self.kafka_group_id
            )
        return ValkeySettings(self.valkey_url, self.valkey_stream, self.valkey_password_file)
