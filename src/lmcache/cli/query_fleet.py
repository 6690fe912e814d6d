"""What `lmcache query` asks and shows of a fleet: its servers, and which of them have which chunks of a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.cli.http import answer_of, request
from lmcache.cli.output import Report, bytes_text, seconds_text
from lmcache.errors import ConfigError, ServerUnavailable

_HEADS = ("server", "address", "heartbeat", "L1 used", "in L1", "in L2", "state")
_STATES = {"nothing": "nothing told", "gap": "events missing", "waits": "waits to resync", "resync": "resyncing"}


def ask(options: argparse.Namespace, prompt: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request and the answer as `query.report_of` takes them: a tier is a server's, such as "machine-a l1"."""
    if "tokens" not in prompt:
        raise ConfigError("lmcache query --coordinator takes tokens: give --tokenizer FOLDER, which makes them here.")
    if not options.model:
        raise ConfigError("lmcache query --coordinator needs --model: a coordinator has objects of many.")
    ranks = options.world_size
    body = {
        "token_ids": prompt["tokens"],
        "model_name": options.model,
        "world_size": ranks,
        "cache_salt": options.salt,
    }
    answer = request(options.coordinator, "POST", "/directory/lookup", body, timeout_seconds=options.timeout)
    asked = {"model_name": options.model, "cache_salt": options.salt, "tokens": prompt["tokens"]}
    with answer_of(options.coordinator, "a coordinator"):
        results = answer["results"]
        chunks = [_chunk(results[first : first + ranks]) for first in range(0, len(results), ranks)]
        prefix = _longest_prefix([servers for _, servers in chunks])
        shown = {"chunk_tokens": answer["chunk_tokens"], "prefix_chunks": prefix}
        partials = [
            {**_chunk(partial["results"])[0], "tokens": partial["tokens"]}
            for partial in answer.get("partial_chunks", ())  # other coordinators tell of none
        ]
        return asked, {**shown, "chunks": [chunk for chunk, _ in chunks], "partial_chunks": partials}


def _chunk(results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Where all ranks of a chunk are, and at which servers, on whatever tiers."""
    by_rank = [result["placements"] for result in results]
    tiers = [{_tier(place) for place in places} for places in by_rank]
    servers = [{str(place["instance_id"]) for place in places} for places in by_rank]
    found = {"hash": results[0]["key"]["chunk_hash_hex"], "tiers": sorted(set.intersection(*tiers))}
    return found, set.intersection(*servers)


def _tier(place: Mapping[str, Any]) -> str:
    return f"{place['instance_id']} {place['backend'] or place['tier']}"


def _longest_prefix(chunks: Sequence[set[str]]) -> int:
    """Counts the chunks that one server has from the first one on."""
    holders: set[str] | None = None
    for number, servers in enumerate(chunks):
        holders = servers if holders is None else holders & servers
        if not holders:
            return number
    return len(chunks)


# ---- servers ---------------------------------------------------------------------------------------------------------
def servers(options: argparse.Namespace) -> Report:
    """Of GET /fleet, which servers and coordinators have."""
    url = options.coordinator or options.url
    answer = request(url, "GET", "/fleet", timeout_seconds=options.timeout)
    with answer_of(url):
        return servers_report(answer)


def servers_report(answer: Mapping[str, Any]) -> Report:
    if answer["problem"] and not answer["servers"]:
        raise ServerUnavailable(f"The coordinator of this server cannot be asked: {answer['problem']}")
    report = Report("Fleet")
    listed = sorted(answer["servers"], key=lambda server: str(server["instance_id"]))
    report.metrics["instance_timeout_seconds"] = answer["instance_timeout_seconds"]
    if answer["coordinator"]:
        report.add("coordinator", "Coordinator", answer["coordinator"])
        report.add("problem", "Reached", answer["problem"], "no" if answer["problem"] else "yes")
        if answer["problem"]:
            report.text(answer["problem"])
        report.add("age_seconds", "Told", answer["age_seconds"], f"{seconds_text(answer['age_seconds'])} ago")
        report.add("joined", "This server has joined", answer["joined"], "yes" if answer["joined"] else "no")
    report.add("server_count", "Servers", len(listed))
    used, capacity, objects = (
        sum(server[name] for server in listed) for name in ("l1_used_bytes", "l1_capacity_bytes", "l1_objects")
    )
    report.add("l1_used_bytes", "L1 used", used, _used(used, capacity))
    report.add("l1_objects", "Objects in L1", objects)
    report.metrics |= {"l1_capacity_bytes": capacity, "servers": listed}
    if listed:
        report.section("servers")
        report.table(_HEADS, [_server_row(server, answer["age_seconds"]) for server in listed])
    return report


def _server_row(server: Mapping[str, Any], age_seconds: float) -> tuple[str, ...]:
    states = [_STATES.get(server["told"], ""), *(f"{decisions} behind" for decisions in server["behind"])]
    return (
        server["instance_id"],
        server["url"],
        f"{seconds_text(server['silent_seconds'] + age_seconds)} ago",
        _used(server["l1_used_bytes"], server["l1_capacity_bytes"]),
        f"{server['l1_objects']}",
        f"{server['l2_objects']}",
        ", ".join(filter(None, states)) or "-",
    )


def _used(used_bytes: int, capacity_bytes: int) -> str:
    return f"{bytes_text(used_bytes)} of {bytes_text(capacity_bytes)}" if capacity_bytes else bytes_text(used_bytes)
