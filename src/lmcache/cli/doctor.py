"""`lmcache doctor`: looks at the machine and says, for each thing, whether it is well and what to do."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmcache.cli import doctor_checks
from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report
from lmcache.core.limits import GIB

_PORTS = {"--port": 5555, "--http-port": 8080, "--prometheus-port": 9090}
_DETAILS_SHOWN = 8  # of one check
_INDENT = " " * 9


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "doctor", "Checks this machine. Exit code 0: nothing stands in the way (notes do not count); 1: something does."
    )
    arguments.add_number("--l1-size-gb", 0.0, "is there room for an L1 of that size?", unit="GB", minimum=0)
    arguments.add_argument(
        "--folder", action="append", default=[], metavar="PATH", help="can L2 live in this folder? May be repeated"
    )
    arguments.add_argument(
        "--skip-import", action="store_true", help="do not import vLLM and the connector, which takes some seconds"
    )
    options = arguments.read(argv)
    report = Report("Doctor")
    checks: list[dict[str, Any]] = []
    for verdict in _verdicts(options):
        checks.append(dataclasses.asdict(verdict))
        report.text(f"{verdict.level:<8} {verdict.name}: {verdict.found}")
        for detail in verdict.details[:_DETAILS_SHOWN]:
            report.text(f"{_INDENT}{detail}")
        if len(verdict.details) > _DETAILS_SHOWN:
            report.text(f"{_INDENT}and {len(verdict.details) - _DETAILS_SHOWN} more, which --format json lists")
        if verdict.remedy and verdict.level != doctor_checks.OK:
            report.text(f"{_INDENT}-> {verdict.remedy}")
    if not options.folder:
        report.text(f"{_INDENT}(--folder PATH also checks a folder for L2)")
    problems = sum(check["level"] == doctor_checks.PROBLEM for check in checks)
    report.metrics = {"problems": problems, "checks": checks}
    report.emit(options)
    return 1 if problems else 0


def _verdicts(options: argparse.Namespace) -> Iterator[doctor_checks.Verdict]:
    yield doctor_checks.shared_memory(int(options.l1_size_gb * GIB))
    yield doctor_checks.left_behind()
    yield doctor_checks.locked_memory()
    yield doctor_checks.open_files()
    core = doctor_checks.native_core()
    yield core
    if core.level != doctor_checks.PROBLEM:
        yield doctor_checks.io_uring()
    for folder in options.folder:
        yield doctor_checks.folder(Path(folder))
    for flag, number in _PORTS.items():
        yield doctor_checks.port(number, flag)
    if sys.stderr.isatty() and not options.quiet and not options.skip_import:
        print("importing vLLM ...", file=sys.stderr)
    yield from doctor_checks.engine(not options.skip_import)
