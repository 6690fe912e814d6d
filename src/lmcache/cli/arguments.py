"""An argparse parser that keeps this command line's habits: faults are ConfigError, help shows defaults."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from lmcache.cli.output import FORMATS
from lmcache.config.values import Number, Whole, did_you_mean
from lmcache.errors import ConfigError


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(110, shutil.get_terminal_size().columns))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", []):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


class Arguments(argparse.ArgumentParser):
    """Options of one command, with the ones that every command has."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            f"lmcache {command}", description=description, formatter_class=_Formatter, allow_abbrev=False, add_help=True
        )
        self.add_argument("--format", choices=FORMATS, default="terminal", help="how results are printed")
        self.add_argument(
            "--output", metavar="FILE", default="", help="write results to a file instead of printing them"
        )
        self.add_argument("--quiet", "-q", action="store_true", help="print nothing; the exit code tells")

    def add_whole(self, name: str, default: int, help: str, **bounds: Any) -> None:
        kind = Whole(**bounds)
        self.add_argument(name, type=_typed(name, kind), metavar=kind.placeholder, default=default, help=help)

    def add_number(self, name: str, default: float, help: str, **bounds: Any) -> None:
        kind = Number(**bounds)
        self.add_argument(name, type=_typed(name, kind), metavar=kind.placeholder, default=default, help=help)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses, or raises ConfigError with one sentence. --help prints and exits with 0."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in argv:  # before values are read: the value of a misspelled option would be taken for something else
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                self._refuse(name, known)
        found, unknown = self.parse_known_args(list(argv))
        if unknown:
            self._refuse(unknown[0], known)
        return found

    def _refuse(self, name: str, known: list[str]) -> NoReturn:
        guess = did_you_mean(name, known) if name.startswith("-") else ""
        raise ConfigError(f"{self.prog} does not take {name!r}{guess or f'; {self.prog} --help lists what it takes.'}")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.")


def _typed(name: str, kind: Whole | Number) -> Any:
    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise ConfigError(f"{name} {error}.") from None

    return parse
