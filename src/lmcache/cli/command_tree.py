"""Every command with its options, as data, from what the commands themselves declare."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass

from lmcache.cli.arguments import DESCRIBE, Arguments, Described
from lmcache.config.spec import flag, options
from lmcache.config.values import Choice, Kind, Policy, Switch
from lmcache.errors import ConfigError

_PATHS = ("FILE", "FILE.svg", "FOLDER", "PATH")
_PATH_POSITIONALS = ("trace",)
WITH_SERVER_OPTIONS = ("server", "config check", "config show", "doctor")


@dataclass(frozen=True)
class Value:
    """What an option or positional takes: one of `choices`, a path, or anything."""

    choices: tuple[str, ...] = ()
    is_path: bool = False
    repeats: bool = False  # until the next option


@dataclass(frozen=True)
class Option:
    flags: tuple[str, ...]
    about: str  # one line
    value: Value | None  # None: a switch


@dataclass(frozen=True)
class Command:
    name: str  # of one word or two
    about: str
    options: tuple[Option, ...]
    positionals: tuple[Value, ...]


def commands() -> list[Command]:
    """Those whose parts are installed have their options."""
    from lmcache.cli.main import COMMANDS

    return [_command(name, about) for name, (_, about) in COMMANDS.items()]


def arguments_of(name: str) -> Arguments | None:
    """The parser of that command; None where what it needs was left out of this installation."""
    from lmcache.cli.main import module_of

    with contextlib.suppress(ConfigError):
        try:
            module_of(name).run([*name.split()[1:], DESCRIBE])
        except Described as described:
            return described.arguments
    return None


def _command(name: str, about: str) -> Command:
    arguments = arguments_of(name)
    found, positionals = _declared(arguments) if arguments else ([], [])
    if name in WITH_SERVER_OPTIONS:
        known = {word for option in found for word in option.flags}
        found += [option for option in _server_options() if not known & set(option.flags)]
    return Command(name, about, tuple(found), tuple(positionals))


def _declared(arguments: Arguments) -> tuple[list[Option], list[Value]]:
    found, positionals = [], []
    for action, kind in arguments.declared():
        repeats = action.nargs in ("+", "*")
        is_path = action.metavar in _PATHS or action.dest in _PATH_POSITIONALS
        value = Value(_choices(kind), is_path, repeats)
        if action.option_strings:
            takes_none = action.nargs == 0
            found.append(Option(tuple(action.option_strings), _line(action), None if takes_none else value))
        else:
            positionals.append(value)
    return found, positionals


def _server_options() -> list[Option]:
    found = [Option(("--config",), "YAML with the options as keys", Value(is_path=True))]
    for name, (option, default) in options().items():
        if isinstance(option.kind, Switch):
            flags = (flag(name), f"--no-{flag(name)[2:]}") if default is True else (flag(name),)
            found.append(Option(flags, option.help, None))
        else:
            is_path = name.endswith(("_file", "_dir", "_cert", "_key", "_folder"))
            found.append(Option((flag(name),), option.help, Value(_choices(option.kind), is_path)))
    return found


def _choices(kind: Kind | None) -> tuple[str, ...]:
    return kind.choices if isinstance(kind, (Choice, Policy)) else ()


def _line(action: argparse.Action) -> str:
    return " ".join((action.help or "").replace("%%", "%").split())
