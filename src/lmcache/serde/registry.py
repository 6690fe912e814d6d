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
from lmcache.config.redact import shown
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


class SerdeChainConfig:
    """The key "serde" of an adapter: what was given, and the stages that it means, in the order of storing."""

    def __init__(self, given: SerdeSpec, stages: Sequence[SerdeConfig]) -> None:
        self.given = given
        self.stages = tuple(stages)

    @classmethod
    def read(cls, given: Any, where: str) -> SerdeChainConfig:
        """ConfigError tells all that is wrong, a sentence each, beginning with `where`. ValueError: neither an object
        nor a list of objects."""
        items = given if isinstance(given, list) else [given]
        if not all(isinstance(item, Mapping) for item in items):
            raise ValueError("neither an object nor a list of objects")
        if not 1 <= len(items) <= MAX_STAGES:
            raise ConfigError(
                f'{where}: "serde" must have 1 to {MAX_STAGES} types; leave the key out to store KV as it is.'
            )
        problems = Problems()
        stages: list[SerdeConfig] = []
        for item in items:
            with problems.collect():
                name = struct_settings.built_type(item, tuple(TYPES), unbuilt.SERDES, "serde", where, key="serde")
                stages.append(struct_settings.read(item, TYPES[name].config, f'{where}, "serde" ({name})'))
        problems.raise_all()
        return cls(given, stages)

    def build(self, where: str) -> Chain:
        """ConfigError or ResourceError."""
        return Chain([TYPES[stage.type].build(stage, where) for stage in self.stages], where)

    def __repr__(self) -> str:
        """Without what grants access: configurations get into tracebacks and logs."""
        return repr(shown(self.given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SerdeChainConfig) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(len(self.stages))
