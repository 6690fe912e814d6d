"""The configuration that all adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.core.limits import GIB, L2_DEFAULT_TIMEOUT_SECONDS
from lmcache.errors import ConfigError, ResourceError
from lmcache.eviction.registry import POLICIES
from lmcache.l2.keys import Key, choice, number, read, switch, text

MAX_GB = 1 << 30


@dataclass(frozen=True)
class EvictionConfig:
    eviction_policy: str
    trigger_watermark: float = 0.8
    eviction_ratio: float = 0.2


@dataclass(frozen=True)
class AdapterConfig:
    """`settings` are the keys of the type itself, checked and complete. `capacity_bytes` None: not bounded."""

    type: str
    index: int  # position among the --l2-adapter options
    settings: Mapping[str, Any]
    capacity_bytes: int | None = None
    eviction: EvictionConfig | None = None
    persist: bool = True
    timeout_seconds: float = L2_DEFAULT_TIMEOUT_SECONDS

    @property
    def name(self) -> str:
        """As in logs, metrics (`l2_name`) and status."""
        return f"{self.type}_{self.index}"

    @property
    def where(self) -> str:
        return f"--l2-adapter {self.index + 1} ({self.type})"

    def silent(self) -> ResourceError:
        """For a backend that does not answer in time."""
        return ResourceError(
            f"{self.where}: the backend did not answer within {self.timeout_seconds:g} s; "
            "see whether it is up, or raise timeout_seconds."
        )

    def notes(self) -> list[str]:
        """Sentences about keys of all types that are accepted and have no effect."""
        eviction = self.eviction
        if eviction is None or eviction.eviction_policy != "noop":
            return []
        return [
            f'{self.where}: "{name}" has no effect under "eviction_policy" "noop", which evicts nothing.'
            for name in ("trigger_watermark", "eviction_ratio")
            if getattr(eviction, name) != getattr(EvictionConfig, name)
        ]


def _eviction(where: str, spec: object) -> EvictionConfig:
    if not isinstance(spec, dict):
        raise ConfigError(f'{where}: "eviction" must be an object with the key "eviction_policy".')
    values = read(
        spec,
        (
            Key("eviction_policy", choice(POLICIES)),
            Key("trigger_watermark", number(0, 1, above=True), 0.8),
            Key("eviction_ratio", number(0, 1, above=True), 0.2),
        ),
        f'{where}, "eviction"',
    )
    return EvictionConfig(**values)


def parse(spec: Mapping[str, Any], index: int, keys: tuple[Key, ...], bounds_itself: bool = False) -> AdapterConfig:
    """`keys` are those of the type; the common ones are added here. `bounds_itself`: the backend has a limit anyway."""
    where = f"--l2-adapter {index + 1} ({spec['type']})"
    common = (
        Key("type", text),
        Key("eviction", lambda value: _eviction(where, value), None),
        Key("persist_enabled", switch, True),
        Key("timeout_seconds", number(0, 86400, above=True), L2_DEFAULT_TIMEOUT_SECONDS),
        Key("max_capacity_gb", number(0, MAX_GB), 0.0),
    )
    values = read(spec, keys + common, where)
    capacity_gb = values["max_capacity_gb"] or values.get("max_size_gb", 0.0)
    if "max_size_gb" in values:
        capacity_gb = min(capacity_gb, values["max_size_gb"])
    eviction = values["eviction"]
    if eviction is not None and not capacity_gb and not bounds_itself:
        raise ConfigError(f'{where}: "eviction" needs "max_capacity_gb" above 0: it is a fraction of that.')
    return AdapterConfig(
        type=spec["type"],
        index=index,
        settings={key.name: values[key.name] for key in keys},
        capacity_bytes=int(capacity_gb * GIB) or None,
        eviction=eviction,
        persist=values["persist_enabled"],
        timeout_seconds=values["timeout_seconds"],
    )
