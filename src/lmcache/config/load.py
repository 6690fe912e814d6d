"""Merges flags, environment and file into one ServerConfig. Flags win over environment, environment over file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.config import unbuilt
from lmcache.config.check import conflicts
from lmcache.config.spec import ADAPTER_KIND, Option, ServerConfig, flag, options, variable
from lmcache.config.values import Listed, Switch, nearest
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "LMCACHE_CONFIG"
_OF_OTHERS = {
    *("LMCACHE_LOG_LEVEL", "LMCACHE_ADMIN_TOKEN", "LMCACHE_USE_UPSTREAM_MP", CONFIG_VARIABLE),
    *("LMCACHE_REQUEST_TELEMETRY_TYPE", "LMCACHE_REQUEST_TELEMETRY_ENDPOINT"),  # of engines
}
_KUBERNETES = re.compile(r"LMCACHE_(.*_)?(SERVICE_(HOST|PORT.*)|PORT_\d+_.*)")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")
_STAND_INS = {"l1_size_gb": 1.0, "eviction_policy": "LRU"}  # for required options that are missing or refused

_Known = Mapping[str, tuple[Option, object]]


@dataclass(frozen=True)
class Loaded:
    config: ServerConfig
    sources: Mapping[str, str]  # option name -> the flag, variable or file that set it; defaults are not listed
    random: frozenset[str]  # options at a default that is random for each server
    ignored: Sequence[str] = ()  # LMCACHE_ variables that are not options


@dataclass(frozen=True)
class _Given:
    where: str  # how the message names it: "--port", "LMCACHE_PORT", "port in server.yaml"
    value: object


@dataclass
class _Read:
    """What the sources give. Options in `refused` are reported already and not checked further."""

    problems: Problems
    given: dict[str, _Given] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    file: str = ""
    file_unread: bool = False  # required options may be in it, so none is reported as missing

    def refuse(self, sentence: str, *names: str) -> None:
        self.problems.add(sentence if sentence.endswith(("?", ".")) else sentence + ".")
        self.refused.update(names)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """Reads, converts and checks. ConfigError lists every problem, a sentence each."""
    problems = Problems()
    loaded = draft(argv, environ, problems)
    problems.raise_all()
    return loaded


def draft(argv: Sequence[str], environ: Mapping[str, str], problems: Problems) -> Loaded:
    """Loads like `load`, but adds refusals to `problems` and puts a default in place of a refused value, {} for an
    adapter."""
    known = options()
    read = _Read(problems)
    from_flags = _read_flags(argv, known, read)
    from_environment = _read_environment(environ, known, read)
    from_file = _read_file(read.file or environ.get(CONFIG_VARIABLE, ""), known, read)
    read.given = {**from_file, **from_environment, **from_flags}
    values: dict[str, Any] = {}
    for name, given in read.given.items():
        _convert(name, given, *known[name], values, read)
    for name, (option, default) in known.items():
        if default is dataclasses.MISSING and name not in values:
            if name not in read.refused and not read.file_unread:
                about = re.split("[:;]", option.help)[0]
                read.refuse(
                    f"{flag(name)} is required ({about}): give it as a flag, as {variable(name)} or as {name} in the "
                    f"file of {CONFIG_FLAG}.",
                    name,
                )
            values[name] = _STAND_INS[name]
    config = ServerConfig(**values)
    for names, sentence in conflicts(config):
        if not names & read.refused:
            problems.add(sentence)
    sources = {name: given.where for name, given in read.given.items()}
    return Loaded(config, sources, frozenset(config.random_names() - set(sources)), read.ignored)


def file_sources(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """How a sentence names each option that the file gives, also where a flag or a variable wins."""
    known, read = options(), _Read(Problems())
    _read_flags(argv, known, read)
    given = _read_file(read.file or environ.get(CONFIG_VARIABLE, ""), known, read)
    return {name: item.where for name, item in given.items()}


def is_of_kubernetes(value: str) -> bool:
    """Whether Kubernetes set this variable: it sets LMCACHE_PORT=tcp://... beside a service that is called lmcache."""
    return bool(_KUBERNETES_PORT.match(value))


def refuse_unreadable(argv: Sequence[str]) -> None:
    """ConfigError for words that are no option of a server, or an option without its value. What the options are to be
    is not looked at."""
    problems = Problems()
    _read_flags(argv, options(), _Read(problems))
    problems.raise_all()


def parse_adapter_text(where: str, text: str) -> dict[str, Any]:
    """The JSON object of one --l2-adapter. ConfigError begins with `where`."""
    try:
        return ADAPTER_KIND.parse(text)
    except ValueError as error:
        sentence = f"{where} {error}"
        raise ConfigError(sentence if sentence.endswith(("?", ".")) else sentence + ".") from None


def _convert(name: str, given: _Given, option: Option, default: object, values: dict[str, Any], read: _Read) -> None:
    try:
        if isinstance(option.kind, Listed):
            values[name] = _convert_list(name, given, option.kind, read)
        else:
            values[name] = option.kind.parse(given.value)
    except ValueError as error:
        read.refuse(f"{given.where} {error}", name)
        return
    if option.unbuilt and name not in read.refused and values[name] != default:
        read.refuse(f"{given.where} is not built yet: {option.unbuilt}.", name)


