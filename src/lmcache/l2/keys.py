"""Reading an adapter's JSON: every key is declared, and anything else is refused with the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.config import unbuilt
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError

REQUIRED: Any = object()

# Why num_lookup_workers of some adapters has no effect.
LOOKUPS_READ_NOTHING = "the index is in memory, so a lookup reads nothing and needs no threads"


@dataclass(frozen=True)
class Key:
    """One key of a specification. `check` returns the value as the adapter wants it, or raises ValueError with what is
    expected, to read after "must be"."""

    name: str
    check: Callable[[Any], Any]
    default: Any = REQUIRED


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def text_or_empty(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a JSON object")
    return dict(value)


def whole(minimum: int, maximum: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ValueError(f"a whole number from {minimum} to {maximum}")
        return int(value)

    return check


def number(minimum: float, maximum: float, *, above: bool = False) -> Callable[[Any], float]:
    """`above`: the minimum itself is not allowed."""

    def check(value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not minimum <= value <= maximum or (above and value == minimum):
            raise ValueError(
                f"a number {'above' if above else 'from'} {minimum:g} {'and up ' if above else ''}to {maximum:.15g}"
            )
        return float(value)

    return check


def choice(names: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}{nearest(value, names)}")
        return str(value)

    return check


def closest(name: object, allowed: Sequence[str]) -> str:
    """The allowed name that looks most like it, or ""."""
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else ""


def nearest(name: object, allowed: Sequence[str]) -> str:
    """ "" or a question that names the nearest valid name."""
    meant = closest(name, allowed)
    return f" (did you mean {meant}?)" if meant else ""


def without_effect(
    where: str, settings: Mapping[str, Any], keys: Sequence[Key], reasons: Mapping[str, str]
) -> list[str]:
    """A sentence for each of the keys in `reasons` that is not at its default. The reason reads after a colon."""
    defaults = {key.name: key.default for key in keys}
    return [
        f'{where}: "{name}" has no effect: {why}.' for name, why in reasons.items() if settings[name] != defaults[name]
    ]


def read(spec: Mapping[str, Any], keys: Sequence[Key], where: str) -> dict[str, Any]:
    """Values of all keys by name. ConfigError tells all that is wrong: each sentence begins with `where`, names the key
    and says what is allowed."""
    problems = Problems()
    missing = {key.name for key in keys if key.default is REQUIRED} - set(spec)
    for name in spec:
        if name not in {key.name for key in keys}:
            _refuse_key(name, keys, missing, where, problems)
    values: dict[str, Any] = {}
    for key in keys:
        if key.name not in spec:
            if key.name in missing:
                problems.add(f'{where}: the key "{key.name}" is required.')
            values[key.name] = key.default
            continue
        with problems.collect():
            try:
                values[key.name] = key.check(spec[key.name])
            except ValueError as error:
                raise ConfigError(f'{where}: "{key.name}" must be {error}; got {spec[key.name]!r}.') from None
    problems.raise_all()
    return values


def _refuse_key(name: str, keys: Sequence[Key], missing: set[str], where: str, problems: Problems) -> None:
    if instead := unbuilt.ADAPTER_KEYS.get(name):
        problems.add(f'{where}: "{name}" is not built yet; {instead}.')
        return
    names = [key.name for key in keys]
    missing.discard(closest(name, names))  # it was meant: nobody has to be asked for it as well
    problems.add(f'{where}: unknown key "{name}"{nearest(name, names)}; allowed are {", ".join(sorted(names))}.')
