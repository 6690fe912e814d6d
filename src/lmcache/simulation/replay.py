"""What a tier of a given size would have hit, by the server's own eviction code: the native index without memory behind
it. Every chunk is one object, as large as the others of its model."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcache._native import L1Core
from lmcache.core.key_batch import ChunkHashes
from lmcache.core.rounding import div_ceil
from lmcache.simulation.trace import Lookup

_UNIT_BYTES = 4096  # addresses are only numbers here; the index wants them aligned
_OWNER = 1
_FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one policy at one size. Chunks of lookups that asked for them and found them; `ceiling` is what an
    endless tier would have found."""

    policy: str
    capacity_bytes: int
    requested_chunks: int
    hit_chunks: int
    evicted_objects: int

    @property
    def hit_rate(self) -> float:
        return self.hit_chunks / self.requested_chunks if self.requested_chunks else 0.0


def replay(
    trace: Sequence[Lookup],
    policy: str,
    capacity_bytes: int,
    *,
    chunk_bytes: int = 0,
    limits: Mapping[str, int] | None = None,
) -> Outcome:
    """Looks up each prompt, stores what was missing, and marks the whole prompt as used, one request after the other.

    `chunk_bytes` stands in where the trace does not say how large a chunk is. `limits` are the bytes of each salt
    under IsolatedLRU. The smallest chunk size is the unit: sizes are rounded up to it.
    """
    unit_bytes = min((lookup.chunk_bytes or chunk_bytes for lookup in trace), default=1)
    capacity_units = max(1, capacity_bytes // unit_bytes)
    core = L1Core(capacity_units * _UNIT_BYTES, 0, _UNIT_BYTES, policy)
    core.set_committed(capacity_units * _UNIT_BYTES)
    for salt, limit_bytes in (limits or {}).items():
        core.set_limit(salt, limit_bytes // unit_bytes * _UNIT_BYTES)
    digests: dict[tuple[str, str, int, int], bytes] = {}
    requested = hits = 0
    for lookup in trace:
        if not lookup.chunks:
            continue
        size_bytes = lookup.chunk_bytes or chunk_bytes
        name = (lookup.model_name, lookup.cache_salt, lookup.chunk_tokens, size_bytes)
        namespace = digests.get(name)
        if namespace is None:
            namespace = digests[name] = hashlib.sha256(repr(name).encode()).digest()
        sizes = struct.pack("<Q", div_ceil(size_bytes, unit_bytes) * _UNIT_BYTES)
        acquired = core.acquire(_OWNER, namespace, lookup.hashes, _FOREVER)
        requested += lookup.chunks
        hits += acquired.chunks
        if acquired.chunks < lookup.chunks:
            reserved = core.reserve(_OWNER, namespace, lookup.cache_salt, sizes, lookup.hashes, _FOREVER)
            core.commit(reserved.reservation)
        core.release(acquired.lease)
        core.touch(namespace, lookup.hashes)
        core.enforce_limits()
    return Outcome(policy, capacity_bytes, requested, hits, core.stats()["evicted_objects"])


def ceiling(trace: Sequence[Lookup]) -> float:
    """The hit rate of an endless tier."""
    seen: set[tuple[str, str, bytes]] = set()
    requested = hits = 0
    for lookup in trace:
        prompt = [(lookup.model_name, lookup.cache_salt, chunk_hash) for chunk_hash in ChunkHashes(lookup.hashes)]
        found = next((index for index, key in enumerate(prompt) if key not in seen), len(prompt))
        requested += len(prompt)
        hits += found
        seen.update(prompt)
    return hits / requested if requested else 0.0


def footprint_bytes(trace: Sequence[Lookup], chunk_bytes: int) -> int:
    """What all the chunks of a trace take together."""
    sizes: dict[tuple[str, str, bytes], int] = {}
    for lookup in trace:
        for chunk_hash in ChunkHashes(lookup.hashes):
            key = (lookup.model_name, lookup.cache_salt, chunk_hash)
            sizes[key] = lookup.chunk_bytes or chunk_bytes
    return sum(sizes.values())
