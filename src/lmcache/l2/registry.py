"""Adapter types by name: from JSON to a configuration, from a configuration to an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.errors import ConfigError
from lmcache.l2 import config as configuration
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapters import dax, fs, fs_native, mock, native_plugin, plugin, raw_block
from lmcache.l2.config import AdapterConfig
from lmcache.l2.keys import Key, nearest

NOT_BUILT = (
    "nixl_store",
    "nixl_store_dynamic",
    "mooncake_store",
    "s3",
    "resp",
)


@dataclass(frozen=True)
class AdapterType:
    """`bounds_itself`: the backend has a capacity without max_capacity_gb."""

    keys: tuple[Key, ...]
    build: Callable[[AdapterConfig], Adapter]
    bounds_itself: bool = False


@dataclass(frozen=True)
class ConfiguredAdapter:
    config: AdapterConfig
    adapter: Adapter


TYPES: dict[str, AdapterType] = {
    "fs": AdapterType(fs.KEYS, fs.build),
    "fs_native": AdapterType(fs_native.KEYS, fs_native.build),
    "raw_block": AdapterType(raw_block.KEYS, raw_block.build, bounds_itself=True),
    "dax": AdapterType(dax.KEYS, dax.build, bounds_itself=True),
    "plugin": AdapterType(plugin.KEYS, plugin.build, bounds_itself=True),
    "native_plugin": AdapterType(native_plugin.KEYS, native_plugin.build),
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
    if name in NOT_BUILT:
        raise ConfigError(f'{where}: the adapter type "{name}" is not built yet; built are {built}.')
    if name not in TYPES:
        raise ConfigError(f'{where}: unknown adapter type "{name}"{nearest(name, tuple(TYPES))}; built are {built}.')
    return configuration.parse(spec, index, TYPES[name].keys, TYPES[name].bounds_itself)


def build(config: AdapterConfig) -> ConfiguredAdapter:
    """Builds without touching the backend; that begins with `Adapter.open`."""
    return ConfiguredAdapter(config, TYPES[config.type].build(config))
