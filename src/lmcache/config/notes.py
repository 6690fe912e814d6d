"""Warnings about accepted options: those without effect beside others, and odd combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lmcache.config import unbuilt
from lmcache.config.check import transfer_engine_is_reached
from lmcache.config.load import Loaded
from lmcache.config.spec import ServerConfig, flag, options
from lmcache.core.address import socket_path

_LOOKUP_LOG = (
    "lookup_hash_log_rotation_interval",
    "lookup_hash_log_rotation_max_size",
    "lookup_hash_log_max_files",
)

_HTTP = (
    *("http_host", "http_port", "prometheus_port", "admin_token_file", "tokenizer_dir"),
    *("http_tls_cert", "http_tls_key"),
)

_FLEET = ("coordinator_advertise_ip", "coordinator_heartbeat_interval", "coordinator_event_reporting")
_EVENTS = ("coordinator_event_transport", "coordinator_event_flush_interval")
_EVENT_LOGS = {
    "valkey": ("coordinator_valkey_url", "coordinator_valkey_stream", "coordinator_valkey_password_file"),
    "kafka": ("coordinator_kafka_bootstrap_servers", "coordinator_kafka_topic", "coordinator_kafka_config_file"),
}

_P2P = (
    *("p2p_lookup_timeout", "p2p_load_timeout", "p2p_transfer_engine", "p2p_token_file"),
    "p2p_without_token",
)


class L2Traits(NamedTuple):
    """What the adapters and the store policy, taken together, mean for options of the server."""

    verifies_loads: bool = False  # an adapter leaves it to the server to verify loads
    drops_from_l1: bool = False  # objects leave L1 once L2 has stored them, whatever the eviction policy
    limits_salts: bool = False  # an adapter evicts by the quotas of salts


def notes(loaded: Loaded, environ: Mapping[str, str], l2: L2Traits) -> list[str]:
    """A sentence each, for the log and for `lmcache config check`."""
    found = list(_without_effect(loaded, l2))
    found += _odd(loaded.config, environ, l2)
    for name in loaded.ignored:
        instead = unbuilt.in_process_key(name.removeprefix("LMCACHE_").lower())
        found.append(f"{name} in the environment is not an option of this server{f' ({instead})' * bool(instead)}.")
    return found


def _without_effect(loaded: Loaded, l2: L2Traits) -> Iterator[str]:
    config = loaded.config
    for names, reason in _idle(loaded, l2):
        for name in names:
            if name in loaded.sources and getattr(config, name) != _default(config, name):
                yield f"{loaded.sources[name]} has no effect: {reason}."
    if "engine_type" in loaded.sources:  # which nobody gives without a reason, as it is what it is without
        yield f"{loaded.sources['engine_type']} has no effect: default is the only type that is built."


def _default(config: ServerConfig, name: str) -> object:
    return config.max_workers if name in ("max_gpu_workers", "max_cpu_workers") else options()[name][1]


def _idle(loaded: Loaded, l2: L2Traits) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that change nothing in this configuration, and why."""
    config = loaded.config
    if socket_path(config.host):
        yield ("port",), "a server at the path of a socket takes no port"
    yield ("max_gpu_workers",), "engines copy with threads of their own"
    if not config.l2_adapter:
        yield ("l2_store_policy",), "there is no --l2-adapter"
        if not config.p2p_advertise_url:
            yield ("l2_prefetch_policy", "l2_prefetch_max_in_flight"), "there is no --l2-adapter"
        yield ("drain_timeout_seconds",), "there is no --l2-adapter, so nothing is drained"
        yield ("max_workers", "max_cpu_workers"), "its threads verify what L2 gave back, and there is no --l2-adapter"
    elif not l2.verifies_loads:
        yield ("max_workers", "max_cpu_workers"), "every --l2-adapter verifies on its own threads (num_workers)"
    elif "max_cpu_workers" in loaded.sources:
        yield ("max_workers",), f"{loaded.sources['max_cpu_workers']} says how many threads verify"
    if not config.l1_use_lazy:
        yield ("l1_init_size_gb",), "without --l1-use-lazy all of L1 is taken at the start"
    if config.eviction_policy == "noop" and not l2.drops_from_l1:  # else objects that no adapter took are evicted
        yield ("eviction_trigger_watermark", "eviction_ratio"), "--eviction-policy noop evicts nothing"
    if config.eviction_policy != "IsolatedLRU" and not l2.limits_salts:
        yield ("quota_file",), f"--eviction-policy {config.eviction_policy} knows no quotas; use IsolatedLRU"
    if not config.metrics_enabled:
        yield ("prometheus_port", "metrics_sample_rate"), "metrics are off"
    if config.disable_http:
        yield _HTTP, "there is no HTTP listener (--disable-http)"
        if not config.zmq_curve_server_key_file:
            yield ("audit_log",), "nothing can be changed: there is neither an HTTP listener nor CURVE"
    if not config.lookup_hash_log_dir:
        yield _LOOKUP_LOG, "there is no --lookup-hash-log-dir"
    yield from _idle_of_fleet(config)
    if not config.kv_events_endpoint:
        yield ("kv_events_replay_endpoint", "kv_events_topic"), "there is no --kv-events-endpoint"
    if not config.runtime_plugin_locations:
        yield ("runtime_plugin_config",), "there is no --runtime-plugin-locations"
    if not config.p2p_advertise_url:
        yield _P2P, "without --p2p-advertise-url there are no peers"
    elif config.p2p_token_file and not transfer_engine_is_reached(config):
        yield ("p2p_without_token",), "peers need the token of --p2p-token-file"
    if config.disable_observability:
        covered = ("disable_metrics", "disable_logging", "enable_tracing", "otlp_endpoint", "trace_sample_rate")
        yield covered, "--disable-observability covers it"
    yield from _idle_of_telemetry(config)


