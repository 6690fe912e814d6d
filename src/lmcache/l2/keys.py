"""Reading an adapter's JSON: every key is declared, and anything else is refused with the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.errors import ConfigError

REQUIRED: Any = object()


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
                f"a number {'above' if above else 'from'} {minimum:g} {'and up ' if above else ''}to {maximum:g}"
            )
        return float(value)

    return check


def choice(names: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}{nearest(value, names)}")
        return str(value)

    return check


def nearest(name: object, allowed: Sequence[str]) -> str:
    """ "" or a question that names the nearest valid name."""
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def read(spec: Mapping[str, Any], keys: Sequence[Key], where: str) -> dict[str, Any]:
    """Values of all keys by name. ConfigError begins with `where`, names the key and says what is allowed."""
    names = [key.name for key in keys]
    for name in spec:
        if name not in names:
            raise ConfigError(
                f'{where}: unknown key "{name}"{nearest(name, names)}; allowed are {", ".join(sorted(names))}.'
            )
    values: dict[str, Any] = {}
    for key in keys:
        if key.name not in spec:
            if key.default is REQUIRED:
                raise ConfigError(f'{where}: the key "{key.name}" is required.')
            values[key.name] = key.default
            continue
        try:
            values[key.name] = key.check(spec[key.name])
        except ValueError as error:
            raise ConfigError(f'{where}: "{key.name}" must be {error}; got {spec[key.name]!r}.') from None
    return values
