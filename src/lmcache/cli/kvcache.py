"""`lmcache kvcache clear`: empties a running server's tiers."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.http import DEFAULT_URL, TOKEN_VARIABLE, answer_of, request
from lmcache.cli.output import Report, bytes_text
from lmcache.config.values import Choice


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "kvcache clear",
        "Removes what a running server has cached. What an engine is reading goes when it has finished. From another "
        f"host the server's admin token is needed, in {TOKEN_VARIABLE}.",
    )
    arguments.add_argument("--url", default=DEFAULT_URL, help="the server's HTTP address")
    arguments.add_value("--tier", Choice(("l1", "l2", "all")), "what to empty", default="l1")
    arguments.add_number("--timeout", 60.0, "give up waiting after that long", unit="seconds", above=0)
    options = arguments.read(argv[1:])
    answer = request(options.url, "POST", "/cache/clear", {"tier": options.tier}, timeout_seconds=options.timeout)
    report = Report("KV cache clear")
    report.add("status", "Status", "OK")
    report.add("tier", "Tier", options.tier)
    with answer_of(options.url):
        report.add("objects", "Objects removed", answer["objects"])
        report.add("bytes", "Bytes freed", answer["bytes"], bytes_text(answer["bytes"]))
    report.emit(options)
    return 0
