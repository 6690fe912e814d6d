"""An argparse parser that keeps this command line's habits: faults are ConfigError, help shows defaults."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from lmcache.cli.output import FORMATS
from lmcache.config.values import Number, Whole, did_you_mean
from lmcache.core.problems import Problems


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
        self._problems = Problems()
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
        self.add_argument(name, type=self._typed(name, kind), metavar=kind.placeholder, default=default, help=help)

    def add_number(self, name: str, default: float, help: str, **bounds: Any) -> None:
        kind = Number(**bounds)
        self.add_argument(name, type=self._typed(name, kind), metavar=kind.placeholder, default=default, help=help)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses, or raises ConfigError with a sentence for each problem. --help prints and exits with 0."""
        found, unknown = self.parse_known_args(self._without_unknown(argv))
        if unknown:
            self._refuse(unknown[0])
        self._problems.raise_all()
        return found

    def _without_unknown(self, argv: Sequence[str]) -> list[str]:
        """Refuses misspelled options with their values, which would be taken for something else."""
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
        if not self._problems.found:  # else it may only follow from them
            self._problems.add(f"{self.prog}: {message}.")
        self._problems.raise_all()
        raise AssertionError("argparse reports an error")

    def _typed(self, name: str, kind: Whole | Number) -> Any:
        def parse(text: str) -> Any:
            try:
                return kind.parse(text)
            except ValueError as error:
                self._problems.add(f"{name} {error}.")
                return kind.minimum

        return parse
