"""What objects keep in collections, whatever these are called: for tests that nothing is kept for ever."""

from __future__ import annotations

from collections import deque
from typing import Any

_COLLECTIONS = (dict, set, deque, list)


def held_items(part: object, *modules: str, without: tuple[type, ...] = ()) -> dict[str, int]:
    """How many items each collection holds that can be reached from `part` through objects of classes of these modules
    (or packages: the beginning of the name), by its path; empty ones are left out. Objects `without` are not entered.
    """
    found: dict[str, int] = {}
    _collect(part, "", modules, without, found, set())
    return {path: count for path, count in found.items() if count}


def _collect(
    part: object, path: str, modules: tuple[str, ...], without: tuple[type, ...], found: dict[str, int], seen: set[int]
) -> None:
    if id(part) in seen or isinstance(part, without):
        return
    seen.add(id(part))
    if isinstance(part, _COLLECTIONS):
        found[path] = len(part)
        for index, item in enumerate(part.values() if isinstance(part, dict) else part):
            _collect(item, f"{path}[{index}]", modules, without, found, seen)
    elif type(part).__module__.startswith(modules):
        for name, value in _attributes(part).items():
            _collect(value, f"{path}.{name}", modules, without, found, seen)


def _attributes(part: object) -> dict[str, Any]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(part, "__dict__", {}), **{name: getattr(part, name) for name in slots if hasattr(part, name)}}
