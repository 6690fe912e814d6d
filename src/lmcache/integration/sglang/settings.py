"""What `--hicache-storage-backend-extra-config` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.core.limits import MAX_NAME_BYTES
from lmcache.errors import ConfigError
from lmcache.integration.engine.connection_settings import ConnectionSettings, read_connection, warn_of_unknown_keys

_SALT = "lmcache.mp.cache_salt"
_WEIGHTS = "lmcache.mp.weights_id"


@dataclass(frozen=True)
class HiCacheSettings(ConnectionSettings):
    """The keys `lmcache.*` of the extra config, checked. docs/how-to/connect_sglang.md lists them.

    `cache_salt`: of all pages of this engine. `weights_id`: names the weights where they cannot be read from a folder;
    "" where they are."""

    cache_salt: str = ""
    weights_id: str = ""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> HiCacheSettings:
        """ConfigError names the key and what it may be."""
        warn_of_unknown_keys(extra, "hicache-storage-backend-extra-config", (_SALT, _WEIGHTS))
        return cls(**read_connection(extra), cache_salt=_name(extra, _SALT), weights_id=_name(extra, _WEIGHTS))


def _name(extra: Mapping[str, Any], key: str) -> str:
    name = extra.get(key, "")
    if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(f"{key} is {name!r}; it must be text of at most {MAX_NAME_BYTES} bytes.")
    return name
