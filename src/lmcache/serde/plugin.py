"""`plugin`: a serde that somebody else wrote (docs/how-to/write-a-serde.md)."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Collection
from functools import lru_cache
from typing import Annotated, Any

from msgspec import Meta

from lmcache import _native
from lmcache.clock import Clock
from lmcache.core.key import MAX_SERDE_NAME_CHARACTERS, SERDE_NAME, Namespace, ObjectKey
from lmcache.environment import SYSTEM
from lmcache.errors import ConfigError, LMCacheError
from lmcache.serde.base import Serde, SerdeConfig, Stage
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.serde")

GUIDE = "docs/how-to/write-a-serde.md"
METHODS = ("max_encoded_bytes", "encode", "decode")
_FAULT_INTERVAL_SECONDS = 60.0


class PluginSerdeConfig(SerdeConfig, frozen=True, kw_only=True):
    """A serde of your own in Python, as docs/how-to/write-a-serde.md describes."""

    factory: Annotated[
        str,
        Meta(
            pattern="^[^:]+:[^:]+$",
            description="what makes it: a function or a class in a module that Python finds",
            extra={"expected": "a string such as package.module:factory"},
        ),
    ]
    params: Annotated[dict[str, Any], Meta(description="keyword arguments of the factory")] = {}


class GuardedSerde:
    """Takes what the native core passes, and says what goes wrong in code from outside."""

    def __init__(self, inner: Serde, clock: Clock = SYSTEM.clock) -> None:
        self._inner = inner
        self._log_limiter = LogLimiter(_FAULT_INTERVAL_SECONDS, clock)

    def max_encoded_bytes(self, source_bytes: int) -> int:
        """Below 0 where it failed."""
        try:
            return int(self._inner.max_encoded_bytes(source_bytes))
        except Exception:  # code from outside may raise anything
            self._say("max_encoded_bytes")
            return -1

    def encode(self, source: memoryview, destination: memoryview, namespace: bytes, chunk_hash: bytes) -> int | None:
        """Below 0 where it failed. The object is not stored then: as it is might be what the serde is to prevent."""
        try:
            size_bytes = self._inner.encode(source, destination, _key(namespace, chunk_hash))
        except Exception:  # code from outside may raise anything
            self._say("encode")
            return -1
        if size_bytes is None or (isinstance(size_bytes, int) and 0 <= size_bytes <= destination.nbytes):
            return size_bytes
        self._say(f"encode returned {size_bytes!r:.80}")
        return -1

    def decode(self, source: memoryview, destination: memoryview, namespace: bytes, chunk_hash: bytes) -> bool | None:
        """False: the source is not what `encode` wrote. None: it failed, for whatever reason of its own; the object may
        be well, and stays."""
        try:
            self._inner.decode(source, destination, _key(namespace, chunk_hash))
        except ValueError:
            return False
        except Exception:  # code from outside may raise anything
            self._say("decode")
            return None
        return True

    def kept(self) -> None:
        """A call ended, and something still has a view of the memory that was lent to it."""
        self._say("source or destination, or a part of one, was kept after the call")

    def _say(self, action: str) -> None:
        if self._log_limiter.due(action.partition(" ")[0]):
            log.warning("The serde %s failed: %s", self._inner.name, action, exc_info=sys.exc_info()[1])


@lru_cache(maxsize=256)
def _namespace(encoded: bytes) -> Namespace:
    return Namespace.decode(encoded)


def _key(namespace: bytes, chunk_hash: bytes) -> ObjectKey:
    return ObjectKey(_namespace(namespace), chunk_hash)


def build_plugin(config: PluginSerdeConfig, where: str, reserved: Collection[str] = ()) -> Stage:
    """`reserved`: names of other types. Objects are told apart by these names: what another server made of its objects
    by such a type would be found corrupt, and moved aside."""
    serde = _made(config, where)
    if missing := [name for name in METHODS if not callable(getattr(serde, name, None))]:
        raise ConfigError(f"{where}: what {config.factory} makes lacks {', '.join(missing)}; see {GUIDE}.")
    name = getattr(serde, "name", None)
    if not isinstance(name, str) or not SERDE_NAME.fullmatch(name):
        raise ConfigError(
            f'{where}: what {config.factory} makes has the "name" {name!r}, which must be up to '
            f"{MAX_SERDE_NAME_CHARACTERS} lower-case letters, digits, dots, dashes and underscores."
        )
    if name in reserved:
        raise ConfigError(
            f'{where}: what {config.factory} makes has the "name" {name!r}, which is that of another serde type; '
            "choose one of its own."
        )
    return Stage(name, _native.python_stage(GuardedSerde(serde), bool(getattr(serde, "lossy", False))))


def _made(config: PluginSerdeConfig, where: str) -> Serde:
    module_name, _, factory_name = config.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        made: Serde = factory(**config.params)
    except LMCacheError:
        raise
    except Exception as error:  # code from outside may raise anything
        raise ConfigError(
            f'{where}: "factory" {config.factory!r} with the keys {", ".join(config.params) or "(none)"} gave no serde '
            f"({type(error).__name__}: {error}); it must be a callable in a module that Python finds."
        ) from error
    return made
