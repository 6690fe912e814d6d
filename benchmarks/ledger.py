"""The ledger of an L2 adapter with ten million objects: memory for each, what a call may take, and what a lookup costs
beside one in a ledger of ten thousand. They are reported as by an adapter after a restart, 4,096 in a call. Times
are of the processor: what else runs on the machine is no property of the ledger."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
from array import array
from concurrent.futures import ProcessPoolExecutor

from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey
from lmcache.core.salt_limits import SaltLimits
from lmcache.l2.accounting import Ledger
from lmcache.l2.adapter import Capacity, ObjectColumns
from measure import Result, at_most, command_line, report, resident_bytes, spread

OBJECT_BYTES = 64 << 10
SLICE_OBJECTS = 4096
VICTIMS = 1024
CALL_CHUNKS = 500
MEMORY_LIMIT_BYTES = 110
CALL_LIMIT_MS = 5.0


def namespaces(salts: int) -> list[Namespace]:
    return [Namespace("model", 1, 0, 0, "0" * 32, f"salt-{number}") for number in range(salts)]


def found_slice(objects: int, owners: list[Namespace], rng: random.Random) -> ObjectColumns:
    """Random objects, as a scan tells them."""
    prompt = min(CALL_CHUNKS, objects)
    positions = array("I", [rng.randrange(len(owners))] * prompt + rng.choices(range(len(owners)), k=objects - prompt))
    hashes = os.urandom(CHUNK_HASH_BYTES * objects)
    return ObjectColumns(owners, positions, hashes, array("Q", [OBJECT_BYTES]) * objects, array("I", range(objects)))


class Filled:
    """A ledger with so many objects. Each slice begins with a prompt: keys of one namespace."""

    def __init__(self, policy: str, objects: int, salts: int) -> None:
        rng = random.Random(1)
        limits = SaltLimits()
        owners = namespaces(salts)
        for owner in owners[::2]:
            limits.set(owner.cache_salt, rng.randrange(1, objects * OBJECT_BYTES))
        self.ledger = Ledger(policy, lambda: 0, limits)
        self.ledger.capacity = Capacity(objects * OBJECT_BYTES, 4096)
        self.prompts: list[tuple[Namespace, bytes]] = []
        self.slices: list[float] = []
        before = resident_bytes()
        while (left := objects - len(self.ledger)) > 0:
            columns = found_slice(min(left, SLICE_OBJECTS), owners, rng)
            self.prompts.append((owners[columns.positions[0]], bytes(columns.hashes[: CHUNK_HASH_BYTES * CALL_CHUNKS])))
            started = time.thread_time()
            self.ledger.found(columns)
            self.slices.append(time.thread_time() - started)
        self.resident_bytes = resident_bytes() - before

    def lookup(self) -> float:
        namespace, hashes = random.choice(self.prompts)
        starts = range(0, len(hashes), CHUNK_HASH_BYTES)
        wanted = [ObjectKey(namespace, hashes[start : start + CHUNK_HASH_BYTES]) for start in starts]
        started = time.thread_time()
        known = self.ledger.known(wanted)
        seconds = time.thread_time() - started
        assert all(known)
        return seconds * CALL_CHUNKS / len(wanted)

    def evictions(self, runs: int) -> list[float]:
        """Choosing 1,024 victims, their end, and as many objects in their place."""
        times = []
        for _ in range(runs):
            started = time.thread_time()
            victims = self.ledger.victims(VICTIMS * OBJECT_BYTES, VICTIMS)
            times.append(time.thread_time() - started)
            assert len(victims.keys) == VICTIMS
            started = time.thread_time()
            self.ledger.evicted(victims.keys)
            times.append(time.thread_time() - started)
            fresh = [ObjectKey(victims.keys[0].namespace, os.urandom(CHUNK_HASH_BYTES)) for _ in range(VICTIMS)]
            started = time.thread_time()
            self.ledger.native.stored(fresh, [OBJECT_BYTES] * VICTIMS)
            times.append(time.thread_time() - started)
        return times

    def pages(self) -> list[float]:
        """Every object, in pages that make no Python keys."""
        times, start = [], 0
        while True:
            started = time.thread_time()
            page = self.ledger.native.list(start, SLICE_OBJECTS)
            times.append(time.thread_time() - started)
            if not (start := page.next_start):
                return times


def measure_policy(policy: str, objects: int, salts: int, runs: int) -> list[Result]:
    small, large = Filled(policy, min(10_000, objects), 1), Filled(policy, objects, salts)
    small_lookups, large_lookups = [], []
    for _ in range(runs):  # in turn, so that noise of the machine meets both
        small_lookups.append(small.lookup())
        large_lookups.append(large.lookup())
    evictions = large.evictions(runs)
    pages = large.pages()
    memory_bytes = large.ledger.stats().memory_bytes / objects
    small_lookup, large_lookup = statistics.median(small_lookups), statistics.median(large_lookups)
    calls = large.slices + evictions + pages
    name = f"{policy}, {salts} salts"
    return [
        at_most(f"{name}: memory", memory_bytes, "bytes/obj", MEMORY_LIMIT_BYTES, f"{objects:,} objects"),
        at_most(f"{name}: memory by the kernel", large.resident_bytes / objects, "bytes/obj", MEMORY_LIMIT_BYTES),
        at_most(
            f"{name}: 999 of 1,000 calls",
            statistics.quantiles(calls, n=1000)[-1] * 1e3,
            "ms",
            CALL_LIMIT_MS,
            spread(calls, 1e3),
        ),
        at_most(
            f"{name}: lookup of {CALL_CHUNKS}, large against small",
            large_lookup / small_lookup,
            "x",
            2.0,
            f"{small_lookup * 1e6:.0f} and {large_lookup * 1e6:.0f} us",
        ),
    ]


def in_a_process_of_its_own(policy: str, objects: int, salts: int, runs: int) -> list[Result]:
    """What the kernel counts is then of this policy alone."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_policy, policy, objects, salts, runs).result()


def main() -> int:
    parser = command_line(__doc__, runs=101)
    parser.add_argument("--objects", type=int, default=10_000_000)
    parser.add_argument("--salts", type=int, default=10_000)
    arguments = parser.parse_args()
    results = []
    for policy, salts in (("LRU", 1), ("IsolatedLRU", arguments.salts), ("S3FIFO", 1)):
        results += in_a_process_of_its_own(policy, arguments.objects, salts, arguments.runs)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
