"""Combinations of options that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmcache.config.spec import ServerConfig, flag
from lmcache.core.address import (
    EVERY_ADDRESS,
    INSTANCE_ID_PATTERN,
    host_and_port,
    http_listening_host,
    is_loopback,
    listening_host,
    socket_path,
)
from lmcache.errors import ConfigError

_SHM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_RANDOM_SHM_NAME = re.compile(r"lmcache-[0-9a-f]{12}")  # the default with --port 0

Conflict = tuple[set[str], str]  # the options in conflict, and the sentence that names them


def conflicts(config: ServerConfig) -> Iterator[Conflict]:
    yield from _names(config)
    if config.l1_size_bytes < 2 * config.l1_align_bytes:
        yield (
            {"l1_size_gb", "l1_align_bytes"},
            f"--l1-size-gb {config.l1_size_gb:g} holds no object at --l1-align-bytes {config.l1_align_bytes}: "
            "give L1 more.",
        )
    if config.l1_persist and not config.port and _RANDOM_SHM_NAME.fullmatch(config.shm_name):
        yield (
            {"l1_persist", "port", "shm_name"},
            "--l1-persist with --port 0 leaves memory that no later server finds: give a --shm-name or a --port.",
        )
    yield from _ports(config)
    if bool(config.zmq_curve_server_key_file) != bool(config.zmq_curve_client_keys_dir):
        yield (
            {"zmq_curve_server_key_file", "zmq_curve_client_keys_dir"},
            "--zmq-curve-server-key-file and --zmq-curve-client-keys-dir need each other: give both or none.",
        )
    if config.l2_store_policy == "skip_l1" and not config.l2_adapter:
        yield (
            {"l2_store_policy", "l2_adapter"},
            "--l2-store-policy skip_l1 needs an --l2-adapter: without one nothing would be kept anywhere.",
        )
    yield from _peers(config)
    for switch in ("disable_logging", "disable_observability"):
        if config.lookup_hash_log_dir and getattr(config, switch):
            yield (
                {"lookup_hash_log_dir", switch},
                f"--lookup-hash-log-dir writes a log, which {flag(switch)} turns off: remove one of the two.",
            )


def _peers(config: ServerConfig) -> Iterator[Conflict]:
    urls = [(name, getattr(config, name)) for name in ("p2p_advertise_url", "p2p_listen_url")]
    given = [(name, url) for name, url in urls if url] + [("p2p_peers", url) for url in config.p2p_addresses]
    hosts = {}
    for name, url in given:
        try:
            hosts[name], _ = host_and_port(flag(name), url)
        except ConfigError as refusal:
            yield {name}, str(refusal)
            return
    if not config.p2p_advertise_url:
        if given:
            name = given[0][0]
            yield (
                {name, "p2p_advertise_url"},
                f"{flag(name)} needs --p2p-advertise-url, where other servers reach this one: give it.",
            )
        return
    if hosts["p2p_advertise_url"] in EVERY_ADDRESS:
        yield (
            {"p2p_advertise_url"},
            f"--p2p-advertise-url {config.p2p_advertise_url} is no address that others reach this server at: name one, "
            "and give that to --p2p-listen-url.",
        )
        return
    name = "p2p_listen_url" if config.p2p_listen_url else "p2p_advertise_url"
    if not is_loopback(hosts[name]) and not config.p2p_token_file and not config.p2p_without_token:
        yield (
            {name, "p2p_token_file", "p2p_without_token"},
            f"{flag(name)} {getattr(config, name)} lets other hosts read KV, which is what prompts say: give all peers "
            "the same --p2p-token-file, or --p2p-without-token if nobody else reaches that port.",
        )
    if transfer_engine_is_reached(config) and not config.p2p_without_token:
        engine = config.p2p_transfer_engine
        yield (
            {"p2p_transfer_engine", "p2p_without_token"},
            f"--p2p-transfer-engine {engine} lets whoever reaches its ports on this machine read and change KV, "
            "which is what prompts say, and knows no token: give --p2p-without-token if nobody else does, beside "
            "--p2p-token-file or without.",
        )


def transfer_engine_is_reached(config: ServerConfig) -> bool:
    """Whether other hosts reach ports that --p2p-transfer-engine listens at. --p2p-advertise-url is one."""
    engine = config.p2p_transfer_engine
    host, _ = host_and_port("--p2p-advertise-url", config.p2p_advertise_url)
    return engine == "mooncake_te" or (engine == "nixl" and not is_loopback(host))


def _names(config: ServerConfig) -> Iterator[Conflict]:
    if not _SHM_NAME.fullmatch(config.shm_name):
        yield (
            {"shm_name"},
            f"--shm-name must be at most 200 letters, digits, dots, dashes and underscores, beginning with a letter or "
            f"digit, got {config.shm_name!r}.",
        )
    if not re.match(INSTANCE_ID_PATTERN, config.instance_id):
        yield (
            {"instance_id"},
            "--instance-id must be at most 512 characters without slashes, spaces and line ends, got "
            f"{config.instance_id!r}.",
        )
    try:
        listening_host(config.host)
    except ConfigError as refusal:
        yield {"host"}, str(refusal)
    try:
        http_listening_host(config.http_host)
    except ConfigError as refusal:
        yield {"http_host"}, str(refusal)


def _ports(config: ServerConfig) -> Iterator[Conflict]:
    http = [] if config.disable_http else ["http_port"] + ["prometheus_port"] * config.metrics_enabled
    names = ["port"] * (not socket_path(config.host)) + http
    for index, name in enumerate(names):
        port = getattr(config, name)
        for other in names[:index]:
            if port and port == getattr(config, other):
                yield (
                    {name, other},
                    f"{flag(other)} and {flag(name)} are both {port}: each listener needs a port of its own.",
                )
