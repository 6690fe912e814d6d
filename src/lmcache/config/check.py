"""Combinations of options that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmcache.config.spec import ServerConfig, flag
from lmcache.core.address import INSTANCE_ID_PATTERN, http_listening_host, listening_host, socket_path
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
    for switch in ("disable_logging", "disable_observability"):
        if config.lookup_hash_log_dir and getattr(config, switch):
            yield (
                {"lookup_hash_log_dir", switch},
                f"--lookup-hash-log-dir writes a log, which {flag(switch)} turns off: remove one of the two.",
            )


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
