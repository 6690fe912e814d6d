"""What a command prints: rows for people, one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.errors import ResourceError

FORMATS = ("terminal", "json")
_WIDTH = 64


@dataclass
class Report:
    """A titled list of figures. `add` takes the machine's name, the people's name, the value and how people see it."""

    title: str
    metrics: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, key: str, label: str, value: Any, shown: str | None = None) -> None:
        self.metrics[key] = value
        text = str(value) if shown is None else shown
        self.lines.append(f"{label + ':':<{max(30, _WIDTH - len(text))}}{text}")

    def section(self, title: str) -> None:
        self.lines.append(f" {title} ".center(_WIDTH, "-"))

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """For people only."""
        self.lines += columns_of(heads, rows)

    def text(self, line: str) -> None:
        """A line for people only."""
        self.lines.append(line)

    def render(self, form: str) -> str:
        if form == "json":
            return json.dumps({"title": self.title, "metrics": _json_value(self.metrics)}, indent=2) + "\n"
        lines = [f" {self.title} ".center(_WIDTH, "="), *self.lines, "=" * _WIDTH]
        return "\n".join(map(printable, lines)) + "\n"

    def emit(self, options: argparse.Namespace) -> None:
        """Prints or writes, as --format, --output and --quiet ask."""
        write(self.render(options.format), options)


def printable(line: str) -> str:
    """Names come from engines, tenants and servers: none of them gives orders to a terminal, or begins a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _json_value(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _json_value(part) for name, part in value.items()}
    return [_json_value(part) for part in value] if isinstance(value, (list, tuple)) else value


def columns_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their texts: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for first, *others in (heads, *rows):
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return lines


def write(text: str, options: argparse.Namespace) -> None:
    if options.output:
        write_file(options.output, text, "--output")
    elif not options.quiet:
        sys.stdout.write(text)
        sys.stdout.flush()


def write_file(path: str, text: str, flag: str) -> None:
    """ResourceError names `flag`, which has the path."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ResourceError(f"{flag} {path} cannot be written: {error.strerror}.") from None


def bytes_text(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """8074 -> "2 h 14 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
