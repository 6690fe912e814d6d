"""`lmcache config`: the options of a server and the keys of its adapters, without the server."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report, write
from lmcache.config.spec import ServerConfig

_ABOUT = {
    "check": "Checks server options and says what is wrong with them (exit code 2) or could be meant otherwise.",
    "show": "Prints the server options that result, in the form of a --config file, secrets hidden.",
}


def run(argv: Sequence[str]) -> int:
    which, rest = argv[0], list(argv[1:])
    arguments = Arguments(
        f"config {which}", f"{_ABOUT[which]} Takes every option of lmcache server, such as --config FILE, beside these."
    )
    if "--help" in rest or "-h" in rest:
        arguments.read(["--help"])
    options, server_options = arguments.read_own(rest)
    return {"check": _check, "show": _show}[which](server_options, options)


def _check(server_options: Sequence[str], options: argparse.Namespace) -> int:
    from lmcache.startup import plan  # as `lmcache server` begins

    planned = plan(server_options, os.environ)
    planned.discard()
    report = Report("Configuration check")
    report.add("valid", "Valid", True, "yes")
    report.metrics["notes"] = list(planned.notes)
    for sentence in planned.notes:
        report.text(f"note: {sentence}")
    report.emit(options)
    return 0


def _show(server_options: Sequence[str], options: argparse.Namespace) -> int:
    from lmcache.config.redact import redacted
    from lmcache.startup import read

    loaded, adapters = read(server_options, os.environ)
    complete = dataclasses.replace(loaded.config, l2_adapter=[adapter.as_json() for adapter in adapters])
    values = redacted(complete) | dict.fromkeys(loaded.random)  # the same every time: what is random is left out
    if options.format == "json":
        report = Report("Configuration")
        report.metrics = {
            name: {"value": value, "source": loaded.sources.get(name, "default")} for name, value in values.items()
        }
        report.emit(options)
    else:
        write(_as_yaml(values, loaded.sources), options)
    return 0


def _as_yaml(values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    import yaml

    lines = []
    for option in dataclasses.fields(ServerConfig):
        if values[option.name] is None:
            lines.append(f"{f'# {option.name}: a new one at each start':<56}  # default")
            continue
        text = yaml.safe_dump({option.name: values[option.name]}, sort_keys=False, width=1000).rstrip("\n")
        head, newline, tail = text.partition("\n")
        lines.append(f"{head:<56}  # {sources.get(option.name, 'default')}{newline}{tail}")
    return "\n".join(lines) + "\n"
