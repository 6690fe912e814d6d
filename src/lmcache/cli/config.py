"""`lmcache config check` and `lmcache config show`: the options of a server, without the server."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report, write
from lmcache.config.redact import redacted
from lmcache.config.spec import ServerConfig


def run(argv: Sequence[str]) -> int:
    which, rest = argv[0], list(argv[1:])
    arguments = Arguments(
        f"config {which}", f"{_TEXTS[which]} Takes every option of lmcache server, such as --config FILE, beside these."
    )
    if "--help" in rest or "-h" in rest:
        arguments.read(["--help"])
    options, server_options = arguments.read_own(rest)
    if which == "check":
        return _check(server_options, options)
    from lmcache.startup import read

    loaded, _ = read(server_options, os.environ)
    values = redacted(loaded.config)
    if options.format == "json":
        report = Report("Configuration")
        report.metrics = {
            name: {"value": value, "source": loaded.sources.get(name, "default")} for name, value in values.items()
        }
        report.emit(options)
        return 0
    write(_as_yaml(values, loaded.sources), options)
    return 0


_TEXTS = {
    "check": "Checks server options and says what is wrong with them (exit code 2) or could be meant otherwise.",
    "show": "Prints the server options that result, in the form of a --config file, secrets hidden.",
}


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


def _as_yaml(values: dict[str, object], sources: object) -> str:
    import yaml

    assert hasattr(sources, "get")
    lines = []
    for option in dataclasses.fields(ServerConfig):
        text = yaml.safe_dump({option.name: values[option.name]}, sort_keys=False, width=1000).rstrip("\n")
        head, newline, tail = text.partition("\n")
        lines.append(f"{head:<56}  # {sources.get(option.name, 'default')}{newline}{tail}")
    return "\n".join(lines) + "\n"
