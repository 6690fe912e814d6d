"""Policies by the name that configurations use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from lmcache.errors import ConfigError
from lmcache.eviction.base import EvictionPolicy
from lmcache.eviction.lru import LRU
from lmcache.eviction.noop import Noop

K = TypeVar("K", bound=Hashable)

POLICIES = ("LRU", "noop")


def build_policy(name: str) -> EvictionPolicy[K]:
    """ConfigError names the allowed policies."""
    if name == "LRU":
        return LRU()
    if name == "noop":
        return Noop()
    raise ConfigError(f"eviction_policy must be one of {', '.join(POLICIES)}; got {name!r}.")
