"""Pure decisions of the store and prefetch controllers, by name. A module adds one by registering it at import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache.core.key import ObjectKey
from lmcache.errors import ConfigError


class StorePolicy(Protocol):
    @property
    def drops_from_l1(self) -> bool:
        """Whether an object leaves L1 once every adapter that was to have it is done with it, whatever the outcome:
        what L2 cannot take must not fill L1 for ever."""
        ...

    def targets(self, key: ObjectKey, adapters: int) -> Sequence[int]:
        """Which of the adapters, numbered as configured, are to have the object."""
        ...


class PrefetchPolicy(Protocol):
    @property
    def retains(self) -> bool:
        """Whether what was loaded stays in L1 after its use. False: it leaves with its last lease."""
        ...

    def order(self, adapters: int) -> Sequence[int]:
        """In which order the adapters are asked. The first one that has an object loads it; the later ones are asked
        for what it could not give."""
        ...


class StoreToAll:
    drops_from_l1 = False

    def targets(self, key: ObjectKey, adapters: int) -> Sequence[int]:
        return range(adapters)


class SkipL1(StoreToAll):
    drops_from_l1 = True


class LoadAsConfigured:
    retains = False

    def order(self, adapters: int) -> Sequence[int]:
        return range(adapters)


class Retain(LoadAsConfigured):
    retains = True


_store: dict[str, type[StorePolicy]] = {"default": StoreToAll, "skip_l1": SkipL1}
_prefetch: dict[str, type[PrefetchPolicy]] = {"default": LoadAsConfigured, "retain": Retain}


def register_store_policy(name: str, policy: type[StorePolicy]) -> None:
    """Built without arguments when `--l2-store-policy` names it. ConfigError if another class has the name."""
    if _store.setdefault(name, policy) is not policy:
        raise ConfigError(f"The store policy {name!r} is registered already.")


def register_prefetch_policy(name: str, policy: type[PrefetchPolicy]) -> None:
    """Built without arguments when `--l2-prefetch-policy` names it. ConfigError if another class has the name."""
    if _prefetch.setdefault(name, policy) is not policy:
        raise ConfigError(f"The prefetch policy {name!r} is registered already.")


def store_policy(name: str) -> StorePolicy:
    if name not in _store:
        raise ConfigError(f"--l2-store-policy must be one of {', '.join(_store)}; got {name!r}.")
    return _store[name]()


def prefetch_policy(name: str) -> PrefetchPolicy:
    if name not in _prefetch:
        raise ConfigError(f"--l2-prefetch-policy must be one of {', '.join(_prefetch)}; got {name!r}.")
    return _prefetch[name]()
