"""Adapter types by name: from JSON to a configuration, from a configuration to an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lmcache.config import struct_settings, unbuilt
from lmcache.config.values import suggestion
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.l2.adapter import Adapter
from lmcache.l2.adapter_config import INTERNAL, AdapterConfig
from lmcache.l2.adapters import (
    dax,
    fs_native,
    mock,
    mooncake,
    native_plugin,
    nixl_dynamic,
    nixl_store,
    plugin,
    raw_config,
    resp_servers,
    s3,
)
from lmcache.l2.adapters.folder_config import FsConfig, FsNativeConfig
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.l2.adapters.nixl_config import NixlDynamicConfig, NixlStoreConfig
from lmcache.l2.adapters.raw_block import RawBlockAdapter
from lmcache.l2.adapters.resp import RespAdapter
from lmcache.l2.adapters.resp_config import RespConfig
from lmcache.l2.adapters.s3_config import S3Config
from lmcache.serde.base import Chain

C = TypeVar("C", bound=AdapterConfig)


def _nothing_to_check(config: AdapterConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class AdapterType(Generic[C]):
    """`check` refuses what `open` would refuse, and gives a sentence for each thing that may not be meant so. It
    leaves nothing behind and takes nothing that another server may hold; it may block.

    Both raise ConfigError where a key cannot work with what is at its path (another kind of thing, too small, not
    aligned), and ResourceError for what the machine refuses: a path that does not exist, no permission, no space, in
    use, or content of somebody else."""

    config: type[C]
    build: Callable[[C], Adapter]
    check: Callable[[C], list[str]] = _nothing_to_check


@dataclass(frozen=True)
class ConfiguredAdapter:
    config: AdapterConfig
    adapter: Adapter
    serde: Chain | None = None


TYPES: dict[str, AdapterType[Any]] = {
    "fs": AdapterType(FsConfig, fs_native.FsNativeAdapter, fs_native.check),
    "fs_native": AdapterType(FsNativeConfig, fs_native.FsNativeAdapter, fs_native.check),
    "raw_block": AdapterType(raw_config.RawBlockConfig, RawBlockAdapter, raw_config.check),
    "dax": AdapterType(dax.DaxConfig, dax.DaxAdapter, dax.check),
    "mooncake_store": AdapterType(MooncakeConfig, mooncake.MooncakeAdapter, mooncake.check),
    "nixl_store": AdapterType(NixlStoreConfig, nixl_store.NixlStoreAdapter, nixl_store.check),
    "nixl_store_dynamic": AdapterType(NixlDynamicConfig, nixl_dynamic.NixlDynamicAdapter, nixl_dynamic.check),
    "resp": AdapterType(RespConfig, RespAdapter, resp_servers.check),
    "s3": AdapterType(S3Config, s3.S3Adapter, s3.check),
    "plugin": AdapterType(plugin.PluginConfig, plugin.build),
    "native_plugin": AdapterType(
        native_plugin.NativePluginConfig, native_plugin.NativePluginAdapter, native_plugin.check
    ),
    "mock": AdapterType(mock.MockConfig, mock.build),
}


def parse_adapter(spec: Mapping[str, Any], index: int) -> AdapterConfig:
    """`index` counts the --l2-adapter options from 0. ConfigError tells all that is wrong, a sentence each."""
    where = f"--l2-adapter {index + 1}"
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f'{where} must be a JSON object such as {{"type": "fs_native", "base_path": "/data/lmcache"}}.'
        )
    name = struct_settings.built_type(spec, tuple(TYPES), unbuilt.ADAPTERS, "adapter", where, meant=_meant)
    where = f"{where} ({name})"
    problems = Problems()
    with problems.collect():
        struct_settings.refuse_nul(spec, where)
    with problems.collect():
        kind = TYPES[name].config
        own, forwarded = _split(spec, kind) if kind.forwards_other_keys else (spec, {})
        config: AdapterConfig = struct_settings.read(own, kind, where, index=index, forwarded=forwarded)
    problems.raise_all()
    return config


def _split(spec: Mapping[str, Any], kind: type[AdapterConfig]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that a type declares, and all others."""
    own = {key.name for key in struct_settings.keys_of(kind, INTERNAL)}
    return (
        {name: value for name, value in spec.items() if name in own},
        {name: value for name, value in spec.items() if name not in own},
    )


def build(config: AdapterConfig) -> ConfiguredAdapter:
    """Builds without touching the backend; that begins with `Adapter.open`."""
    return ConfiguredAdapter(config, TYPES[config.type].build(config), _serde(config))


def _serde(config: AdapterConfig) -> Chain | None:
    return config.serde.build(config.where) if config.serde is not None else None


def check(config: AdapterConfig) -> list[str]:
    """What `AdapterType.check` of its type says, and a sentence for each key that has no effect."""
    chain = _serde(config)
    found = [*TYPES[config.type].check(config), *config.notes()]
    if chain is not None and chain.lossy:
        found.append(
            f'{config.where}: the serde "{chain.lossy}" is lossy, so this adapter keeps KV only of engines that accept '
            f'it, by "lmcache.mp.lossy_serde": "{chain.lossy}" in their kv_connector_extra_config.'
        )
    return found


def _meant(name: str, built: Sequence[str]) -> str:
    """ "" or a question that names the type, and what to use where that is not built."""
    meant, key = unbuilt.ADAPTER_ALIASES.get(name.lower().replace("-", "_"), ("", ""))
    if not meant:
        return suggestion(name, (*built, *unbuilt.ADAPTERS))
    with_key = f" with {key}" if key else ""
    not_built = f" It is not built yet: {unbuilt.ADAPTERS[meant]}" if meant in unbuilt.ADAPTERS else ""
    return f" (did you mean {meant}{with_key}?{not_built})"
