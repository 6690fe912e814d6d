"""What a folder of many objects costs fs and fs_native: recovery, and lookups of keys that are known, unknown, or cold.

    python benchmarks/folders.py [--folder FOLDER] [--objects N] [--runs N] [--small]

"Cold": the kernel's caches of names and inodes were dropped before (/proc/sys/vm/drop_caches; needs root, left out
without). Objects are frames of 8 KiB in 256 folders, made once.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lmcache import _native
from lmcache.cli.bench_timing import Region
from lmcache.clock import SystemClock
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import folder
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from measure import Result, at_most, command_line, report, spread

OBJECTS = 100_000
LOOKUP_KEYS = 500
FRAME_BYTES = 8192
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
RECOVERY_SECONDS = 2.0
WARM_MS, COLD_MS = 0.5, 5.0


def drop_names() -> bool:
    """Whether the kernel has forgotten names and inodes now: of the whole machine."""
    try:
        os.sync()
        DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


def fill(base: Path, objects: int) -> list[ObjectKey]:
    """Writes the folder as an adapter would have left it."""
    frame = Region(FRAME_BYTES)
    template = header_template(NAMESPACE, FRAME_BYTES - FRAME_HEADER_BYTES)
    digest = NAMESPACE.digest.hex()
    source = random.Random(7)
    keys = [ObjectKey(NAMESPACE, source.randbytes(32)) for _ in range(objects)]
    for prefix in range(256):
        (base / digest / f"{prefix:02x}").mkdir(parents=True)
    for key in keys:
        _native.frame_seal(frame.address, template, key.chunk_hash)
        with open(folder.object_path(str(base), digest, key.chunk_hash.hex()), "wb", buffering=0) as file:
            file.write(frame.map)
    return keys


def runner_of(kind: str, base: Path) -> Runner:
    return Runner(build(parse_adapter({"type": kind, "base_path": str(base)}, 0)), Metrics().l2, SystemClock())


async def recover(kind: str, base: Path, objects: int) -> tuple[Runner, float]:
    runner = runner_of(kind, base)
    started = time.perf_counter()
    await runner.open()
    assert await runner.wait_for_inventory(120)
    seconds = time.perf_counter() - started
    assert len(runner.ledger) == objects
    return runner, seconds


async def probe(runner: Runner, keys: Sequence[ObjectKey]) -> float:
    started = time.perf_counter()
    sizes = await runner.probe(keys)
    seconds = time.perf_counter() - started
    assert all(sizes)
    return seconds


async def measure(kind: str, base: Path, keys: Sequence[ObjectKey], runs: int, *, cold: bool) -> list[Result]:
    count = min(LOOKUP_KEYS, len(keys))
    wanted = keys[:count]
    recoveries: dict[str, list[float]] = {"warm": [], "cold": []}
    lookups: dict[str, list[float]] = {"known": [], "not scanned yet": [], "not scanned yet, cold": []}
    for run in range(runs + 1):
        for state in ("warm", "cold"):
            if state == "cold" and not (cold and drop_names()):
                continue
            runner, seconds = await recover(kind, base, len(keys))
            known = [await probe(runner, wanted) for _ in range(5)]
            await runner.close(10)
            if run:
                recoveries[state].append(seconds)
                lookups["known"] += known
        for state in ("not scanned yet", "not scanned yet, cold"):
            if state.endswith("cold") and not (cold and drop_names()):
                continue
            runner = runner_of(kind, base)
            await runner.open()  # the scan runs on beside the lookup
            seconds = await probe(runner, wanted)
            await runner.close(30)
            if run:
                lookups[state].append(seconds)
    results = [
        at_most(
            f"{kind}: recovery of {len(keys)}, {state} names",
            statistics.median(times),
            "s",
            RECOVERY_SECONDS,
            spread(times),
        )
        for state, times in recoveries.items()
        if times
    ]
    for state, times in lookups.items():
        if times:
            name = f"{kind}: lookup of {count} keys, {state}"
            value, detail = statistics.median(times) * 1e3, spread(times, 1e3)
            if state.endswith("cold"):  # two random reads and more for each key: the disk decides
                results.append(Result(name, value, "ms", detail=detail))
            else:
                limit = WARM_MS if state == "known" else COLD_MS
                results.append(at_most(name, value, "ms", limit, detail))
    return results


def main() -> int:
    parser = command_line(__doc__, runs=5, on_disk=True)
    parser.add_argument("--objects", type=int, default=OBJECTS)
    options = parser.parse_args()
    objects, runs = (1000, 1) if options.small else (options.objects, options.runs)
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-folders-") as name:
        base = Path(name)
        keys = fill(base, objects)
        for kind in ("fs", "fs_native"):
            results += asyncio.run(measure(kind, base, keys, runs, cold=not options.small))
    status = report(results, as_json=options.json)
    return 0 if options.small else status


if __name__ == "__main__":
    sys.exit(main())
