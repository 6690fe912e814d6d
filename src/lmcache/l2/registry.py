"""Adapter types by name: from JSON to a configuration, from a configuration to an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.config import unbuilt
from lmcache.errors import ConfigError
from lmcache.l2 import config as configuration
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapters import dax, fs, fs_native, mock, native_plugin, plugin, raw_block
from lmcache.l2.config import AdapterConfig
from lmcache.l2.keys import Key, nearest


def _nothing_to_check(config: AdapterConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class AdapterType:
    """`bounds_itself`: the backend has a capacity without max_capacity_gb. `check` raises ConfigError or ResourceError
    for what `open` would refuse, and gives a sentence for each thing that may not be meant so. It changes nothing and
    takes nothing that another server may hold; it may block."""

    keys: tuple[Key, ...]
    build: Callable[[AdapterConfig], Adapter]
    check: Callable[[AdapterConfig], list[str]] = _nothing_to_check
    bounds_itself: bool = False


@dataclass(frozen=True)
class ConfiguredAdapter:
    config: AdapterConfig
    adapter: Adapter


TYPES: dict[str, AdapterType] = {
    "fs": AdapterType(fs.KEYS, fs.build, fs_native.check),
    "fs_native": AdapterType(fs_native.KEYS, fs_native.build, fs_native.check),
    "raw_block": AdapterType(raw_block.KEYS, raw_block.build, raw_block.check, bounds_itself=True),
    "dax": AdapterType(dax.KEYS, dax.build, dax.check, bounds_itself=True),
    "plugin": AdapterType(plugin.KEYS, plugin.build, bounds_itself=True),
    "native_plugin": AdapterType(native_plugin.KEYS, native_plugin.build, native_plugin.check),
    "mock": AdapterType(mock.KEYS, mock.build, bounds_itself=True),
}


def parse_adapter(spec: Mapping[str, Any], index: int) -> AdapterConfig:
    """`index` counts the --l2-adapter options from 0. ConfigError: one sentence that names what to change."""
    where = f"--l2-adapter {index + 1}"
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f'{where} must be a JSON object such as {{"type": "fs_native", "base_path": "/data/lmcache"}}.'
        )
    name = spec.get("type")
    built = ", ".join(TYPES)
    if not isinstance(name, str):
        raise ConfigError(f'{where}: the key "type" is required and must be one of {built}.')
    if name in unbuilt.ADAPTERS:
        raise ConfigError(
            f'{where}: the adapter type "{name}" is not built yet ({unbuilt.ADAPTERS[name]}); built are {built}.'
        )
    if name not in TYPES:
        raise ConfigError(f'{where}: unknown adapter type "{name}"{_meant(name)}; built are {built}.')
    return configuration.parse(spec, index, TYPES[name].keys, TYPES[name].bounds_itself)


def build(config: AdapterConfig) -> ConfiguredAdapter:
    """Builds without touching the backend; that begins with `Adapter.open`."""
    return ConfiguredAdapter(config, TYPES[config.type].build(config))


def check(config: AdapterConfig) -> list[str]:
    """As `AdapterType.check`."""
    return TYPES[config.type].check(config)


def _meant(name: str) -> str:
    """ "" or a question that names the type, and what to use where that is not built."""
    meant, key = unbuilt.ADAPTER_ALIASES.get(name.lower().replace("-", "_"), ("", ""))
    if not meant:
        return nearest(name, (*TYPES, *unbuilt.ADAPTERS))
    with_key = f" with {key}" if key else ""
    not_built = f" It is not built yet: {unbuilt.ADAPTERS[meant]}" if meant in unbuilt.ADAPTERS else ""
    return f" (did you mean {meant}{with_key}?{not_built})"
