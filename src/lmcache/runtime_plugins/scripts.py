"""Which scripts --runtime-plugin-locations names, and what runs them."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache.core.limits import MAX_RUNTIME_PLUGINS
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError

_INTERPRETERS = {".py": sys.executable, ".sh": "/bin/sh"}
_SHEBANG_BYTES = 256  # that the kernel reads
_OPTION = "--runtime-plugin-locations"


@dataclass(frozen=True)
class Script:
    """`command` has absolute paths, and runs it."""

    name: str
    command: tuple[str, ...]


def find_scripts(locations: Sequence[str]) -> list[Script]:
    """Each *.py and *.sh, also in folders below, without hidden ones; in the order of the locations, then by path.
    ConfigError has a sentence for each that cannot be run."""
    problems = Problems()
    paths: dict[Path, None] = {}
    for location in locations:
        with problems.collect():
            paths.update(dict.fromkeys(_paths(location)))
    scripts: list[Script] = []
    for path in paths:
        with problems.collect():
            scripts.append(_script(path))
    if len(scripts) > MAX_RUNTIME_PLUGINS:
        problems.add(f"{_OPTION} names {len(scripts)} scripts; at most {MAX_RUNTIME_PLUGINS} run beside a server.")
    problems.raise_all()
    return scripts


def _paths(location: str) -> list[Path]:
    path = Path(os.path.abspath(location))
    if path.is_file():
        if path.suffix not in _INTERPRETERS:
            raise ConfigError(f"{_OPTION} {location} must end in .py or .sh.")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{_OPTION} {location} is no script and no folder of scripts.")
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        found += [
            Path(folder, name)
            for name in sorted(files)
            if Path(name).suffix in _INTERPRETERS and not name.startswith((".", "__"))
        ]
    return found


def _script(path: Path) -> Script:
    try:
        with open(path, "rb") as file:
            status, beginning = os.fstat(file.fileno()), file.read(_SHEBANG_BYTES)
    except OSError as error:
        raise ConfigError(f"{_OPTION}: {path} cannot be read: {error.strerror}.") from None
    if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
        raise ConfigError(
            f"{_OPTION}: {path} may be written by anybody, and would run as the server: chmod o-w {path}."
        )
    interpreter = _interpreter(beginning, path)
    if shutil.which(interpreter[0]) is None:
        raise ConfigError(f"{_OPTION}: {path} names {interpreter[0]}, which is not there or not executable.")
    return Script(path.name, (*interpreter, str(path)))


def _interpreter(beginning: bytes, path: Path) -> list[str]:
    """The interpreter of the first line, as the kernel reads it: a path and at most one argument. Else by the name of
    the file."""
    line = beginning.split(b"\n")[0]
    words = line[2:].decode(errors="replace").strip().split(None, 1) if line.startswith(b"#!") else []
    return words or [_INTERPRETERS[path.suffix]]
