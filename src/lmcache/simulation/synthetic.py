"""A seeded trace of lookups that looks like a chat service: conversations that grow turn by turn behind system prompts
which they share, and now and then a long document that nobody asks about again.

The same seed and settings give the same trace on every machine. The model is described in
docs/how-to/size_with_the_cache_simulator.md.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.simulation.trace import Lookup


@dataclass(frozen=True)
class Workload:
    """Lengths in chunks, times in seconds. What is called a mean is one of an exponential or geometric distribution."""

    requests: int = 4000
    chunk_tokens: int = 256
    chunk_bytes: int = 2 << 20
    applications: int = 24  # each with a system prompt of its own
    popularity: float = 1.0  # exponent of the Zipf law of the applications
    system_chunks: tuple[int, int] = (4, 24)
    turns: float = 5.0  # of a conversation, mean
    turn_chunks: tuple[int, int] = (1, 4)  # that a question and the answer before it add
    think_seconds: float = 60.0  # between the turns of a conversation, mean
    arrival_seconds: float = 2.0  # between conversations, mean
    scan_share: float = 0.1  # of the requests
    scan_chunks: tuple[int, int] = (64, 256)


def generate(workload: Workload, seed: int) -> list[Lookup]:
    """`workload.requests` lookups in the order of time."""
    rng = random.Random(seed)

    def new_chunks(bounds: tuple[int, int]) -> bytes:
        return rng.randbytes(CHUNK_HASH_BYTES * rng.randint(*bounds))

    systems = [new_chunks(workload.system_chunks) for _ in range(workload.applications)]
    weights = [1 / (rank + 1) ** workload.popularity for rank in range(workload.applications)]
    lookups: list[Lookup] = []
    # (when, number, prompt so far; None: the next conversation begins)
    due: list[tuple[float, int, bytes | None]] = [(0.0, 0, None)]
    number = 0
    while len(lookups) < workload.requests:
        seconds, _, prompt = heapq.heappop(due)
        number += 1
        if prompt is None:
            heapq.heappush(due, (seconds + rng.expovariate(1 / workload.arrival_seconds), number, None))
            prompt = rng.choices(systems, weights)[0]
            number += 1
        prompt += new_chunks(workload.turn_chunks)
        lookups.append(_lookup(workload, seconds, prompt))
        if rng.random() >= 1 / workload.turns:
            heapq.heappush(due, (seconds + rng.expovariate(1 / workload.think_seconds), number, prompt))
        if len(lookups) < workload.requests and rng.random() < workload.scan_share / (1 - workload.scan_share):
            lookups.append(_lookup(workload, seconds, new_chunks(workload.scan_chunks)))
    return lookups


def _lookup(workload: Workload, seconds: float, prompt: bytes) -> Lookup:
    return Lookup(seconds, "synthetic", "", workload.chunk_tokens, prompt, workload.chunk_bytes)
