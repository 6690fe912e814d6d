"""`lmcache doctor`: looks at the machine and says, for each thing, whether it is well and what to do."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmcache.cli import doctor_checks, doctor_options, doctor_server
from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report
from lmcache.config.load import refuse_unreadable
from lmcache.config.spec import ServerConfig
from lmcache.core.address import socket_path
from lmcache.core.limits import GIB
from lmcache.l2.adapter_config import AdapterConfig

_PORTS = {"--port": 5555, "--http-port": 8080, "--prometheus-port": 9090}
_DETAILS_SHOWN = 8  # of one check
_INDENT = " " * 9


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "doctor",
        "Checks this machine. Exit code 0: nothing stands in the way (notes do not count); 1: something does. With the "
        "options of lmcache server it also checks what a start with them would meet: files, keys, ports, the backends "
        "of adapters. With --url it asks a running server what its figures say.",
        [
            "lmcache doctor --l1-size-gb 60 --folder /data/lmcache",
            "lmcache doctor --config server.yaml",
            "lmcache doctor --url http://localhost:8080",
        ],
    )
    arguments.add_argument("--url", default="", help="HTTP address of a running server that is checked, too")
    arguments.add_number("--timeout", 10.0, "what takes longer is no answer", unit="seconds", above=0)
    arguments.add_number("--l1-size-gb", 0.0, "is there room for an L1 of that size?", unit="GB", minimum=0)
    arguments.add_argument(
        "--folder", action="append", default=[], metavar="PATH", help="can L2 live in this folder? May be repeated"
    )
    arguments.add_argument(
        "--skip-import", action="store_true", help="do not import vLLM and the connector, which takes some seconds"
    )
    if "--help" in argv or "-h" in argv:
        arguments.read(["--help"])
    options, server_options = arguments.read_own(argv)
    refuse_unreadable(server_options)
    report = Report("Doctor")
    checks: list[dict[str, Any]] = []
    for verdict in _verdicts(options, server_options):
        checks.append(dataclasses.asdict(verdict))
        report.text(f"{verdict.level:<8} {verdict.name}: {verdict.found}")
        for detail in verdict.details[:_DETAILS_SHOWN]:
            report.text(f"{_INDENT}{detail}")
        if len(verdict.details) > _DETAILS_SHOWN:
            report.text(f"{_INDENT}and {len(verdict.details) - _DETAILS_SHOWN} more, which --format json lists")
        if verdict.remedy and verdict.level != doctor_checks.OK:
            report.text(f"{_INDENT}-> {verdict.remedy}")
    if not (options.folder or server_options):
        report.text(f"{_INDENT}(--folder PATH also checks a folder for L2)")
    problems = sum(check["level"] == doctor_checks.PROBLEM for check in checks)
    report.metrics = {"problems": problems, "checks": checks}
    report.emit(options)
    return 1 if problems else 0


def _verdicts(options: argparse.Namespace, server_options: Sequence[str]) -> Iterator[doctor_checks.Verdict]:
    config: ServerConfig | None = None
    adapters: Sequence[AdapterConfig] = ()
    if server_options:
        if options.l1_size_gb:
            server_options = [*server_options, "--l1-size-gb", str(options.l1_size_gb)]
        found = doctor_options.configured(server_options, os.environ)
        config, adapters = found.config, found.adapters
        yield found.verdict
        if config is not None:
            yield from doctor_options.secrets(config, adapters)
    yield doctor_checks.shared_memory(config.l1_size_bytes if config is not None else int(options.l1_size_gb * GIB))
    yield doctor_checks.large_pages()
    yield doctor_checks.left_behind()
    yield doctor_checks.locked_memory()
    yield doctor_checks.open_files()
    core = doctor_checks.native_core()
    yield core
    if core.level != doctor_checks.PROBLEM:
        yield doctor_checks.io_uring()
    yield doctor_checks.clock()
    for folder in dict.fromkeys([*map(Path, options.folder), *doctor_options.folders(adapters)]):
        yield doctor_checks.folder(folder)
    for flag, number in _ports(config).items():
        yield doctor_checks.port(number, flag)
    if options.url:
        yield from doctor_server.server(options.url, options.timeout)
    if sys.stderr.isatty() and not options.quiet and not options.skip_import:
        print("importing vLLM ...", file=sys.stderr)
    yield from doctor_checks.engine(not options.skip_import)


def _ports(config: ServerConfig | None) -> dict[str, int]:
    """By their flags, without those that are not used or that the system chooses."""
    if config is None:
        return _PORTS
    ports = {"--port": config.port, "--http-port": config.http_port, "--prometheus-port": config.prometheus_port}
    if socket_path(config.host):
        del ports["--port"]
    return {flag: number for flag, number in ports.items() if number}
