"""What comes before a server takes anything: its options are read, and all that can be known to fail is refused.

`lmcache server` and `lmcache config check` both begin here, so that they cannot differ. What remains for the start is
what depends on who else runs at that moment: ports, locks, and the memory and disk space that others leave.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcache.admin.access import read_token
from lmcache.config.load import Loaded, draft
from lmcache.config.notes import notes
from lmcache.config.spec import ServerConfig
from lmcache.core.address import http_listening_host
from lmcache.core.problems import Problems
from lmcache.l1.quota_file import QuotaFile
from lmcache.l2 import registry
from lmcache.l2.background import in_thread
from lmcache.l2.config import AdapterConfig
from lmcache.l2.registry import ConfiguredAdapter
from lmcache.memory import shared_memory
from lmcache.telemetry import lookup_log
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
    notes: Sequence[str]  # sentences for the operator: accepted, but perhaps not what was meant

    @property
    def config(self) -> ServerConfig:
        return self.loaded.config

    def discard(self) -> None:
        """For a plan that is not carried out."""
        asyncio.run(_close(self.adapters))


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Loaded, list[AdapterConfig]]:
    """The options alone, those of adapters too. ConfigError tells all that is wrong, a sentence each."""
    problems = Problems()
    loaded = draft(argv, environ, problems)
    configs = _adapter_configs(loaded.config, problems)
    problems.raise_all()
    return loaded, configs


def plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """ConfigError or ResourceError tells all that is wrong, a sentence each. The machine is looked at once the options
    themselves are in order."""
    loaded, configs = read(argv, environ)
    problems = Problems()
    _check_machine(loaded.config, problems)
    store_policy, prefetch_policy = _policies(loaded.config, problems)
    adapters: list[ConfiguredAdapter] = []
    found: list[str] = []
    for config in configs:
        with problems.collect():
            adapters.append(registry.build(config))
            found += config.notes() + asyncio.run(_check_backend(config))
    if problems.found:
        asyncio.run(_close(adapters))
    problems.raise_all()
    assert store_policy is not None and prefetch_policy is not None
    told = notes(
        loaded,
        environ,
        verifies_loads=any(_leaves_verifying(loaded.config, configured) for configured in adapters),
        drops_from_l1=bool(adapters) and store_policy.drops_from_l1,
    )
    return Plan(loaded, adapters, store_policy, prefetch_policy, told + _shared_folders(configs) + found)


def _leaves_verifying(config: ServerConfig, configured: ConfiguredAdapter) -> bool:
    """Whether threads of the server verify what it loads, or what it stores out of an adopted L1."""
    return config.l1_persist or not getattr(configured.adapter, "verifies", False)


def _shared_folders(configs: Sequence[AdapterConfig]) -> list[str]:
    """Servers may share a folder; two adapters of a server gain nothing by it."""
    found: list[str] = []
    folders: dict[str, AdapterConfig] = {}
    for adapter in configs:
        if "base_path" in adapter.settings:
            path = os.path.realpath(adapter.settings["base_path"])
            if (other := folders.setdefault(path, adapter)) is not adapter:
                found.append(
                    f'{adapter.where}: "base_path" {path} is that of {other.where}: both write the same files; give '
                    "each a folder of its own."
                )
    return found


def _policies(config: ServerConfig, problems: Problems) -> tuple[StorePolicy | None, PrefetchPolicy | None]:
    """None where there is a problem."""
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
        if spec:  # else it was refused as a whole
            with problems.collect():
                configs.append(registry.parse_adapter(spec, index))
    devices: dict[str, AdapterConfig] = {}
    for adapter in configs:
        path = os.path.realpath(adapter.settings.get("device_path", ""))
        if "device_path" in adapter.settings and (other := devices.setdefault(path, adapter)) is not adapter:
            problems.add(
                f'{adapter.where}: "device_path" {path} is that of {other.where}; give each a device of its own.'
            )
    return configs


def _check_machine(config: ServerConfig, problems: Problems) -> None:
    with problems.collect():
        listening.refuse_unusable_for_engines(config.host, config.port)
    with problems.collect():
        listening.refuse_unusable(http_listening_host(config.http_host), config.http_port, "--http-host")
    with problems.collect():
        read_token(config.admin_token_file)
    with problems.collect():
        shared_memory.refuse_unusable(config.shm_name, config.l1_size_bytes, hugepages=config.l1_use_hugepages)
    if config.quota_file:
        with problems.collect():
            QuotaFile(config.quota_file).read()
    if config.lookup_hash_log_dir:
        with problems.collect():
            lookup_log.refuse_unusable(config.lookup_hash_log_dir)


async def _check_backend(config: AdapterConfig) -> list[str]:
    """A dead mount holds up a thread, not the process."""
    try:
        return await asyncio.wait_for(in_thread("l2-check", registry.check, config), config.timeout_seconds)
    except asyncio.TimeoutError:
        raise config.silent() from None


async def _close(adapters: Sequence[ConfiguredAdapter]) -> None:
    """What a plugin began when it was made must not hold up the end of the process."""
    for configured in adapters:
        try:
            await asyncio.wait_for(configured.adapter.close(), configured.config.timeout_seconds)
        except Exception as error:  # code from outside may raise anything; nothing was opened, so nothing is lost
            log.log(level_of(error), "%s: closing failed before it was opened", configured.config.name, exc_info=True)
