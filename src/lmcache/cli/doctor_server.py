"""Checks of a running server for `lmcache doctor --url`: what its figures say about the complaints of users."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache import __version__
from lmcache.cli.doctor_checks import NOTE, OK, PROBLEM, Verdict
from lmcache.cli.http import HttpRefused, answer_of, request
from lmcache.cli.output import bytes_text
from lmcache.cli.top_figures import Metrics, parse
from lmcache.errors import LMCacheError
from lmcache.protocol.messages import OLDEST_SUPPORTED_PROTOCOL_VERSION, PROTOCOL_VERSION

_METRICS_OFF = 404
_MANY = 0.5  # of the misses
_FEW_MISSES = 20
_CAUSES = {
    "too_short": ("prompts are shorter than a chunk", "only full chunks are cached: choose a smaller --chunk-size."),
    "evicted": ("what was asked for had been evicted", "L1 is too small for what comes back: --l1-size-gb, or an L2."),
    "over_quota": ("tenants have more than their quota", "lmcache quota set gives them more."),
    "no_room_to_store": ("L1 had no room for new objects", "choose a larger --l1-size-gb, or a lower watermark."),
    "other_layout": (
        "engines of one model have different KV layouts",
        "engines share KV only with the same dtype, parallel sizes and KV cache type.",
    ),
    "l2_deadline": ("an adapter did not answer in time", 'look at its backend, or raise its "timeout_seconds".'),
    "l2_failed": ("an adapter failed", "the server's log says why."),
    "l2_suspended": ("an adapter was left alone after faults", "the server's log says why; mend its backend."),
    "corrupt": ("stored objects did not verify", "test memory and disks: something changes bytes."),
}


def server(url: str, timeout_seconds: float) -> Iterator[Verdict]:
    name = f"server {url}"
    try:
        version = request(url, "GET", "/version", timeout_seconds=timeout_seconds)
        status = request(url, "GET", "/status", timeout_seconds=timeout_seconds)
        metrics = _metrics(url, timeout_seconds)
        health = _health(url, timeout_seconds)
    except LMCacheError as error:
        yield Verdict(name, PROBLEM, str(error), "start it, or give the --url of its --http-port.")
        return
    if health:
        yield Verdict(name, PROBLEM, health, "look at its log; restart it if it stays so.")
    else:
        yield Verdict(name, OK, "healthy")
    try:
        with answer_of(url):
            yield from [
                versions(version),
                hash_seed(status, os.environ.get("PYTHONHASHSEED", "")),
                *engines(status),
                *adapters(status),
                *memory(status),
                *misses(metrics),
                *faults(metrics),
            ]
    except LMCacheError as error:
        yield Verdict(name, PROBLEM, str(error), "give the --url of a cache server's --http-port.")


def _health(url: str, timeout_seconds: float) -> str:
    try:
        request(url, "GET", "/healthcheck", timeout_seconds=timeout_seconds)
    except HttpRefused as error:
        return str(error)
    return ""


def _metrics(url: str, timeout_seconds: float) -> Metrics:
    try:
        with answer_of(url):
            return parse(str(request(url, "GET", "/metrics", timeout_seconds=timeout_seconds)))
    except HttpRefused as error:
        if error.status != _METRICS_OFF:
            raise
        return {}


def versions(server: Mapping[str, Any]) -> Verdict:
    """This package, which engines here would use, beside the server."""
    name, protocol = "versions", server["protocol_version"]
    found = f"here {__version__}, the server {server['version']}"
    if protocol["oldest_supported"] > PROTOCOL_VERSION or protocol["current"] < OLDEST_SUPPORTED_PROTOCOL_VERSION:
        return Verdict(
            name,
            PROBLEM,
            f"{found}: they have no protocol in common ({PROTOCOL_VERSION} and {protocol['current']})",
            "install the same version of lmcache for engines and server; engines run uncached until then.",
        )
    if server["version"] != __version__:
        remedy = "nothing needs to be done: their protocol is the same; restart what was updated to use it."
        return Verdict(name, NOTE, found, remedy)
    return Verdict(name, OK, found)


def hash_seed(status: Mapping[str, Any], seed: str) -> Verdict:
    """`seed`: PYTHONHASHSEED of this environment, which may be that of the server."""
    algorithm = status["hash_algorithm"]
    if algorithm != "builtin":
        return Verdict("chunk hashes", OK, f"{algorithm}, which depends on no PYTHONHASHSEED")
    found = f"builtin, and PYTHONHASHSEED is {seed!r} here" if seed else "builtin, and no PYTHONHASHSEED is set here"
    remedy = "start every server with the same PYTHONHASHSEED, or with --hash-algorithm blake3."
    return Verdict("chunk hashes", NOTE, found, remedy)


def engines(status: Mapping[str, Any]) -> Iterator[Verdict]:
    instances = status["instances"]
    if not instances:
        yield Verdict(
            "engines",
            NOTE,
            "none is registered",
            f"engines name {status['rpc_endpoint']} by lmcache.mp.host and lmcache.mp.port in --kv-transfer-config.",
        )
    for instance in instances:
        name = f"engine {instance['instance_id']}"
        over_socket = [worker for worker in instance["transfer"] if worker["mode"] == "socket"]
        if over_socket:
            reason = over_socket[0]["reason"]
            yield Verdict(
                name,
                NOTE,
                "its KV travels over the socket, which is slower than memory" + (f": {reason}" if reason else ""),
                "on one machine engine and server share /dev/shm: in Docker --ipc=host or --ipc=container:NAME for "
                "both, in Kubernetes one emptyDir of medium Memory at /dev/shm.",
            )
        elif instance["ranks"] and len(instance["workers"]) < instance["ranks"]:
            found = (
                f"{len(instance['workers'])} of {instance['ranks']} workers are registered: nothing hits until all are"
            )
            yield Verdict(name, NOTE, found, "wait for its start, or look at its log.")
        else:
            yield Verdict(name, OK, f"{instance['model_name']}, {len(instance['workers'])} workers")


def adapters(status: Mapping[str, Any]) -> Iterator[Verdict]:
    for adapter in status["l2"]["adapters"]:
        name = f"adapter {adapter['name']}"
        paused = [transfers for transfers in ("loads", "stores") if adapter[f"{transfers}_suspended"]]
        if paused:
            remedy = "the server's log says why; it tries again by itself and goes on when its backend is well."
            yield Verdict(name, PROBLEM, f"{' and '.join(paused)} are suspended after faults", remedy)
        elif adapter["full"]:
            yield Verdict(
                name,
                NOTE,
                f"full with {bytes_text(adapter['used_bytes'])}: nothing new is stored",
                'give its backend room, or "max_capacity_gb" with "eviction" so that old objects leave.',
            )
        elif adapter.get("buffered_fallbacks"):
            yield Verdict(
                name,
                NOTE,
                f"{adapter['buffered_fallbacks']} operations wanted O_DIRECT and went through the page cache",
                'set "use_odirect" to false, or --l1-align-bytes to a multiple of the block size of its disk.',
            )
        elif adapter["abandoned"]:
            found = f"{adapter['abandoned']} operations did not end in time and still hang"
            yield Verdict(name, NOTE, found, "its backend stands still: look at the disk or the network.")
        else:
            yield Verdict(name, OK, f"{adapter['objects']} objects, {bytes_text(adapter['used_bytes'])}")


def memory(status: Mapping[str, Any]) -> Iterator[Verdict]:
    l1 = status["l1"]
    if l1["quarantined_bytes"]:
        yield Verdict(
            "L1",
            NOTE,
            f"{bytes_text(l1['quarantined_bytes'])} are in quarantine: an engine vanished while it wrote there",
            "they come back when it is known to be gone; kill what is left of it.",
        )
    if l1["allocation_failures"]:
        yield Verdict(
            "L1",
            NOTE,
            f"{l1['allocation_failures']} chunks found no room even after eviction",
            "choose a larger --l1-size-gb: requests that run at once hold more than there is.",
        )
    if not (l1["quarantined_bytes"] or l1["allocation_failures"]):
        used = l1["used_bytes"] / l1["capacity_bytes"]
        yield Verdict("L1", OK, f"{used:.0%} of {bytes_text(l1['capacity_bytes'])} used")


def misses(metrics: Metrics) -> Iterator[Verdict]:
    """Causes that most misses have and that something can be done about."""
    counts = {dict(labels)["reason"]: value for labels, value in metrics.get("lmcache_mp_misses_total", {}).items()}
    total = sum(counts.values())
    for reason, (found, remedy) in _CAUSES.items():
        count = counts.get(reason, 0)
        if total >= _FEW_MISSES and count >= _MANY * total:
            yield Verdict("misses", NOTE, f"{count:.0f} of {total:.0f}: {found}", remedy)


def faults(metrics: Metrics) -> Iterator[Verdict]:
    corrupt = sum(metrics.get("lmcache_mp_corrupt_frames_total", {}).values())
    if corrupt:
        remedy = "each was a miss; test memory and disks: something changes bytes."
        yield Verdict("objects", PROBLEM, f"{corrupt:.0f} frames did not verify", remedy)
    internal = sum(metrics.get("lmcache_mp_internal_faults_total", {}).values())
    if internal:
        yield Verdict("faults", NOTE, f"{internal:.0f} that nobody expected", "the server's log has each: report them.")
