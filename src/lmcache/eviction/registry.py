"""Policies by the name that configurations use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from lmcache.errors import ConfigError
from lmcache.eviction.base import EvictionPolicy
from lmcache.eviction.isolated_lru import IsolatedLRU
from lmcache.eviction.limits import SaltLimits
from lmcache.eviction.lru import LRU
from lmcache.eviction.noop import Noop
from lmcache.eviction.s3fifo import S3FIFO

K = TypeVar("K", bound=Hashable)

POLICIES = ("LRU", "IsolatedLRU", "S3FIFO", "noop")


def build_policy(name: str, salt_of: Callable[[K], str], limits: SaltLimits) -> EvictionPolicy[K]:
    """`salt_of` and `limits` are for IsolatedLRU. ConfigError names the allowed policies."""
    if name == "LRU":
        return LRU()
    if name == "IsolatedLRU":
        return IsolatedLRU(salt_of, limits)
    if name == "S3FIFO":
        return S3FIFO()
    if name == "noop":
        return Noop()
    raise ConfigError(f"eviction_policy must be one of {', '.join(POLICIES)}; got {name!r}.")
