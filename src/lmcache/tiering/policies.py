"""Pure decisions of the store and prefetch controllers, by name. docs/how-to/write-a-policy.md is a guide to one.

Rules: a policy is made without arguments and kept until the server ends. Its methods are called on the storage loop,
for many objects at a time, and return at once: no I/O, no waiting. What they return is checked (checked_policies.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache.core.key import Namespace, ObjectKey
from lmcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What a policy may know of an adapter; its index is its position among the --l2-adapter options, from 0. Behind
    them a prefetch policy finds the peers of this server (type "p2p"), where it has any."""

    name: str  # as in logs and metrics: "fs_native_0"
    type: str
    capacity_bytes: int | None  # of max_capacity_gb


class StorePolicy(Protocol):
    """Which adapters get a new object, and whether it leaves L1 then.

    Shapes and units: one sequence of adapter indices, counted from 0, for each key. `drops_from_l1` is read once.

    Errors: none are expected. A policy that raises, or names an adapter that is not there, is counted, logged once, and
    the default decides.

    Example:

    >>> from lmcache.core.key import Namespace, ObjectKey
    >>> from lmcache.tiering.policies import AdapterInfo
    >>> class PrivateStaysHere:
    ...     drops_from_l1 = False
    ...     def targets(self, keys, adapters):
    ...         return [() if key.namespace.cache_salt == "private" else range(len(adapters)) for key in keys]
    >>> disk = AdapterInfo("fs_0", "fs", capacity_bytes=None)
    >>> salts = "public", "private"
    >>> keys = [ObjectKey(Namespace("model", 1, 0, 0, "00" * 16, salt), bytes(32)) for salt in salts]
    >>> PrivateStaysHere().targets(keys, [disk])
    [range(0, 1), ()]
    """

    @property
    def drops_from_l1(self) -> bool:
        """Whether an object leaves L1 once every adapter that was to have it has dealt with it and one of them took it.
        What none of them took stays in L1 while there is room, and is offered again."""
        ...

    def targets(self, keys: Sequence[ObjectKey], adapters: Sequence[AdapterInfo]) -> Sequence[Sequence[int]]:
        """For each key the indices of the adapters that are to have the object. Without any it stays in L1 only.
        Objects of one commit are asked about together, in prefix order."""
        ...


class PrefetchPolicy(Protocol):
    """In which order adapters are asked for what L1 lacks, and whether what they gave stays in L1.

    Shapes and units: adapter indices, counted from 0, for all namespaces together. `retains` is read once.

    Errors: as for a StorePolicy.

    Example:

    >>> from lmcache.tiering.policies import AdapterInfo
    >>> class SmallestFirst:
    ...     retains = True
    ...     def order(self, namespaces, adapters):
    ...         return sorted(range(len(adapters)), key=lambda index: adapters[index].capacity_bytes or 1 << 60)
    >>> adapters = [AdapterInfo("fs_0", "fs", None), AdapterInfo("dax_1", "dax", 1 << 30)]
    >>> SmallestFirst().order([], adapters)
    [1, 0]
    """

    @property
    def retains(self) -> bool:
        """Whether what was loaded stays in L1 after its use. False: it leaves with its last lease."""
        ...

    def order(self, namespaces: Sequence[Namespace], adapters: Sequence[AdapterInfo]) -> Sequence[int]:
        """In which order the adapters are asked for what a request lacks in these namespaces, one per rank and object
        group. The first one that has an object loads it; the later ones are asked for what it could not give. An
        adapter that is left out is not asked."""
        ...


class StoreToAll:
    drops_from_l1 = False

    def targets(self, keys: Sequence[ObjectKey], adapters: Sequence[AdapterInfo]) -> Sequence[Sequence[int]]:
        return [range(len(adapters))] * len(keys)


class SkipL1(StoreToAll):
    drops_from_l1 = True


class LoadAsConfigured:
    retains = False

    def order(self, namespaces: Sequence[Namespace], adapters: Sequence[AdapterInfo]) -> Sequence[int]:
        return range(len(adapters))


class Retain(LoadAsConfigured):
    retains = True


STORE_POLICIES: dict[str, type[StorePolicy]] = {"default": StoreToAll, "skip_l1": SkipL1}
PREFETCH_POLICIES: dict[str, type[PrefetchPolicy]] = {"default": LoadAsConfigured, "retain": Retain}


def register_store_policy(name: str, policy: type[StorePolicy]) -> None:
    """To be called by a module when it is imported; `--l2-store-policy MODULE:NAME` imports it and takes the class.
    ConfigError if another class has the name."""
    if STORE_POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"The store policy {name!r} is registered already.")


def register_prefetch_policy(name: str, policy: type[PrefetchPolicy]) -> None:
    """Registers like `register_store_policy`, for `--l2-prefetch-policy`."""
    if PREFETCH_POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"The prefetch policy {name!r} is registered already.")
