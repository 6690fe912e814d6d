"""Writes docs/reference/commands.md from the parsers of the commands. --check: fails where it is not current."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from lmcache.cli.arguments import Arguments, default_text
from lmcache.cli.command_tree import WITH_SERVER_OPTIONS, arguments_of
from lmcache.cli.main import COMMANDS
from lmcache.config.spec import flag, options
from lmcache.config.values import Choice, JsonObject, Kind, Listed, Number, Policy, Switch, Whole, range_text
from reference_pages import key_table, write_or_check

BEGINNING = """# Commands

Every command of `lmcache`, from its parser. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; commands
that have others say so. With `LMCACHE_LOG_LEVEL=DEBUG` a fault prints where it came from.

A command that asks a running server sends the admin token in `LMCACHE_ADMIN_TOKEN`, where it is set.

This page is made from the sources by `scripts/write_commands_reference.py`.
"""

COMMON = """## Options of every command

They stand in front of the command or behind it. `lmcache server` has no results, and no `--output`.
"""

SERVER = """Starts the cache server and serves until SIGTERM, SIGINT or SIGHUP.

    lmcache server --l1-size-gb 20 --eviction-policy LRU
    lmcache server --config server.yaml

Each option is also an environment variable (`--l1-size-gb` as `LMCACHE_L1_SIZE_GB`) and a key of the YAML file that
`--config` or `LMCACHE_CONFIG` names (`l1_size_gb: 20`). A flag wins over a variable, a variable over the file. Where
several values are taken, the flag is repeated, and the variable or key has one value or a list (JSON in the variable).

Exit codes: 0 stopped as asked; 1 the machine refused, or something hung at the end; 2 the options were refused; 128 and
its number for a second signal, which ends the server at once; the same signal again within 0.5 s is no second one.
"""

MORE = "; or several"

Declared = Sequence[tuple[argparse.Action, Kind | None]]


def page() -> str:
    common = Arguments("", "").declared()
    parts = [BEGINNING, COMMON, table(common), "## lmcache server\n", SERVER, *server_groups()]
    for name in COMMANDS:
        if name != "server":
            parts += [f"## lmcache {name}\n", *command(name, {action.dest for action, _ in common})]
    return "\n".join(parts)


def command(name: str, common: set[str]) -> list[str]:
    """`common`: arguments that every command has, by their dest."""
    arguments = arguments_of(name)
    if arguments is None:
        raise SystemExit(f"lmcache {name} cannot be described: a part of the package is not installed here.")
    parts = [f"{arguments.description}\n"]
    if arguments.examples:
        parts.append("".join(f"    {line}\n" for line in arguments.examples))
    own = [(action, kind) for action, kind in arguments.declared() if action.dest not in common]
    if own:
        parts.append(table(own))
    if name in WITH_SERVER_OPTIONS:
        parts.append("It takes every option of [lmcache server](#lmcache-server) as well.\n")
    return parts


def table(declared: Declared) -> str:
    return key_table(row(action, kind) for action, kind in declared)


def row(action: argparse.Action, kind: Kind | None) -> tuple[str, str, str, str]:
    name = ", ".join(f"`{word}`" for word in action.option_strings or [action.dest])
    is_required = action.required if action.option_strings else action.nargs not in ("?", "*")
    about = " ".join((action.help or "").replace("%%", "%").split())
    return name, must_be(action, kind), "required" if is_required else default_text(action), about


def must_be(action: argparse.Action, kind: Kind | None) -> str:
    if action.nargs == 0:
        return ""
    if kind is not None:
        value = expected(kind)
    elif isinstance(action.nargs, int):
        return " ".join([str(action.metavar)] * action.nargs)
    else:
        value = str(action.metavar or action.dest.upper())
    repeats = action.nargs in ("+", "*") or action.default == []  # the latter: a flag that may be repeated
    return f"{value}{MORE}" if repeats else value


def server_groups() -> list[str]:
    """A table for each group of its options."""
    file = ("`--config`", "FILE", "`LMCACHE_CONFIG`", "YAML with the options as keys")
    groups: dict[str, list[tuple[str, str, str, str]]] = {"File": [file]}
    for name, (option, default) in options().items():
        if option.unbuilt:
            continue
        value = "required" if default is dataclasses.MISSING else option.default_text or option.kind.show(default)
        off = f", `--no-{flag(name)[2:]}`" if isinstance(option.kind, Switch) and default is True else ""
        groups.setdefault(option.group, []).append((f"`{flag(name)}`{off}", expected(option.kind), value, option.help))
    return [part for title, rows in groups.items() for part in (f"### {title}\n", key_table(rows))]


def expected(kind: Kind) -> str:
    """What a value of that kind must be, as it reads behind these words; "" for a switch."""
    match kind:
        case Choice():
            return f"one of {', '.join(kind.choices)}"
        case Policy():
            return f"one of {', '.join(kind.choices)}, an entry point of {kind.entry_points}, or MODULE:CLASS"
        case Whole() | Number():
            noun = "a whole number" if isinstance(kind, Whole) else "a number"
            if isinstance(kind, Whole) and kind.power_of_two:
                noun = "a power of two"
            return noun + kind.of_unit + range_text(kind.minimum, kind.above, kind.maximum)
        case Listed():
            return expected(kind.item) + MORE
        case JsonObject():
            return "a JSON object"
    return kind.placeholder


if __name__ == "__main__":
    sys.exit(write_or_check({"commands.md": page()}))
