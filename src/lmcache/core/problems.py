"""Collects every problem of a command line, a file or a machine, so that all are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmcache.errors import ConfigError, LMCacheError, ResourceError


class Problems:
    """Collects ConfigErrors and ResourceErrors in the order in which they are met."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._is_usage = False  # wrong usage decides: what the machine refuses may only follow from it

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Ends the block at the first refusal and records it."""
        try:
            yield
        except (ConfigError, ResourceError) as error:
            self._keep(error)

    def add(self, sentence: str) -> None:
        """Records wrong usage."""
        self._keep(ConfigError(sentence))

    def _keep(self, error: LMCacheError) -> None:
        self._is_usage |= isinstance(error, ConfigError)
        self.found += [problem for problem in error.problems if problem not in self.found]

    def raise_all(self) -> None:
        """ConfigError if any of them was one, else ResourceError; nothing if there is none."""
        if self.found:
            raise (ConfigError if self._is_usage else ResourceError)(*self.found)
