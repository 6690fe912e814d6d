"""`lmcache quota set|get|list|delete`: how much of a running server's cache each cache salt may keep."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any

from lmcache.cli.arguments import Arguments
from lmcache.cli.http import DEFAULT_URL, TOKEN_VARIABLE, answer_of, request
from lmcache.cli.output import Report
from lmcache.config.values import Number
from lmcache.core.limits import MAX_QUOTA_GB

_ABOUT = {
    "set": "Sets how much the objects of one cache salt may keep in L1 under --eviction-policy IsolatedLRU.",
    "get": "Shows the quota of one cache salt and what it takes in L1.",
    "list": "Shows every cache salt that has a quota or takes room in L1.",
    "delete": "Removes the quota of one cache salt. Under IsolatedLRU nothing of it is kept from then on.",
}
_CHANGES = f" From another host the server's admin token is needed, in {TOKEN_VARIABLE}."
_SHOWS = f" From another host without the server's admin token in {TOKEN_VARIABLE} salts are shown as digests."
_NEEDED_ELSEWHERE = {"set": _CHANGES, "get": _CHANGES, "list": _SHOWS, "delete": _CHANGES}


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
    if verb == "list":
        answer = request(options.url, "GET", "/quota", timeout_seconds=options.timeout)
    else:
        method = {"set": "PUT", "get": "GET", "delete": "DELETE"}[verb]
        path = "/quota/" + urllib.parse.quote(options.cache_salt, safe="")
        body = {"limit_gb": options.limit_gb} if verb == "set" else None
        answer = request(options.url, method, path, body, timeout_seconds=options.timeout)
    with answer_of(options.url):
        quotas = answer["quotas"] if verb == "list" else [answer]
        report = _listed(quotas) if verb == "list" else _shown(answer)
        if "enforced" not in answer:  # of a coordinator
            behind = sorted({str(name) for quota in quotas for name in quota["behind"]})
            report.add("behind", "Not told yet", behind, ", ".join(behind) or "nobody")
        else:
            if not answer["enforced"]:
                report.text("This server does not enforce quotas: it runs without --eviction-policy IsolatedLRU.")
            report.metrics["enforced"] = answer["enforced"]
    report.emit(options)
    return 0


def _shown(quota: dict[str, Any]) -> Report:
    report = Report("Quota")
    report.add("cache_salt", "Cache salt", quota["cache_salt"])
    report.add("limit_gb", "Limit", quota["limit_gb"], _limit_text(quota))
    takes = "Takes on all servers" if "behind" in quota else "Takes in L1"
    report.add("current_usage_gb", takes, quota["current_usage_gb"], f"{quota['current_usage_gb']:.3f} GB")
    report.add("exists", "Was set", quota["exists"], "yes" if quota["exists"] else "no")
    return report


def _listed(quotas: list[dict[str, Any]]) -> Report:
    report = Report("Quotas")
    for quota in quotas:
        shown = f"{quota['current_usage_gb']:.3f} of {_limit_text(quota)}"
        report.add(quota["cache_salt"], quota["cache_salt"], quota, shown)
    if not quotas:
        report.text("No cache salt has a quota or takes room.")
    report.metrics = {"quotas": quotas}
    return report


def _limit_text(quota: dict[str, Any]) -> str:
    return f"{quota['limit_gb']:.3f} GB" if quota["exists"] else "0 GB (none set)"