def _convert_list(name: str, given: _Given, kind: Listed, read: _Read) -> list[object]:
    found: list[object] = []
    items = kind.items(given.value)
    option, of_file, file = given.where.partition(" in ")
    for number, item in enumerate(items, 1):
        try:
            found.append(kind.item.parse(item))
        except ValueError as error:
            which = f" {number}" if len(items) > 1 else ""
            read.refuse(f"{option}{which}{of_file}{file} {error}", name)
            found.append({})
    return found


def _read_flags(argv: Sequence[str], known: _Known, read: _Read) -> dict[str, _Given]:
    """The flags by option. A repeated flag replaces the value, or adds to a list."""
    names = {flag(name): name for name in known}
    switches = {flag(name) for name, (option, _) in known.items() if isinstance(option.kind, Switch)}
    given: dict[str, _Given] = {}
    rest = list(argv)
    while rest:
        word, equals, attached = rest.pop(0).partition("=")
        if not word.startswith("--"):
            read.refuse(f"{word!r} is not expected: lmcache server takes only options, which begin with --.")
            if word.startswith("-"):
                _take_values(rest, several=True)
            continue
        positive = "--" + word[5:]
        negated = word.startswith("--no-") and positive in switches
        name = names.get(positive if negated else word)
        if name is None and word != CONFIG_FLAG:
            allowed = {**names, CONFIG_FLAG: ""}
            _refuse_unknown(word, word[2:].replace("-", "_"), word, allowed, read, of=" of lmcache server")
            _take_values(rest, several=True)
            continue
        kind = known[name][0].kind if name is not None else None
        if name is not None and isinstance(kind, Switch):
            if negated and equals:
                read.refuse(f"{word} takes no value.", name)
            else:
                given[name] = _Given(word, not negated if not equals else attached)
            continue
        values = [attached] if equals else _take_values(rest, several=isinstance(kind, Listed))
        if not values:
            read.refuse(f"{word} needs a value.", *([name] if name is not None else []))
        elif name is None:
            read.file = values[0]
        elif isinstance(kind, Listed):
            before = given[name].value if name in given else []
            assert isinstance(before, list)
            given[name] = _Given(word, before + values)
        else:
            given[name] = _Given(word, values[0])
    return given


def _take_values(rest: list[str], *, several: bool) -> list[str]:
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not values):
        values.append(rest.pop(0))
    return values


def _refuse_unknown(
    where: str, name: str, written: str, allowed: Mapping[str, str], read: _Read, *, of: str = ""
) -> None:
    """`written` is the unknown flag or key, `allowed` maps the valid ones to their options."""
    if instead := unbuilt.option(name):
        read.refuse(f"{where} is not an option{of}: {instead}.")
    elif instead := unbuilt.in_process_key(name):
        read.refuse(f"{where} configures LMCache inside an engine, not a server: {instead}.")
    else:
        meant = nearest(written, list(allowed))
        guess = f"; did you mean {meant}?" if meant else "; lmcache server --help lists them"
        # The suggested option counts as given, so that it is not reported as missing, too.
        read.refuse(f"{where} is not an option{of}{guess}", *filter(None, [allowed.get(meant)]))


def _read_environment(environ: Mapping[str, str], known: _Known, read: _Read) -> dict[str, _Given]:
    """The variables named like options. Near misses are refused; other LMCACHE_ names are ignored and listed."""
    names = {variable(name): name for name in known}
    given: dict[str, _Given] = {}
    for key, value in environ.items():
        if not key.startswith("LMCACHE_") or key in _OF_OTHERS or is_of_kubernetes(value):
            continue
        if name := names.get(key):
            given[name] = _Given(key, value)
        elif _KUBERNETES.fullmatch(key):
            continue
        elif meant := nearest(key, [*names, *sorted(_OF_OTHERS)], cutoff=0.9):
            read.refuse(
                f"{key} in the environment is not an option; did you mean {meant}?", *filter(None, [names.get(meant)])
            )
        else:
            read.ignored.append(key)
    return given


def _read_file(path: str, known: _Known, read: _Read) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    if not path:
        return given
    from lmcache.config.file import read_yaml  # PyYAML only where a file is given

    try:
        content = read_yaml(path, CONFIG_FLAG if read.file else CONFIG_VARIABLE)
    except ConfigError as error:
        read.refuse(str(error))
        read.file_unread = True
        return {}
    for key, value in content.items():
        name = key.replace("-", "_")
        where = f"{key} in {path}"
        if name not in known:
            _refuse_unknown(where, name, name, {option: option for option in known}, read)
        elif name in given:
            read.refuse(f"{path} gives {key} twice, with dashes and with underscores.", name)
        elif value is None:
            read.refuse(f"{where} has no value.", name)
        else:
            given[name] = _Given(where, value)
    return given