def _idle_of_fleet(config: ServerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    logs = tuple(name for names in _EVENT_LOGS.values() for name in names)
    if not config.coordinator_url:
        yield (*_FLEET, *_EVENTS, *logs), "there is no --coordinator-url"
        if not config.kv_events_endpoint:
            yield ("instance_id",), "there is neither --coordinator-url nor --kv-events-endpoint"
    elif not config.coordinator_event_reporting:
        yield (*_EVENTS, *logs), "the coordinator is told nothing (--no-coordinator-event-reporting)"
    else:
        for transport, names in _EVENT_LOGS.items():
            if config.coordinator_event_transport != transport:
                yield names, f"--coordinator-event-transport is not {transport}"


def _idle_of_telemetry(config: ServerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    traces = config.enable_tracing and not config.disable_observability
    if not traces and not config.lookup_hash_log_dir:
        yield ("event_bus_queue_size",), "there is neither --lookup-hash-log-dir nor tracing"
    if not traces and not config.metrics_enabled:
        yield ("service_instance_id",), "metrics are off"
    if not traces and not config.disable_observability:
        yield ("trace_sample_rate",), "there is no --enable-tracing"
        if not config.metrics_enabled:
            yield ("otlp_endpoint",), "metrics are off, and there is no --enable-tracing"


def _odd(config: ServerConfig, environ: Mapping[str, str], l2: L2Traits) -> Iterator[str]:
    if config.eviction_policy == "noop" and not l2.drops_from_l1:
        yield (
            f"With --eviction-policy noop and --l2-store-policy {config.l2_store_policy} nothing ever leaves L1: once "
            "it is full, new chunks are not cached."
        )
    if config.coordinator_url and config.disable_http:
        yield (
            "With --disable-http the coordinator cannot reach this server: no pin, quota, deletion, prefetch or move "
            "of the fleet gets here."
        )
    if config.eviction_policy == "IsolatedLRU" and config.l1_persist and not config.quota_file:
        yield (
            "--l1-persist without --quota-file starts without quotas: what L1 kept is evicted within seconds, unless "
            "its cache salt is given a quota before."
        )
    if config.hash_algorithm == "builtin" and not environ.get("PYTHONHASHSEED", "").isdigit():
        yield (
            f"{flag('hash_algorithm')} builtin without PYTHONHASHSEED: what is stored now cannot be found after a "
            "restart; set PYTHONHASHSEED to a number or use blake3."
        )
