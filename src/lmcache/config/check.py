"""Combinations of options that cannot work, and those that work but deserve a word at start."""

from __future__ import annotations

import re

from lmcache.config.spec import ServerConfig
from lmcache.errors import ConfigError

_SHM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_RANDOM_SHM_NAME = re.compile(r"lmcache-[0-9a-f]{12}")  # as given where nothing names the memory


def check_combinations(config: ServerConfig) -> None:
    """Raises ConfigError with the sentence that names the options."""
    if not _SHM_NAME.fullmatch(config.shm_name):
        raise ConfigError(
            f"--shm-name must be at most 200 letters, digits, dots, dashes and underscores, beginning with a letter or "
            f"digit, got {config.shm_name!r}."
        )
    for name in ("host", "http_host"):
        host = getattr(config, name)
        if not host or "://" in host or "/" in host or any(letter.isspace() for letter in host):
            raise ConfigError(f"--{name.replace('_', '-')} must be a host name or an address, got {host!r}.")
    if config.l1_size_bytes < 2 * config.l1_align_bytes:
        raise ConfigError(
            f"--l1-size-gb {config.l1_size_gb:g} holds no object at --l1-align-bytes {config.l1_align_bytes}: "
            "give L1 more."
        )
    if config.l1_persist and not config.port and _RANDOM_SHM_NAME.fullmatch(config.shm_name):
        raise ConfigError(
            "--l1-persist with --port 0 leaves memory that no later server finds: give a --shm-name or a --port."
        )
    _check_ports(config)
    if config.l2_store_policy == "skip_l1" and not config.l2_adapter:
        raise ConfigError(
            "--l2-store-policy skip_l1 needs an --l2-adapter: without one nothing would be kept anywhere."
        )
    if config.lookup_hash_log_dir and (config.disable_logging or config.disable_observability):
        switch = "--disable-logging" if config.disable_logging else "--disable-observability"
        raise ConfigError(f"--lookup-hash-log-dir writes a log, which {switch} turns off: remove one of the two.")


def _check_ports(config: ServerConfig) -> None:
    ports = [("--port", config.port), ("--http-port", config.http_port)]
    if config.metrics_enabled:
        ports.append(("--prometheus-port", config.prometheus_port))
    for index, (name, port) in enumerate(ports):
        for other, other_port in ports[:index]:
            if port and port == other_port:
                raise ConfigError(f"{other} and {name} are both {port}: each listener needs a port of its own.")


def remarks(config: ServerConfig) -> list[str]:
    """Sentences for the log: accepted, but perhaps not what was meant."""
    found = []
    if config.max_gpu_workers != 1:
        found.append(
            f"--max-gpu-workers {config.max_gpu_workers} starts no threads: engines copy with threads of their own."
        )
    if config.eviction_policy == "noop" and config.l2_store_policy != "skip_l1":
        found.append(
            "With --eviction-policy noop and --l2-store-policy default nothing ever leaves L1: once it is full, new "
            "chunks are not cached."
        )
    isolated = config.eviction_policy == "IsolatedLRU"
    if isolated and config.l1_persist and not config.quota_file:
        found.append(
            "--l1-persist without --quota-file starts without quotas: the first one that is set drops what L1 kept of "
            "every other cache salt."
        )
    if config.quota_file and not isolated:
        found.append(f"--quota-file has no effect with --eviction-policy {config.eviction_policy}: use IsolatedLRU.")
    if config.l2_prefetch_policy == "retain" and not config.l2_adapter:
        found.append("--l2-prefetch-policy retain has nothing to retain without an --l2-adapter.")
    return found
