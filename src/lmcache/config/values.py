"""Kinds of option values: how a value is read from a flag, a variable or a file, and what is refused.

`parse` takes what the source gave (text from flags and environment, native values from YAML) and returns the value or
raises ValueError with the end of a sentence that begins with the option's name: "must be at least 1 token, got 0".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmcache.core.address import refuse_unreachable


class Kind(Protocol):
    @property
    def placeholder(self) -> str:
        """What help shows for the value; "" when the flag takes none."""
        ...

    def parse(self, given: object) -> object: ...

    def show(self, value: object) -> str:
        """A value as an operator would type it, with its unit."""
        ...


def nearest(wrong: str, allowed: Sequence[str], *, cutoff: float = 0.6) -> str:
    """The allowed name that looks most like `wrong`, whatever the case of its letters, or ""."""
    import difflib  # slow, and only needed for an error

    by_lower = {name.lower(): name for name in reversed(allowed)}
    found = difflib.get_close_matches(wrong.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else ""


def did_you_mean(wrong: str, allowed: Sequence[str]) -> str:
    """ "; did you mean X?" or "", for the end of a sentence."""
    name = nearest(wrong, allowed)
    return f"; did you mean {name}?" if name else ""


def suggestion(wrong: str, allowed: Sequence[str]) -> str:
    """ " (did you mean X?)" or "", for the middle of a sentence."""
    name = nearest(wrong, allowed)
    return f" (did you mean {name}?)" if name else ""


def _quantity(amount: float, unit: str) -> str:
    text = str(int(amount)) if float(amount).is_integer() else str(amount)
    if not unit:
        return text
    singular = unit[:-1] if amount == 1 and unit.endswith("s") else unit
    return f"{text} {singular}"


def range_text(minimum: float | None, above: float | None, maximum: float | None) -> str:
    """ " from 1 to 5", " of at least 1" ..., for the end of a noun; "" without a bound."""
    low, high = _number(minimum if above is None else above), _number(maximum)
    if above is not None:
        return f" above {low}" + f" and up to {high}" * bool(high)
    if low and high:
        return f" from {low} to {high}"
    return f" of at least {low}" if low else f" of at most {high}" if high else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


_WITH_UNIT = re.compile(r"\s*[-+]?[0-9][0-9_.]*\s*[A-Za-z%]+\s*")


def _without_unit(given: object) -> str:
    return "; give the number alone" if isinstance(given, str) and _WITH_UNIT.fullmatch(given) else ""


@dataclass(frozen=True)
class _Bounded:
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive lower bound
    shown_as: str = ""  # the placeholder, where the unit would not do

    @property
    def placeholder(self) -> str:
        return self.shown_as or self.unit.upper() or "N"

    @property
    def of_unit(self) -> str:
        return f" of {self.unit}" if self.unit else ""

    def check(self, value: float, given: object) -> None:
        if self.above is not None and value <= self.above:
            raise ValueError(f"must be more than {_quantity(self.above, self.unit)}, got {given}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {_quantity(self.minimum, self.unit)}, got {given}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"must be at most {_quantity(self.maximum, self.unit)}, got {given}")

    def show(self, value: object) -> str:
        return _quantity(value, self.unit) if isinstance(value, (int, float)) else str(value)


@dataclass(frozen=True)
class Whole(_Bounded):
    power_of_two: bool = False

    def parse(self, given: object) -> int:
        value = given
        if isinstance(given, str):
            try:
                value = int(given.strip().replace("_", ""))
            except ValueError:
                value = None
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be a whole number{self.of_unit}, got {given!r}{_without_unit(given)}")
        self.check(value, given)
        if self.power_of_two and value & (value - 1):
            raise ValueError(f"must be a power of two, got {given}")
        return value


@dataclass(frozen=True)
class Number(_Bounded):
    def parse(self, given: object) -> float:
        value = given
        if isinstance(given, str):
            try:
                value = float(given)
            except ValueError:
                value = None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"must be a number{self.of_unit}, got {given!r}{_without_unit(given)}")
        self.check(value, given)
        return float(value)


@dataclass(frozen=True)
class Text:
    placeholder: str = "TEXT"

    def parse(self, given: object) -> str:
        if not isinstance(given, str):
            raise ValueError(f"must be text (in a file: in quotes), got {given!r}")
        if "\0" in given or "\n" in given:
            raise ValueError("must be one line of text")
        return given

    def show(self, value: object) -> str:
        return f'"{value}"' if value == "" else str(value)


@dataclass(frozen=True)
class ReachedHost(Text):
    """Where others reach this machine; "" where they find that out themselves."""

    def parse(self, given: object) -> str:
        host = super().parse(given)
        if host:
            refuse_unreachable(host)
        return host


@dataclass(frozen=True)
class Choice:
    """One of `choices`; `unbuilt` are documented names that this version refuses, and what to use instead."""

    choices: tuple[str, ...]
    unbuilt: Mapping[str, str] = field(default_factory=dict)

    @property
    def placeholder(self) -> str:
        return "{" + ",".join(self.choices) + "}"

    def parse(self, given: object) -> str:
        allowed = f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else self.choices[0]
        if not isinstance(given, str):
            raise ValueError(f"must be {allowed}, got {given!r}")
        if given in self.unbuilt:
            raise ValueError(f"cannot be {given}, which is not built yet ({self.unbuilt[given]}); it must be {allowed}")
        if given not in self.choices:
            raise ValueError(f"must be {allowed}, got {given!r}{did_you_mean(given, list(self.choices))}")
        return given

    def show(self, value: object) -> str:
        return str(value)


_OUTSIDE = re.compile(r"[^:\0]+:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Policy:
    """One of `choices`, an entry point of the group `entry_points` that an installed package has, or MODULE:CLASS. The
    caller imports what the last two name."""

    choices: tuple[str, ...]
    entry_points: str

    @property
    def placeholder(self) -> str:
        return "{" + ",".join((*self.choices, "MODULE:CLASS")) + "}"

    def parse(self, given: object) -> str:
        allowed = f"one of {', '.join(self.choices)}, an entry point of {self.entry_points} or MODULE:CLASS"
        if not isinstance(given, str):
            raise ValueError(f"must be {allowed}, got {given!r}")
        if given in self.choices or _OUTSIDE.fullmatch(given):
            return given
        from importlib import metadata  # slow, and only needed for names of others

        installed = [point.name for point in metadata.entry_points(group=self.entry_points)]
        if given not in installed:
            raise ValueError(f"must be {allowed}, got {given!r}{did_you_mean(given, [*self.choices, *installed])}")
        return given

    def show(self, value: object) -> str:
        return str(value)


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Switch:
    placeholder: str = ""

    def parse(self, given: object) -> bool:
        if isinstance(given, bool):
            return given
        if isinstance(given, str) and given.strip().lower() in _TRUE + _FALSE:
            return given.strip().lower() in _TRUE
        raise ValueError(f"must be true or false, got {given!r}")

    def show(self, value: object) -> str:
        return "on" if value else "off"


def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"has the key {key!r} twice")
    return dict(pairs)


def parse_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        fault = error.msg[:1].lower() + error.msg[1:]
        raise ValueError(f"must be JSON, but at line {error.lineno}, column {error.colno}: {fault}") from None


@dataclass(frozen=True)
class JsonObject:
    """A JSON object. `required_key` must be there and be text."""

    placeholder: str = "JSON"
    required_key: str = ""
    example: str = field(default="", compare=False)

    def parse(self, given: object) -> dict[str, object]:
        value = parse_json(given) if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            example = f" such as {self.example}" if self.example else ""
            raise ValueError(f"must be a JSON object{example}, got {given!r}")
        if self.required_key and not isinstance(value.get(self.required_key), str):
            raise ValueError(f'must have the key "{self.required_key}", such as {self.example}')
        return {str(key): item for key, item in value.items()}

    def show(self, value: object) -> str:
        return json.dumps(value)


@dataclass(frozen=True)
class Listed:
    """Any number of values. A flag is repeated; a variable holds one value or a JSON array; a file holds either."""

    item: JsonObject | Text

    @property
    def placeholder(self) -> str:
        return self.item.placeholder

    def items(self, given: object) -> list[object]:
        """The values, each to be parsed by `item`."""
        if isinstance(given, str) and given.lstrip().startswith("["):
            given = parse_json(given)
        return given if isinstance(given, list) else [given]

    def parse(self, given: object) -> list[object]:
        return [self.item.parse(value) for value in self.items(given)]

    def show(self, value: object) -> str:
        return "none" if not value else json.dumps(value)
