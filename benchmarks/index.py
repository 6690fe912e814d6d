"""The L1 index with up to a million objects whose sizes are only simulated: no payload memory is touched."""

from __future__ import annotations

import os
import random
import statistics
import struct
import sys
import time

from lmcache._native import L1Core
from measure import Result, at_most, command_line, median_seconds, report, spread

HASH_BYTES = 32
OBJECT_BYTES = 4096
CALL_CHUNKS = 500
FOREVER = 1e18
CALL_LIMIT_MS = 0.4  # half of what a call's whole round trip may take
OWNER = 1


class Filled:
    """A core that is full with `objects` objects, stored as prompts of 500 chunks. Every object was then used once more
    in random order, so that its turn to go has nothing to do with its place: the worst case for eviction."""

    def __init__(self, objects: int, seed: int, policy: str = "LRU") -> None:
        self.random = random.Random(seed)
        self.core = L1Core(objects * OBJECT_BYTES, OBJECT_BYTES, OBJECT_BYTES, policy)
        self.core.set_committed(objects * OBJECT_BYTES)
        self.core.set_limit("salt", objects * OBJECT_BYTES)
        self.namespace = bytes(32)
        self.size = struct.pack("<Q", OBJECT_BYTES)
        self.hashes: list[bytes] = []
        self.prompts: list[bytes] = []
        for first in range(0, objects, CALL_CHUNKS):
            block = os.urandom(HASH_BYTES * min(CALL_CHUNKS, objects - first))
            self.store(block)
            self.prompts.append(block)
            self.hashes += [block[i : i + HASH_BYTES] for i in range(0, len(block), HASH_BYTES)]
        self.random.shuffle(self.hashes)
        for first in range(0, objects, CALL_CHUNKS):
            self.core.touch(self.namespace, b"".join(self.hashes[first : first + CALL_CHUNKS]))

    def reserve(self, hashes: bytes) -> int:
        return self.core.reserve(OWNER, self.namespace, "salt", self.size, hashes, FOREVER).reservation

    def store(self, hashes: bytes) -> None:
        self.core.commit(self.reserve(hashes), b"")

    def some_keys(self) -> bytes:
        return b"".join(self.random.choices(self.hashes, k=CALL_CHUNKS))

    def probe_seconds(self, runs: int) -> list[float]:
        """Measures probes of prompts, taken at random."""
        keys = iter([self.random.choice(self.prompts) for _ in range(runs + 2)])
        return median_seconds(lambda: self.core.probe(self.namespace, next(keys)), runs)

    def scattered_probe_seconds(self, runs: int) -> list[float]:
        """Measures probes of keys from 500 prompts, which no lookup asks for: each costs two misses of every processor
        cache."""
        keys = iter([self.some_keys() for _ in range(runs + 2)])
        return median_seconds(lambda: self.core.probe(self.namespace, next(keys)), runs)

    def lease_seconds(self, runs: int) -> list[float]:
        prepared = iter([self.some_keys() for _ in range(runs + 2)])

        def lease_and_release() -> None:
            lease = self.core.acquire(OWNER, self.namespace, next(prepared), FOREVER).lease
            self.core.release(lease)

        return median_seconds(lease_and_release, runs)

    def store_seconds(self, runs: int) -> tuple[list[float], list[float]]:
        """Reserving new chunks, each of which evicts one, and committing them."""
        reserves, commits = [], []
        for _ in range(runs):
            block = os.urandom(HASH_BYTES * CALL_CHUNKS)
            started = time.perf_counter()
            reservation = self.reserve(block)
            reserved = time.perf_counter()
            self.core.commit(reservation, b"")
            commits.append(time.perf_counter() - reserved)
            reserves.append(reserved - started)
        return reserves, commits

    def evict_seconds(self, count: int, runs: int) -> list[float]:
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            evicted = self.core.evict(count * OBJECT_BYTES).objects
            times.append(time.perf_counter() - started)
            assert evicted == count
        return times


def measure_policy(policy: str, objects: int, runs: int) -> list[Result]:
    """What the other policies cost. Half of the objects are in the second queue of S3FIFO, which also writes down every
    object that it evicts: it may take twice the time of LRU."""
    core = Filled(objects, seed=3, policy=policy)
    for prompt in core.prompts[::2]:
        core.core.release(core.core.acquire(OWNER, core.namespace, prompt, FOREVER).lease)
    probes = core.probe_seconds(runs)
    leases = core.lease_seconds(runs)
    reserves, _ = core.store_seconds(runs)
    evictions = core.evict_seconds(min(10_000, objects // 20), runs=9)
    index_bytes = core.core.stats()["index_bytes"] / objects

    def in_milliseconds(name: str, times: list[float], limit: float) -> Result:
        return at_most(f"{policy}: {name}", statistics.median(times) * 1e3, "ms", limit, spread(times, 1e3))

    return [
        in_milliseconds("probe of a prompt of 500 chunks", probes, CALL_LIMIT_MS),
        in_milliseconds("lease and release of 500 keys", leases, CALL_LIMIT_MS),
        in_milliseconds("reserve of 500 chunks, evicting 500", reserves, 2 * CALL_LIMIT_MS),
        in_milliseconds("evicting 10,000", evictions, 20.0),
        at_most(f"{policy}: index memory", index_bytes, "bytes/obj", 200),
    ]


def measure(objects: int, runs: int) -> list[Result]:
    small, large = Filled(min(10_000, objects), seed=1), Filled(objects, seed=2)
    index_bytes = large.core.stats()["index_bytes"] / objects
    # Taken in turn, so that noise of the machine meets both.
    small_probes, large_probes = [], []
    for _ in range(5):
        small_probes += small.probe_seconds(runs)
        large_probes += large.probe_seconds(runs)
    scattered = large.scattered_probe_seconds(runs)
    leases = large.lease_seconds(runs)
    reserves, commits = large.store_seconds(runs)
    evictions = large.evict_seconds(min(10_000, objects // 20), runs=9)
    index_bytes = max(index_bytes, large.core.stats()["index_bytes"] / objects)
    small_probe, large_probe = statistics.median(small_probes), statistics.median(large_probes)

    def in_milliseconds(name: str, times: list[float], limit: float) -> Result:
        return at_most(name, statistics.median(times) * 1e3, "ms", limit, spread(times, 1e3))

    return [
        Result(
            "probe of a prompt of 500 chunks, 10,000 objects", small_probe * 1e3, "ms", detail=spread(small_probes, 1e3)
        ),
        Result(
            f"probe of a prompt of 500 chunks, {objects:,} objects",
            large_probe * 1e3,
            "ms",
            detail=spread(large_probes, 1e3),
        ),
        Result("probe of 500 scattered keys", statistics.median(scattered) * 1e3, "ms", detail=spread(scattered, 1e3)),
        at_most("probe: ratio of the first two", large_probe / small_probe, "", 2.0),
        in_milliseconds(f"lease and release of 500 keys, {objects:,} objects", leases, CALL_LIMIT_MS),
        in_milliseconds("reserve of 500 chunks, evicting 500", reserves, CALL_LIMIT_MS),
        in_milliseconds("commit of 500 chunks", commits, CALL_LIMIT_MS),
        in_milliseconds("evicting 10,000 in random order", evictions, 10.0),
        at_most("index memory", index_bytes, "bytes/obj", 200),
        *measure_policy("IsolatedLRU", objects, runs),
        *measure_policy("S3FIFO", objects, runs),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=21)
    parser.add_argument("--objects", type=int, default=1_000_000)
    arguments = parser.parse_args()
    return report(measure(arguments.objects, arguments.runs), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
