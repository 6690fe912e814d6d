"""What `lmcache query --coordinator` asks and shows: which servers of a fleet have which chunks of a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.cli.http import answer_of, request
from lmcache.errors import ConfigError


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
        return asked, {**shown, "chunks": [chunk for chunk, _ in chunks]}


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
