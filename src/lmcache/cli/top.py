"""`lmcache top`: figures of a running server, again and again."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.http import DEFAULT_URL
from lmcache.cli.output import Report, seconds_text
from lmcache.cli.top_figures import TABLES, Picture, cells, headline, picture, take
from lmcache.errors import ConfigError

_KEYS = "Keys: Tab next table, s and r sort, / filter, space pause, + and - interval, h help, q quit."


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "top",
        "Shows what a running server holds and does, live: L1, hits and misses, engines, adapters, tenants. Rates are "
        f"those of the last interval. {_KEYS}",
        ["lmcache top", "lmcache top --once", "lmcache top --interval 10 --format json"],
    )
    arguments.add_argument("--url", default=DEFAULT_URL, help="the server's HTTP address")
    arguments.add_number("--interval", 2.0, "between two looks", unit="seconds", minimum=0.2, maximum=3600)
    arguments.add_argument(
        "--once", action="store_true", help="print one interval and end; --format json and --output do so, too"
    )
    arguments.add_number("--timeout", 5.0, "what takes longer is no answer", unit="seconds", above=0)
    options = arguments.read(argv)
    if options.once or options.format == "json" or options.output:
        return _once(options)
    _refuse_no_terminal()
    try:
        from lmcache.cli.top_screen import show
    except ImportError:
        raise ConfigError("This Python has no curses: lmcache top --once prints one interval.") from None
    return show(options.url, options.interval, options.timeout)


def _refuse_no_terminal() -> None:
    terminal = os.environ.get("TERM", "")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("lmcache top needs a terminal: --once prints one interval, --format json is for programs.")
    if terminal in ("", "dumb"):
        raise ConfigError(
            f"lmcache top needs a terminal that moves its cursor, and TERM is {terminal!r}: --once prints one interval."
        )


def _once(options: argparse.Namespace) -> int:
    before = take(options.url, options.timeout)
    time.sleep(options.interval)
    sample = take(options.url, options.timeout)
    report_of(options.url, picture(before, sample)).emit(options)
    return 0


def report_of(url: str, seen: Picture) -> Report:
    report = Report("Top")
    report.metrics = {"url": url, **seen.summary, **seen.tables}
    report.text(f"{url}, version {seen.summary['version']}, up {seconds_text(seen.summary['uptime_seconds'])}")
    for line in headline(seen.summary):
        report.text(line)
    for name, columns in TABLES.items():
        if seen.tables[name]:
            report.section(name)
            report.table([column.head for column in columns], cells(columns, seen.tables[name]))
    return report
