"""Serde types by name: from JSON to settings, from settings to a chain.

Lossy types are registered like the others. What they serve is not what was stored, so it belongs to namespaces of its
own: l2/runner.py keeps a lossy chain and the namespaces that do not ask for it apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from lmcache.config import struct_settings, unbuilt
from lmcache.config.values import suggestion
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.serde.aesgcm import AesGcmConfig, build_aesgcm
from lmcache.serde.base import MAX_STAGES, Chain, SerdeConfig, Stage
from lmcache.serde.lossless import ExponentConfig, ZstdConfig, build_exponent, build_zstd
from lmcache.serde.lossy import CACHEGEN_NAMES, FP8_NAMES, CachegenConfig, Fp8Config, build_cachegen, build_fp8
from lmcache.serde.plugin import PluginSerdeConfig, build_plugin

C = TypeVar("C", bound=SerdeConfig)

# As in the key "serde" of an adapter.
SerdeSpec: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SerdeType(Generic[C]):
    """`build` raises ConfigError or ResourceError with a sentence that begins with its second argument."""

    config: type[C]
    build: Callable[[C, str], Stage]


_NATIVE_NAMES = ("zstd", "exponent", "aesgcm", *FP8_NAMES.values(), *CACHEGEN_NAMES.values())
TYPES: dict[str, SerdeType[Any]] = {
    "zstd": SerdeType(ZstdConfig, build_zstd),
    "exponent": SerdeType(ExponentConfig, build_exponent),
    "aesgcm": SerdeType(AesGcmConfig, build_aesgcm),
    "fp8": SerdeType(Fp8Config, build_fp8),
    "cachegen": SerdeType(CachegenConfig, build_cachegen),
    "plugin": SerdeType(PluginSerdeConfig, partial(build_plugin, reserved=(*_NATIVE_NAMES, *unbuilt.SERDES))),
}


def parse(spec: SerdeSpec, where: str) -> list[SerdeConfig]:
    """ConfigError tells all that is wrong, a sentence each, beginning with `where`."""
    given = [spec] if isinstance(spec, Mapping) else list(spec)
    if not 1 <= len(given) <= MAX_STAGES:
        raise ConfigError(
            f'{where}: "serde" must have 1 to {MAX_STAGES} types; leave the key out to store KV as it is.'
        )
    problems = Problems()
    configs: list[SerdeConfig] = []
    for item in given:
        with problems.collect():
            configs.append(_parse_type(item, where))
    problems.raise_all()
    return configs


def _parse_type(item: Mapping[str, Any], where: str) -> SerdeConfig:
    name, built = item.get("type"), ", ".join(TYPES)
    if not isinstance(name, str):
        raise ConfigError(f'{where}, "serde": the key "type" is required and must be one of {built}.')
    if name in unbuilt.SERDES:
        raise ConfigError(
            f'{where}: the serde type "{name}" is not built yet ({unbuilt.SERDES[name]}); built are {built}.'
        )
    if name not in TYPES:
        raise ConfigError(f'{where}: unknown serde type "{name}"{suggestion(name, tuple(TYPES))}; built are {built}.')
    config: SerdeConfig = struct_settings.read(item, TYPES[name].config, f'{where}, "serde" ({name})')
    return config


def build(spec: SerdeSpec, where: str) -> Chain:
    """ConfigError or ResourceError."""
    return Chain([TYPES[config.type].build(config, where) for config in parse(spec, where)], where)
