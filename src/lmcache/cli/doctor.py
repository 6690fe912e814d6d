"""`lmcache doctor`: looks at the machine and says, for each thing, whether it is well and what to do."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmcache.cli import machine
from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report
from lmcache.core.limits import GIB

_PORTS = {"--port": 5555, "--http-port": 8080, "--prometheus-port": 9090}


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
    wanted_bytes = int(options.l1_size_gb * GIB)
    show_progress = sys.stderr.isatty() and not options.quiet
    report = Report("Doctor")
    checks: list[dict[str, str]] = []
    for verdict in _verdicts(wanted_bytes, [Path(one) for one in options.folder], options.skip_import, show_progress):
        checks.append(dataclasses.asdict(verdict))
        report.text(f"{verdict.level:<8} {verdict.name}: {verdict.found}")
        if verdict.remedy and verdict.level != machine.OK:
            report.text(f"         -> {verdict.remedy}")
    if not options.folder:
        report.text("         (--folder PATH also checks a folder for L2)")
    problems = sum(check["level"] == machine.PROBLEM for check in checks)
    report.metrics = {"problems": problems, "checks": checks}
    report.emit(options)
    return 1 if problems else 0


def _verdicts(
    wanted_bytes: int, folders: Sequence[Path], skip_import: bool, show_progress: bool
) -> Iterator[machine.Verdict]:
    quick: list[Callable[[], machine.Verdict]] = [
        lambda: machine.shared_memory(wanted_bytes),
        machine.left_behind,
        machine.locked_memory,
        machine.open_files,
        machine.processor,
        machine.io_uring,
    ]
    for check in quick:
        yield check()
    for one in folders:
        yield machine.folder(one)
    for flag, number in _PORTS.items():
        yield machine.port(number, flag)
    if show_progress and not skip_import:
        print("importing vLLM ...", file=sys.stderr)
    yield from machine.engine(not skip_import)
