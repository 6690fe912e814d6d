"""From the value of --l2-store-policy or --l2-prefetch-policy to a policy: one of this package, one that an installed
package names by an entry point, or `MODULE:NAME`, where NAME is a class in the module or what the module registered."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from types import ModuleType
from typing import Any, cast

from lmcache.config.spec import PREFETCH_POLICY_ENTRY_POINTS, STORE_POLICY_ENTRY_POINTS
from lmcache.config.values import suggestion
from lmcache.errors import ConfigError
from lmcache.l2.adapters.plugin_loader import import_module
from lmcache.tiering.policies import PREFETCH_POLICIES, STORE_POLICIES, PrefetchPolicy, StorePolicy

GUIDE = "docs/how-to/write-a-policy.md"


def select_store_policy(value: str) -> StorePolicy:
    """ConfigError: one sentence that names the flag."""
    flag = "--l2-store-policy"
    policy = _make(flag, value, _find(flag, value, STORE_POLICIES, STORE_POLICY_ENTRY_POINTS))
    _check_shape(flag, policy, "drops_from_l1", "targets")
    return cast(StorePolicy, policy)


def select_prefetch_policy(value: str) -> PrefetchPolicy:
    """ConfigError: one sentence that names the flag."""
    flag = "--l2-prefetch-policy"
    policy = _make(flag, value, _find(flag, value, PREFETCH_POLICIES, PREFETCH_POLICY_ENTRY_POINTS))
    _check_shape(flag, policy, "retains", "order")
    return cast(PrefetchPolicy, policy)


def _find(flag: str, value: str, registered: Mapping[str, type], group: str) -> object:
    if value in registered:
        return registered[value]
    module_name, colon, name = value.rpartition(":")
    if colon:
        return _in_module(flag, import_module(f"{flag}: the module", module_name), name, registered)
    for entry_point in metadata.entry_points(group=group):
        if entry_point.name == value:
            try:
                found = entry_point.load()
            except Exception as error:  # code from outside may raise anything while it is imported
                raise ConfigError(
                    f"{flag} {value}: the entry point {entry_point.value} of {group} cannot be loaded "
                    f"({type(error).__name__}: {error}); mend or reinstall the package that has it."
                ) from error
            return _in_module(flag, found, value, registered) if isinstance(found, ModuleType) else found
    raise ConfigError(
        f"{flag} must be one of {', '.join(registered)}, an entry point of {group} or MODULE:CLASS; got {value!r}."
    )


def _in_module(flag: str, module: ModuleType, name: str, registered: Mapping[str, type]) -> object:
    found = getattr(module, name, None) or registered.get(name)
    if found is None:
        classes = tuple(other for other, value in vars(module).items() if isinstance(value, type))
        raise ConfigError(
            f"{flag}: {name!r} is neither a class in {module.__name__} nor registered by it"
            f"{suggestion(name, classes)}; write it as in the module."
        )
    return found


def _make(flag: str, value: str, found: object) -> object:
    if not isinstance(found, type):
        raise ConfigError(f"{flag} {value} is {found!r:.100}, not a class; {GUIDE} says what a policy is.")
    try:
        return found()
    except Exception as error:  # code from outside may raise anything
        raise ConfigError(
            f"{flag} {value}: the class cannot be made ({type(error).__name__}: {error}); a policy is made without "
            "arguments."
        ) from error


def _check_shape(flag: str, policy: Any, constant: str, method: str) -> None:
    name = type(policy).__name__
    try:
        value = getattr(policy, constant)
        callable_there = callable(getattr(policy, method))
    except Exception as error:  # code from outside may raise anything
        raise ConfigError(
            f"{flag}: {name} has no usable {constant} or {method} ({type(error).__name__}: {error}); {GUIDE} says what "
            "it needs."
        ) from error
    if not isinstance(value, bool):
        raise ConfigError(f"{flag}: {constant} of {name} must be True or False, got {value!r:.100}; see {GUIDE}.")
    if not callable_there:
        raise ConfigError(f"{flag}: {method} of {name} must be a method; see {GUIDE}.")
