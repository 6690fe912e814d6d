"""Reads the options of a server and refuses what is known to fail, before the server takes any resource.

`lmcache server` and `lmcache config check` both begin here, so that they cannot differ. Only what depends on other
processes at that moment is left to the start: ports, locks, free memory and free disk space.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcache.admin import audit
from lmcache.config.load import Loaded, draft
from lmcache.config.notes import L2Traits, notes
from lmcache.config.spec import ServerConfig, flag
from lmcache.core.address import http_listening_host
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.fleet.event_log import HTTP, KAFKA, EventLogSettings, KafkaSettings, ValkeySettings, open_log
from lmcache.http.access import read_token
from lmcache.http.client import split_url
from lmcache.http.tls import server_context
from lmcache.kv_events.endpoint import Endpoint, parse_endpoint, parse_replay_endpoint
from lmcache.l1.quota_file import QuotaFile
from lmcache.l2 import adapter_types
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.l2.background import in_thread
from lmcache.memory import numa, server_memory
from lmcache.peers.access import read_peer_token
from lmcache.peers.config import listening_at
from lmcache.peers.transports import library
from lmcache.runtime_plugins.scripts import find_scripts
from lmcache.telemetry import lookup_log, otlp
from lmcache.telemetry.logs import level_of
from lmcache.tiering.policies import PrefetchPolicy, StorePolicy
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from lmcache.transport import listening

log = logging.getLogger("lmcache.startup")


@dataclass(frozen=True)
class Plan:
    """A server that may be started. `adapters` are built and not opened."""

    loaded: Loaded
    adapters: Sequence[ConfiguredAdapter]
    store_policy: StorePolicy
    prefetch_policy: PrefetchPolicy
    notes: Sequence[str]  # warnings for the operator: accepted, but perhaps not intended

    @property
    def config(self) -> ServerConfig:
        return self.loaded.config

    def discard(self) -> None:
        """Closes the adapters of a plan that is not started."""
        asyncio.run(_close(self.adapters))


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Loaded, list[AdapterConfig]]:
    """The options alone, adapters included. ConfigError lists every problem, a sentence each."""
    problems = Problems()
    loaded = draft(argv, environ, problems)
    configs = _adapter_configs(loaded.config, problems)
    problems.raise_all()
    return loaded, configs


def plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """ConfigError or ResourceError lists every problem, a sentence each. The machine is checked only when the options
    themselves are valid."""
    loaded, configs = read(argv, environ)
    problems = Problems()
    _check_machine(loaded.config, problems)
    _check_export(loaded.config, environ, problems)
    store_policy, prefetch_policy = _policies(loaded.config, problems)
    adapters: list[ConfiguredAdapter] = []
    adapter_notes: list[str] = []
    for config in configs:
        with problems.collect():
            adapters.append(adapter_types.build(config))
            adapter_notes += asyncio.run(_check_backend(config))
    if problems.found:
        asyncio.run(_close(adapters))
    problems.raise_all()
    assert store_policy is not None and prefetch_policy is not None
    l2 = L2Traits(
        verifies_loads=any(_leaves_verifying(loaded.config, configured) for configured in adapters),
        drops_from_l1=bool(adapters) and store_policy.drops_from_l1,
        limits_salts=any(config.eviction_policy == "IsolatedLRU" for config in configs),
    )
    server_notes = notes(loaded, environ, l2)
    server_notes += open_secrets(loaded.config) + _missing_folders(loaded.config) + _open_events(loaded.config)
    return Plan(
        loaded, adapters, store_policy, prefetch_policy, server_notes + _shared_folders(configs) + adapter_notes
    )


def _check_export(config: ServerConfig, environ: Mapping[str, str], problems: Problems) -> None:
    with problems.collect():
        if config.otlp_endpoint:
            otlp.refuse_unusable(config.otlp_endpoint, environ)
        elif config.enable_tracing:
            raise ConfigError("--enable-tracing needs --otlp-endpoint, the receiver of the spans.")


def _leaves_verifying(config: ServerConfig, configured: ConfiguredAdapter) -> bool:
    """Whether threads of the server verify what it loads, or what it stores out of a recovered L1."""
    return config.l1_persist or not getattr(configured.adapter, "verifies", False)


def open_secrets(config: ServerConfig) -> list[str]:
    """A note for each file of a secret that everybody on this machine can read or replace by writing to it."""
    found = []
    for name in ("admin_token_file", "p2p_token_file", "http_tls_key"):
        path = getattr(config, name)
        with contextlib.suppress(OSError):  # it was readable a moment ago
            mode = stat.S_IMODE(os.stat(path).st_mode) if path else 0
            if mode & 0o006:
                found.append(
                    f"{flag(name)} {path} is open to everybody on this machine (mode {mode:04o}): chmod 600 it."
                )
    return found


def event_log_settings(config: ServerConfig) -> EventLogSettings | None:
    """None: the coordinator is told over HTTP."""
    if config.coordinator_event_transport == HTTP:
        return None
    if config.coordinator_event_transport == KAFKA:
        return KafkaSettings(
            config.coordinator_kafka_bootstrap_servers,
            config.coordinator_kafka_topic,
            config.coordinator_kafka_config_file,
            option="--coordinator-kafka-",
        )
    return ValkeySettings(
        config.coordinator_valkey_url,
        config.coordinator_valkey_stream,
        config.coordinator_valkey_password_file,
        option="--coordinator-valkey-",
    )


def _open_events(config: ServerConfig) -> list[str]:
    """For endpoints from which other hosts can read what prompts are made of, and one that may be meant so."""
    notes = []
    for text, name, parse in _event_endpoints(config) if config.kv_events_endpoint else ():
        endpoint = parse(text, flag(name))
        if endpoint.is_open:
            notes.append(
                f"{flag(name)} {text} is open: whoever reaches it reads the tokens of all prompts without a cache salt."
            )
        elif endpoint.is_own:
            notes.append(
                f"{flag(name)} {text} is an address of this host: the server connects to a subscriber that listens "
                "there. Subscribers that connect to the server need tcp://*:PORT."
            )
    return notes


def _event_endpoints(config: ServerConfig) -> Iterator[tuple[str, str, Callable[[str, str], Endpoint]]]:
    """(what was given, name of the option, how it is read)."""
    for name, parse in (("kv_events_endpoint", parse_endpoint), ("kv_events_replay_endpoint", parse_replay_endpoint)):
        if text := getattr(config, name):
            yield text, name, parse


def _missing_folders(config: ServerConfig) -> list[str]:
    if config.disable_http or not config.tokenizer_dir or os.path.isdir(config.tokenizer_dir):
        return []
    return [f"--tokenizer-dir {config.tokenizer_dir} is no folder: over HTTP text is refused until it is one."]


def _shared_folders(configs: Sequence[AdapterConfig]) -> list[str]:
    """A note for each folder of two adapters: servers may share one, but here every file would be written twice."""
    return [
        f'{adapter.where}: "base_path" {path} is that of {other.where}: both write the same files; give '
        "each a folder of its own."
        for adapter, path, other in _at_one_path((config, config.folder) for config in configs)
    ]


def _at_one_path(places: Iterable[tuple[AdapterConfig, str]]) -> Iterator[tuple[AdapterConfig, str, AdapterConfig]]:
    """(adapter, its path, an earlier adapter at the same path). Adapters without a path are passed over."""
    first: dict[str, AdapterConfig] = {}
    for adapter, place in places:
        if place:
            path = os.path.realpath(place)
            if (other := first.setdefault(path, adapter)) is not adapter:
                yield adapter, path, other


def _policies(config: ServerConfig, problems: Problems) -> tuple[StorePolicy | None, PrefetchPolicy | None]:
    """None for a policy that is refused."""
    store_policy: StorePolicy | None = None
    prefetch_policy: PrefetchPolicy | None = None
    with problems.collect():
        store_policy = select_store_policy(config.l2_store_policy)
    with problems.collect():
        prefetch_policy = select_prefetch_policy(config.l2_prefetch_policy)
    return store_policy, prefetch_policy


def _adapter_configs(config: ServerConfig, problems: Problems) -> list[AdapterConfig]:
    configs: list[AdapterConfig] = []
    for index, spec in enumerate(config.l2_adapter):
        if spec:  # {} stands for one that was refused already
            with problems.collect():
                configs.append(adapter_types.parse_adapter(spec, index))
    for adapter, path, other in _at_one_path((config, config.device) for config in configs):
        problems.add(f'{adapter.where}: "device_path" {path} is that of {other.where}; give each a device of its own.')
    return configs


def _check_machine(config: ServerConfig, problems: Problems) -> None:
    with problems.collect():
        listening.refuse_unusable_for_engines(config.host, config.port)
    if not config.disable_http:
        with problems.collect():
            listening.refuse_unusable(http_listening_host(config.http_host), config.http_port, "--http-host")
    if config.p2p_advertise_url:
        with problems.collect():
            listening.refuse_unusable(*listening_at(config), "--p2p-listen-url or --p2p-advertise-url")
        with problems.collect():
            read_peer_token(config.p2p_token_file)
        if config.p2p_transfer_engine in library.ENGINES:
            with problems.collect():
                library.refuse_missing(config.p2p_transfer_engine)
    with problems.collect():
        read_token(config.admin_token_file)
    for text, name, parse in _event_endpoints(config):
        with problems.collect():
            parse(text, flag(name))
    if config.coordinator_url:
        with problems.collect():
            split_url(config.coordinator_url, "--coordinator-url")
        with problems.collect():
            if log := event_log_settings(config):
                open_log(log).close()
    with problems.collect():
        server_context(config.http_tls_cert, config.http_tls_key)
    with problems.collect():
        server_memory.refuse_unusable(config.shm_name, config.l1_size_bytes, hugepages=config.l1_use_hugepages)
    if config.quota_file:
        with problems.collect():
            QuotaFile(config.quota_file).read()
    with problems.collect():
        numa.placement(config.l1_numa)
    with problems.collect():
        find_scripts(config.runtime_plugin_locations)
    with problems.collect():
        _check_curve(config)
    with problems.collect():
        audit.refuse_unusable(config.audit_log)
    if config.lookup_hash_log_dir:
        with problems.collect():
            lookup_log.refuse_unusable(config.lookup_hash_log_dir)


def _check_curve(config: ServerConfig) -> None:
    if config.zmq_curve_server_key_file and config.zmq_curve_client_keys_dir:
        try:
            from lmcache.transport.curve_clients import read_access
        except ImportError:
            raise ConfigError(
                "--zmq-curve-server-key-file needs PyNaCl, which is not installed: pip install 'lmcache[curve]'."
            ) from None
        _, problems = read_access(config.zmq_curve_server_key_file, config.zmq_curve_client_keys_dir)
        if problems:
            raise ConfigError(*problems)


async def _check_backend(config: AdapterConfig) -> list[str]:
    """In a thread with a deadline: a dead mount blocks the thread, not the process."""
    try:
        return await asyncio.wait_for(in_thread("l2-check", adapter_types.check, config), config.timeout_seconds)
    except asyncio.TimeoutError:
        raise config.timeout_error() from None


async def _close(adapters: Sequence[ConfiguredAdapter]) -> None:
    """With a deadline each: a plugin may have started threads when it was constructed."""
    for configured in adapters:
        try:
            await asyncio.wait_for(configured.adapter.close(), configured.config.timeout_seconds)
        except Exception as error:  # code from outside may raise anything; nothing was opened, so nothing is lost
            log.log(level_of(error), "%s: closing failed before it was opened", configured.config.name, exc_info=True)
