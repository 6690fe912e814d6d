"""From flags, environment and file to one ServerConfig. Flags win over environment, environment over file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.config.check import check_combinations
from lmcache.config.spec import ADAPTER_KIND, Option, ServerConfig, flag, options, variable
from lmcache.config.values import Listed, Switch, did_you_mean, nearest
from lmcache.errors import ConfigError

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "LMCACHE_CONFIG"
_OF_OTHERS = {"LMCACHE_LOG_LEVEL", "LMCACHE_ADMIN_TOKEN", "LMCACHE_USE_UPSTREAM_MP", CONFIG_VARIABLE}
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Loaded:
    config: ServerConfig
    sources: Mapping[str, str]  # option name -> the flag, variable or file that set it; defaults are not listed


@dataclass(frozen=True)
class _Given:
    where: str  # how the message names it: "--port", "LMCACHE_PORT", "port in server.yaml"
    value: object


def load_server_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """Reads, converts and checks. Raises ConfigError with one sentence."""
    return load(argv, environ).config


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    known = options()
    from_flags, file_by_flag = _read_flags(argv, known)
    from_environment = _read_environment(environ, known)
    path = file_by_flag or environ.get(CONFIG_VARIABLE, "")
    from_file = _read_file(path, known) if path else {}

    given = {**from_file, **from_environment, **from_flags}
    values: dict[str, Any] = {}
    for name, one in given.items():
        option, default = known[name]
        try:
            values[name] = option.kind.parse(one.value)
        except ValueError as error:
            raise ConfigError(_sentence(f"{one.where} {error}")) from None
        if option.unbuilt and values[name] != default:
            raise ConfigError(f"{one.where} cannot be used: {option.unbuilt}.")
    for name, (option, default) in known.items():
        if default is dataclasses.MISSING and name not in values:
            raise ConfigError(
                f"{flag(name)} is required ({option.help}): give it as a flag, as {variable(name)} or as {name} in the "
                f"file of {CONFIG_FLAG}."
            )
    config = ServerConfig(**values)
    check_combinations(config)
    return Loaded(config, {name: one.where for name, one in given.items()})


def parse_adapter_text(where: str, text: str) -> dict[str, Any]:
    """The JSON object of one --l2-adapter. ConfigError begins with `where`."""
    try:
        return ADAPTER_KIND.parse(text)
    except ValueError as error:
        raise ConfigError(_sentence(f"{where} {error}")) from None


def _sentence(text: str) -> str:
    return text if text.endswith(("?", ".")) else text + "."


def _read_flags(argv: Sequence[str], known: Mapping[str, tuple[Option, object]]) -> tuple[dict[str, _Given], str]:
    """The options that are given, and the file of --config. A repeated flag replaces, or adds where it is a list."""
    names = {flag(name): name for name in known}
    switches = {flag(name) for name, (option, _) in known.items() if isinstance(option.kind, Switch)}
    given: dict[str, _Given] = {}
    file = ""
    rest = list(argv)
    while rest:
        word, equals, attached = rest.pop(0).partition("=")
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is not expected: lmcache server takes only options, which begin with --.")
        if word == CONFIG_FLAG:
            file = attached if equals else _take_value(word, rest)
            continue
        positive = "--" + word[5:]
        negated = word.startswith("--no-") and positive in switches
        name = names.get(positive if negated else word)
        if name is None:
            guess = did_you_mean(word, [*names, CONFIG_FLAG])
            raise ConfigError(_sentence(f"{word} is not an option of lmcache server{guess}"))
        kind = known[name][0].kind
        if isinstance(kind, Switch):
            if negated and equals:
                raise ConfigError(f"{word} takes no value.")
            given[name] = _Given(word, not negated if not equals else attached)
        elif isinstance(kind, Listed):
            values = [attached] if equals else [_take_value(word, rest)]
            while not equals and rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            before = given[name].value if name in given else []
            assert isinstance(before, list)
            given[name] = _Given(word, before + values)
        else:
            given[name] = _Given(word, attached if equals else _take_value(word, rest))
    return given, file


def _take_value(word: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{word} needs a value.")
    return rest.pop(0)


def _read_environment(environ: Mapping[str, str], known: Mapping[str, tuple[Option, object]]) -> dict[str, _Given]:
    """Variables named like options. One that is nearly named so is a slip of the hand; the rest belongs to others."""
    names = {variable(name): name for name in known}
    given: dict[str, _Given] = {}
    for key, value in environ.items():
        if not key.startswith("LMCACHE_") or key in _OF_OTHERS or _KUBERNETES_PORT.match(value):
            continue  # Kubernetes sets LMCACHE_PORT=tcp://... beside a service that is called lmcache
        if name := names.get(key):
            given[name] = _Given(key, value)
        elif "_SERVICE_" not in key and (meant := nearest(key, list(names), cutoff=0.9)):
            raise ConfigError(f"{key} in the environment is not an option; did you mean {meant}?")
    return given


def _read_file(path: str, known: Mapping[str, tuple[Option, object]]) -> dict[str, _Given]:
    from lmcache.config.file import read_yaml  # PyYAML only where a file is given

    given: dict[str, _Given] = {}
    for key, value in read_yaml(path).items():
        name = key.replace("-", "_")
        where = f"{key} in {path}"
        if name not in known:
            raise ConfigError(_sentence(f"{where} is not an option{did_you_mean(name, list(known))}"))
        if name in given:
            raise ConfigError(f"{path} gives {key} twice, with dashes and with underscores.")
        if value is None:
            raise ConfigError(f"{where} has no value.")
        given[name] = _Given(where, value)
    return given
