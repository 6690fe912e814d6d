"""Reads the keys of LMCache inside an engine: a file, the environment, and the engine's extra configuration.

The extra configuration wins over the environment, the environment over the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.config.file import read_yaml
from lmcache.config.spec import options as server_options
from lmcache.config.spec import variable as server_variable
from lmcache.config.values import did_you_mean, nearest
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_VARIABLE, _EXTRA, _CONNECTOR = "LMCACHE_", "lmcache.", "lmcache.mp."


@dataclass(frozen=True)
class Given:
    where: str  # how a sentence names it: "chunk_size in lmcache.yaml", "LMCACHE_CHUNK_SIZE", "lmcache.chunk_size"
    value: object


def read_sources(
    extra: Mapping[str, Any],
    environ: Mapping[str, str],
    known: frozenset[str],
    problems: Problems,
    *,
    is_named: Callable[[str], bool],
) -> dict[str, Given]:
    """What is given, by key. `known`: keys that have a meaning or a refusal, `is_named`: whether another one has, too.
    What is left is refused, but for variables, of which many belong to others: of these only a near miss."""
    given = {**_of_file(environ, problems), **_of_environment(environ, known, problems, is_named)}
    for key, value in extra.items():
        if key.startswith(_EXTRA) and not key.startswith(_CONNECTOR):
            given[key.removeprefix(_EXTRA)] = Given(key, value)
    unknown = [name for name in given if name not in known and not is_named(name)]
    for name in unknown:
        where = given.pop(name).where
        problems.add(f"{where} is not a key of LMCache{did_you_mean(name, sorted(known)) or '; remove it.'}")
    return given


def _of_file(environ: Mapping[str, str], problems: Problems) -> dict[str, Given]:
    path = environ.get(FILE_VARIABLE, "")
    if not path:
        return {}
    try:
        content = read_yaml(path, FILE_VARIABLE)
    except ConfigError as error:
        problems.add(str(error))
        return {}
    return {key: Given(f"{key} in {path}", value) for key, value in content.items()}


def _of_environment(
    environ: Mapping[str, str], known: frozenset[str], problems: Problems, is_named: Callable[[str], bool]
) -> dict[str, Given]:
    names = sorted(_VARIABLE + key.upper() for key in known)
    of_server = {server_variable(name) for name in server_options()}
    given: dict[str, Given] = {}
    for variable, value in environ.items():
        if not variable.startswith(_VARIABLE) or variable == FILE_VARIABLE:
            continue
        key = variable.removeprefix(_VARIABLE).lower()
        if key in known or (is_named(key) and variable not in of_server):
            given[key] = Given(variable, value)
        elif variable not in of_server and (meant := nearest(variable, names, cutoff=0.9)):
            problems.add(f"{variable} in the environment is not a key of LMCache; did you mean {meant}?")
    return given
