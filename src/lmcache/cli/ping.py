"""`lmcache ping`: whether a server or an engine answers, and in what time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.http import DEFAULT_URL, ENGINE_KEY_VARIABLE, ENGINE_URL, HttpRefused, request
from lmcache.cli.output import Report
from lmcache.config.values import Choice
from lmcache.transport.curve_keys import CurveFiles

_PATHS = {"kvcache": "/healthcheck", "engine": "/health"}
_OF_COORDINATOR = "/healthz"


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "ping",
        "Asks a cache server or a coordinator (kvcache), or a vLLM engine (engine), whether it is healthy. Exit code "
        "0: it is.",
    )
    arguments.add_value("target", Choice(tuple(_PATHS)), "what to ask", nargs="?", default="kvcache")
    arguments.add_argument("--url", default="", help=f"HTTP address (default: {DEFAULT_URL}; engine: {ENGINE_URL})")
    arguments.add_argument(
        "--rpc-url",
        default="",
        metavar="URL",
        help="ask where engines do instead, like tcp://localhost:5555 or ipc:///run/lmcache.sock",
    )
    arguments.add_curve()
    arguments.add_number("--timeout", 5.0, "give up after that long", unit="seconds", above=0)
    options = arguments.read(argv)
    url = options.rpc_url or options.url or (DEFAULT_URL if options.target == "kvcache" else ENGINE_URL)
    milliseconds = (
        _ping_rpc(url, options.timeout, arguments.curve(options))
        if options.rpc_url
        else _ping_http(url, options.target, options.timeout)
    )
    report = Report("Ping")
    report.add("status", "Status", "OK")
    report.add("url", "URL", url)
    report.add("round_trip_ms", "Round trip", round(milliseconds, 3), f"{milliseconds:.2f} ms")
    report.emit(options)
    return 0


def _ping_http(url: str, target: str, timeout_seconds: float) -> float:
    token = os.environ.get(ENGINE_KEY_VARIABLE, "") if target == "engine" else None
    try:
        return _asked(url, _PATHS[target], token, timeout_seconds)
    except HttpRefused as refusal:
        if target == "engine" or refusal.status != 404:
            raise
        try:
            return _asked(url, _OF_COORDINATOR, token, timeout_seconds)
        except HttpRefused:
            raise refusal from None


def _asked(url: str, path: str, token: str | None, timeout_seconds: float) -> float:
    """Milliseconds to the answer."""
    started = time.perf_counter()
    request(url, "GET", path, token=token, timeout_seconds=timeout_seconds)
    return (time.perf_counter() - started) * 1e3


def _ping_rpc(url: str, timeout_seconds: float, curve: CurveFiles | None) -> float:
    from lmcache.client.client import Client
    from lmcache.protocol.messages import Ping

    client = Client(url, map_memory=False, curve=curve)  # the server may be on another host
    try:
        client.connect(timeout_seconds)
        started = time.perf_counter()
        client.call("ping", Ping(), timeout_seconds)
        return (time.perf_counter() - started) * 1e3
    finally:
        client.close()
