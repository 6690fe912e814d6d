"""`lmcache quota set|get|list|delete`: how much of a running server's cache each cache salt may keep."""

from __future__ import annotations

import argparse
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from lmcache.cli.arguments import Arguments
from lmcache.cli.http import DEFAULT_URL, TOKEN_VARIABLE, answer_of, request
from lmcache.cli.output import Report
from lmcache.config.values import Number
from lmcache.core.limits import MAX_QUOTA_GB
from lmcache.errors import LMCacheError

_ABOUT = {
    "set": "Sets how much the objects of one cache salt may keep in L1 under --eviction-policy IsolatedLRU.",
    "get": "Shows the quota of one cache salt and what it takes in L1; of a coordinator, on all servers and tiers.",
    "list": "Shows every cache salt that has a quota or takes room in L1; of a coordinator, on any server and tier.",
    "delete": "Removes the quota of one cache salt. Under IsolatedLRU nothing of it is kept from then on.",
}
_CHANGES = f" From another host the admin token is needed, in {TOKEN_VARIABLE}."
_SHOWS = (
    f" From another host without the admin token in {TOKEN_VARIABLE} a server shows digests of salts, and a "
    "coordinator refuses."
)
_NEEDED_ELSEWHERE = {"set": _CHANGES, "get": _CHANGES, "list": _SHOWS, "delete": _CHANGES}
_TELLING_SECONDS, _POLL_SECONDS = 1.0, 0.05


def run(argv: Sequence[str]) -> int:
    verb = argv[0]
    arguments = Arguments(f"quota {verb}", _ABOUT[verb] + _NEEDED_ELSEWHERE[verb])
    if verb != "list":
        arguments.add_argument("cache_salt", help="the salt; _default is the empty one")
    if verb == "set":
        limit = Number("GB", minimum=0, maximum=MAX_QUOTA_GB)
        arguments.add_value("limit_gb", limit, "1 GB is 2^30 bytes", metavar="limit_gb")
    url = "the HTTP address of a server, or of a coordinator for all servers of its fleet"
    arguments.add_argument("--url", default=DEFAULT_URL, help=url)
    arguments.add_number("--timeout", 10.0, "give up waiting after that long", unit="seconds", above=0)
    options = arguments.read(argv[1:])
    path = "/quota" if verb == "list" else "/quota/" + urllib.parse.quote(options.cache_salt, safe="")
    with answer_of(options.url):
        answer = _answer(options, verb, path)
        report = _listed(answer) if verb == "list" else _shown(answer)
        if "enforced" in answer:
            if not answer["enforced"]:
                report.text("This server does not enforce quotas: it runs without --eviction-policy IsolatedLRU.")
            report.metrics["enforced"] = answer["enforced"]
    report.emit(options)
    return 0


def _answer(options: argparse.Namespace, verb: str, path: str) -> dict[str, Any]:
    """A change of a coordinator is shown as it is when all servers have been told, or after `_TELLING_SECONDS`."""
    over_at = time.monotonic() + options.timeout
    method = {"set": "PUT", "delete": "DELETE"}.get(verb, "GET")
    body = {"limit_gb": options.limit_gb} if verb == "set" else None
    answer: dict[str, Any] = request(options.url, method, path, body, timeout_seconds=options.timeout)
    over_at = min(over_at, time.monotonic() + _TELLING_SECONDS)
    while method != "GET" and answer.get("behind") and (left := over_at - time.monotonic()) > 0:
        time.sleep(min(_POLL_SECONDS, left))
        try:
            answer = request(options.url, "GET", path, timeout_seconds=left)
        except LMCacheError:  # the change was made
            break
    return answer


def _shown(quota: dict[str, Any]) -> Report:
    report = Report("Quota")
    report.add("cache_salt", "Cache salt", quota["cache_salt"])
    limit, takes = "Limit", "Takes in L1"
    if is_of_fleet := "enforced" not in quota:
        limit, takes = "Limit for each server", "Takes on all servers and tiers"
    report.add("limit_gb", limit, quota["limit_gb"], _limit_text(quota))
    report.add("current_usage_gb", takes, quota["current_usage_gb"], f"{quota['current_usage_gb']:.3f} GB")
    report.add("exists", "Was set", quota["exists"], "yes" if quota["exists"] else "no")
    if is_of_fleet:
        report.add("behind", "Still being told", quota["behind"], ", ".join(quota["behind"]) or "nobody")
    return report


def _listed(answer: dict[str, Any]) -> Report:
    report, quotas = Report("Quotas"), answer["quotas"]
    for quota in quotas:
        shown = f"{quota['current_usage_gb']:.3f} "
        shown += (
            f"of {_limit_text(quota)}"
            if "enforced" in answer
            else f"GB on all servers and tiers, {_limit_text(quota, ' each')}"
        )
        report.add(quota["cache_salt"], quota["cache_salt"], quota, shown)
    if not quotas:
        report.text("No cache salt has a quota or takes room.")
    report.metrics = {"quotas": quotas}
    return report


def _limit_text(quota: dict[str, Any], each: str = "") -> str:
    return f"{quota['limit_gb']:.3f} GB{each}" if quota["exists"] else f"0 GB{each} (none set)"
