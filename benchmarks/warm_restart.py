"""How long a server takes to go on with what a former one left in L1."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from array import array
from contextlib import closing

from lmcache import _native
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l1.store import L1Store
from lmcache.memory.inheritance import Inheritance
from measure import MIB, at_most, report, spread

FRAME_BYTES = 2 * FRAME_HEADER_BYTES
FOREVER = 1e18
CALL_OBJECTS = 10_000


def fill(l1: L1Store, objects: int) -> None:
    of = Namespace("model", 1, 0, 0, "0a" * 16)
    sizes = array("Q", [FRAME_BYTES]).tobytes()
    template = header_template(of, FRAME_BYTES - FRAME_HEADER_BYTES)
    for first in range(0, objects, CALL_OBJECTS):
        hashes = [number.to_bytes(32, "little") for number in range(first, min(objects, first + CALL_OBJECTS))]
        reservation, offsets, _ = l1.core.reserve(1, of.digest, of.cache_salt, sizes, b"".join(hashes), FOREVER)
        for chunk_hash, offset in zip(hashes, array("Q", offsets), strict=True):
            _native.frame_seal(l1.address_of(offset), template, chunk_hash)
        l1.core.commit(reservation, b"")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    name = f"lmcache-bench-{os.getpid()}-warm"
    heir = Inheritance(max(arguments.objects * FRAME_BYTES, 16 * MIB), 4096, 256, "blake3", bytes(32))
    seconds: list[float] = []
    path = ""
    try:
        for run in range(arguments.runs + 1):
            began = time.perf_counter()
            store = L1Store.open(
                name, heir.capacity_bytes, os.urandom(16), policy="LRU", init_bytes=heir.capacity_bytes, heir=heir
            )
            took = time.perf_counter() - began
            with closing(store) as l1:
                path = l1.memory.path
                if run == 0:
                    fill(l1, arguments.objects)
                    continue
                assert l1.adoption.objects == arguments.objects, l1.adoption
                l1.core.check()
            seconds.append(took)
    finally:
        if path:
            os.unlink(path)
    name = f"open L1 with {arguments.objects:,} objects of a former server"
    results = [at_most(name, statistics.median(seconds), "s", 1.0, spread(seconds))]
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
