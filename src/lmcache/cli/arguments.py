"""An argparse parser that raises ConfigError with every problem, suggests names and shows defaults with units."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from lmcache.cli.output import FORMATS
from lmcache.config.values import Choice, Kind, Number, Whole, did_you_mean
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError
from lmcache.transport.curve_keys import CurveFiles

_EXAMPLES = "Examples:\n"
_CURVE_FLAGS = "--curve-server-key-file", "--curve-client-key-file"


DESCRIBE = "\0describe"  # the only word of a command line that is not run: `read` raises Described instead


class Described(Exception):
    """The options of a command, for whoever asked for them with DESCRIBE."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(110, shutil.get_terminal_size().columns))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = default_text(action)
        return f"{action.help} (default: {default})" if default else action.help


class _Typed:
    """The `type` of an argparse option: parses a value, and collects its refusal."""

    def __init__(self, name: str, kind: Kind, problems: Problems) -> None:
        self.kind = kind
        self._name = name
        self._problems = problems

    def __call__(self, text: str) -> object:
        try:
            return self.kind.parse(text)
        except ValueError as error:
            sentence = f"{self._name} {error}"
            self._problems.add(sentence if sentence.endswith("?") else sentence + ".")
            return None


def default_text(action: argparse.Action) -> str:
    """Returns the default as help shows it, with its unit; "" where there is none."""
    if action.default in (None, False, "", [], argparse.SUPPRESS):
        return ""
    kind = action.type.kind if isinstance(action.type, _Typed) else None
    values = action.default if isinstance(action.default, list) else [action.default]
    return " ".join(kind.show(value) if kind else str(value) for value in values)


class Arguments(argparse.ArgumentParser):
    """The options of one command, with those that every command has."""

    def __init__(self, command: str, description: str, examples: Sequence[str] = ()) -> None:
        """`examples`: command lines that --help ends with."""
        self._problems = Problems()
        self.examples = tuple(examples)
        super().__init__(
            f"lmcache {command}",
            description=description,
            epilog=_EXAMPLES + "\n".join(f"  {line}" for line in examples) if examples else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=True,
        )
        self.add_value("--format", Choice(FORMATS), "how results and errors are printed", default="terminal")
        self.add_argument(
            "--output", metavar="FILE", default="", help="write results to a file instead of printing them"
        )
        self.add_argument("--quiet", "-q", action="store_true", help="print no results; the exit code tells")

    def add_value(self, name: str, kind: Kind, help: str, **settings: Any) -> None:
        """Adds an option or positional of that kind; `settings` go to `add_argument`."""
        settings = {"metavar": kind.placeholder, **settings}
        self.add_argument(name, type=_Typed(name, kind, self._problems), help=help, **settings)

    def add_whole(self, name: str, default: int, help: str, **bounds: Any) -> None:
        self.add_value(name, Whole(**bounds), help, default=default)

    def add_number(self, name: str, default: float, help: str, **bounds: Any) -> None:
        self.add_value(name, Number(**bounds), help, default=default)

    def add_curve(self) -> None:
        """The keys for a server that asks for them; `curve` reads them."""
        about = "server's public", "own secret"
        for name, whose in zip(_CURVE_FLAGS, about, strict=True):
            help = f"file with the {whose} CURVE key, where the server asks for keys"
            self.add_argument(name, default="", metavar="FILE", help=help)

    def curve(self, options: argparse.Namespace) -> CurveFiles | None:
        """ConfigError unless both files are given, or none, and both hold keys."""
        files = CurveFiles(options.curve_server_key_file, options.curve_client_key_file)
        if not (files.server_public or files.client_secret):
            return None
        if not (files.server_public and files.client_secret):
            raise ConfigError(f"{self.prog}: {' and '.join(_CURVE_FLAGS)} need each other: give both or none.")
        files.read()
        return files

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses, or raises ConfigError with a sentence for each problem. --help prints and exits with 0."""
        self._describe(argv)
        found, unknown = self.parse_known_args(self._without_unknown(argv))
        if unknown:
            self._refuse(unknown[0])
        self._problems.raise_all()
        return found

    def refuse_unused(self, options: argparse.Namespace, where: str, *names: str, remedy: str = "leave it out") -> None:
        """ConfigError where some of these are not at their defaults: they would change nothing."""
        values = [(name, name[2:].replace("-", "_")) for name in names]
        if given := [name for name, value in values if getattr(options, value) != self.get_default(value)]:
            raise ConfigError(f"{self.prog} {where} does not use {' and '.join(given)}: {remedy}.")

    def read_own(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Reads like `read`, for a command that takes options of another parser as well: these are the second value."""
        self._describe(argv)
        found, others = self.parse_known_args(list(argv))
        self._problems.raise_all()
        return found, others

    def _describe(self, argv: Sequence[str]) -> None:
        if DESCRIBE in argv:
            raise Described(self)

    def declared(self) -> list[tuple[argparse.Action, Kind | None]]:
        """Options and positionals, and the kind of their values where it was given."""
        return [
            (action, action.type.kind if isinstance(action.type, _Typed) else None)
            for action in self._actions
            if action.help is not argparse.SUPPRESS
        ]

    def _without_unknown(self, argv: Sequence[str]) -> list[str]:
        """Refuses unknown options together with their values, which would be parsed as positionals."""
        kept: list[str] = []
        skips = False
        for word in argv:
            name = word.partition("=")[0]
            if name.startswith("--"):
                skips = name not in self._names()
                if skips:
                    self._refuse(name)
            if not skips:
                kept.append(word)
        return kept

    def _names(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _refuse(self, name: str) -> None:
        guess = did_you_mean(name, self._names()) if name.startswith("-") else ""
        self._problems.add(f"{self.prog} does not take {name!r}{guess or f'; {self.prog} --help lists what it takes.'}")

    def error(self, message: str) -> NoReturn:
        if not self._problems.found:  # else it may be a consequence of them
            name, expected, _ = message.removeprefix("argument ").partition(": expected ")
            missing = message.removeprefix("the following arguments are required: ")
            if expected:
                message = f"{name} needs a value"
            elif missing != message:
                message = f"{missing} must be given; {self.prog} --help says what it is"
            self._problems.add(f"{self.prog}: {message}.")
        self._problems.raise_all()
        raise AssertionError("argparse reports an error")
