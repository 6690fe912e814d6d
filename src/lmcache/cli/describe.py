"""`lmcache describe`: what a running server holds and does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.cli.arguments import Arguments
from lmcache.cli.describe_engine import describe_engine
from lmcache.cli.http import DEFAULT_URL, ENGINE_KEY_VARIABLE, ENGINE_URL, HttpRefused, answer_of, request
from lmcache.cli.output import Report, bytes_text, seconds_text
from lmcache.config.values import Choice


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "describe",
        "Shows the health and the figures of a running cache server (kvcache), or of a vLLM engine (engine), whose key "
        f"is taken from {ENGINE_KEY_VARIABLE}.",
        ["lmcache describe", "lmcache describe engine --url http://localhost:8000 --format json"],
    )
    arguments.add_value("target", Choice(("kvcache", "engine")), "what to describe", nargs="?", default="kvcache")
    arguments.add_argument("--url", default="", help=f"HTTP address (default: {DEFAULT_URL}; engine: {ENGINE_URL})")
    arguments.add_number("--timeout", 10.0, "give up after that long", unit="seconds", above=0)
    options = arguments.read(argv)
    if options.target == "engine":
        return describe_engine(options.url or ENGINE_URL, options)
    url = options.url or DEFAULT_URL
    status = request(url, "GET", "/status", timeout_seconds=options.timeout)
    try:
        health = "OK"
        request(url, "GET", "/healthcheck", timeout_seconds=options.timeout)
    except HttpRefused as error:
        health = str(error)
    config = request(url, "GET", "/config", timeout_seconds=options.timeout)
    report = Report("LMCache KV cache server")
    report.add("health", "Health", health)
    report.add("url", "URL", url)
    with answer_of(url):
        _add_server(report, status, config)
        _add_l1(report, status["l1"], config)
        for adapter in status["l2"]["adapters"]:
            _add_adapter(report, adapter)
        for instance in status["instances"]:
            _add_instance(report, instance)
        report.metrics = {"health": health, "url": url, **status}
    report.emit(options)
    return 0 if health == "OK" else 1


def _add_server(report: Report, status: dict[str, Any], config: dict[str, Any]) -> None:
    rows = {
        "Version": status["version"],
        "Up for": seconds_text(status["uptime_seconds"]),
        "Engines connect to": status["rpc_endpoint"],
        "Chunk size": f"{status['chunk_tokens']} tokens",
        "Hash algorithm": status["hash_algorithm"],
        "Active sessions": status["sessions"],
        "Leases": status["leases"],
        "Reservations": status["reservations"],
        "Store policy, prefetch policy": f"{config['l2_store_policy']}, {config['l2_prefetch_policy']}",
    }
    _rows(report, rows)


def _add_l1(report: Report, l1: dict[str, Any], config: dict[str, Any]) -> None:
    report.section("L1")
    _rows(
        report,
        {
            "L1 capacity": bytes_text(l1["capacity_bytes"]),
            "L1 memory taken so far": bytes_text(l1["committed_bytes"]),
            "L1 used": f"{bytes_text(l1['used_bytes'])} ({l1['used_bytes'] / l1['capacity_bytes']:.1%})",
            "Cached objects": l1["objects"],
            "Eviction policy": config["eviction_policy"],
            "Evicted objects": l1["evicted_objects"],
        },
    )
    if l1["quarantined_bytes"]:
        _rows(report, {"In quarantine, writer silent": bytes_text(l1["quarantined_bytes"])})


def _add_adapter(report: Report, adapter: dict[str, Any]) -> None:
    report.section(f"L2: {adapter['name']}")
    if "peers" in adapter:
        _rows(report, {f"Peer {peer['address']}": _peer_text(peer) for peer in adapter["peers"]})
        return
    limit = adapter["capacity_bytes"]
    rows = {
        "Type": adapter["type"],
        "Used": bytes_text(adapter["used_bytes"]) + (f" of {bytes_text(limit)}" if limit else ""),
        "Objects": adapter["objects"],
        "Stores, loads under way": f"{adapter['stores_in_flight']}, {adapter['loads_in_flight']}",
    }
    troubles = {"full": "full", "stores_suspended": "stores fail, paused", "loads_suspended": "loads fail, paused"}
    if troubled := [text for key, text in troubles.items() if adapter.get(key)]:
        rows["Trouble"] = ", ".join(troubled)
    _rows(report, rows)


def _peer_text(peer: dict[str, Any]) -> str:
    if peer["refused"]:
        return f"not used: {peer['refused']}"
    if not peer["connected"]:
        return "not reached"
    state = "left alone after faults" if peer["left_alone"] else f"connected by {peer['transport']}"
    return f"{state}, {bytes_text(peer['received_bytes'])} loaded"


def _add_instance(report: Report, instance: dict[str, Any]) -> None:
    report.section(f"Engine: {instance['instance_id']}")
    _rows(
        report,
        {
            "Model": instance["model_name"],
            "Runs": instance["engine"],
            "Workers here, ranks": f"{len(instance['workers'])}, {instance['ranks']}",
            "Sessions, leases": f"{instance['sessions']}, {instance['leases']}",
        },
    )


def _rows(report: Report, rows: dict[str, Any]) -> None:
    for label, value in rows.items():
        report.add(label, label, "-" if value is None else value)
