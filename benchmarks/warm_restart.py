"""How long a server takes to go on with what a previous one left in L1."""

from __future__ import annotations

import os
import statistics
import sys
import time
from array import array
from contextlib import closing

from lmcache import _native
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l1.store import L1Options, L1Store
from lmcache.memory.restart_compatibility import RestartCompatibility
from lmcache.testing.frames import batch_of
from measure import MIB, at_most, command_line, report, spread

FRAME_BYTES = 2 * FRAME_HEADER_BYTES
FOREVER = 1e18
CALL_OBJECTS = 10_000


def fill(l1: L1Store, objects: int) -> None:
    of = Namespace("model", 1, 0, 0, "0a" * 16)
    template = header_template(of, FRAME_BYTES - FRAME_HEADER_BYTES)
    for first in range(0, objects, CALL_OBJECTS):
        hashes = [number.to_bytes(32, "little") for number in range(first, min(objects, first + CALL_OBJECTS))]
        keys = [ObjectKey(of, chunk_hash) for chunk_hash in hashes]
        reserved = l1.reserve(1, batch_of(keys, FRAME_BYTES), FOREVER)
        for chunk_hash, offset in zip(hashes, array("Q", reserved.slots), strict=True):
            _native.frame_seal(l1.address_of(offset), template, chunk_hash)
        l1.core.commit(reserved.reservation)


def main() -> int:
    parser = command_line(__doc__, runs=5)
    parser.add_argument("--objects", type=int, default=100_000)
    arguments = parser.parse_args()
    name = f"lmcache-bench-{os.getpid()}-warm"
    compatibility = RestartCompatibility(max(arguments.objects * FRAME_BYTES, 16 * MIB), 4096, 256, "blake3", bytes(32))
    seconds: list[float] = []
    path = ""
    try:
        for run in range(arguments.runs + 1):
            began = time.perf_counter()
            store = L1Store.open(
                name,
                os.urandom(16),
                L1Options(
                    compatibility.capacity_bytes,
                    policy="LRU",
                    init_bytes=compatibility.capacity_bytes,
                    compatibility=compatibility,
                ),
            )
            took = time.perf_counter() - began
            with closing(store) as l1:
                path = l1.memory.path
                if run == 0:
                    fill(l1, arguments.objects)
                    continue
                assert l1.recovered.objects == arguments.objects, l1.recovered
                l1.core.check()
            seconds.append(took)
    finally:
        if path:
            os.unlink(path)
    name = f"open L1 with {arguments.objects:,} objects of a previous server"
    results = [at_most(name, statistics.median(seconds), "s", 1.0, spread(seconds))]
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
