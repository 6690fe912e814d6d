"""raw_block and fs_native with O_DIRECT beside fio: same disk, block size, depth and engine, in turn in one run.

    python benchmarks/tiers.py [--folder FOLDER] [--rounds N] [--only NAME] [--small]

Target: 90% of fio. fio moves everything through the same few buffers, which stay in the processor's caches; here every
object has memory of its own. So each engine is also measured without the adapter: the same transfers, the same memory.
Then, on raw_block: lookup of 500 keys, recovery of 100,000 objects.
"""

from __future__ import annotations

import asyncio
import os
import select
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fio import MISSING, Fio, present, write_whole
from lmcache import _native
from lmcache.cli.bench_timing import Region
from lmcache.clock import SystemClock
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES, MAX_L2_BATCH_OBJECTS
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_format import Geometry
from lmcache.l2.completions import words
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from measure import Result, at_least, at_most, command_line, keep_folders, report, spread

SHAPES = ((96, 2 << 20), (1024, 64 << 10))
TARGET = 0.9
THREADS = 4
QUEUE_DEPTH = 16
META_BYTES = 4 << 20
RECOVERED_OBJECTS = 100_000
LOOKUP_KEYS = 500
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)


class Engine:
    """The native engine alone on fio's file: the same transfers as fio's, the same memory as the adapter's."""

    def __init__(self, path: Path, memory: Region, count: int, size_bytes: int, engine: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._io = _native.DeviceIO(self._fd, THREADS, QUEUE_DEPTH if engine == "io_uring" else 0, 4096)
        self._offsets = words([index * size_bytes for index in range(count)])
        self._addresses = words([memory.address + index * size_bytes for index in range(count)])
        self._sizes = words([size_bytes] * count)
        self._total_bytes = count * size_bytes

    def run(self, which: str) -> float:
        """Bytes a second."""
        started = time.perf_counter()
        if which == "write":
            self._io.submit_write(self._offsets, self._addresses, self._sizes, b"")
        else:
            self._io.submit_read(self._offsets, self._addresses, self._sizes)
        select.select([self._io.event_fd()], [], [])
        speed = self._total_bytes / (time.perf_counter() - started)
        assert not any(array("i", errors).tolist() != [0] * len(self._sizes) for _, _, errors in self._io.drain())
        return speed

    def close(self) -> None:
        self._io.close()
        os.close(self._fd)


class Bench:
    """`size_bytes` is that of a frame, header included: what fio moves in one transfer."""

    def __init__(self, folder: Path, kind: str, engine: str, count: int, size_bytes: int) -> None:
        self.folder = folder
        self.name = f"{kind} {engine}"
        self.count, self.size_bytes = count, size_bytes
        self.memory = Region(count * size_bytes)
        view = memoryview(self.memory.map)
        self.views = [view[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]
        self.fio = Fio(
            folder,
            count,
            size_bytes,
            engine,
            threads=THREADS,
            depth=QUEUE_DEPTH,
            one_file=kind == "raw_block",
        )
        self.engine = Engine(self.fio.file, self.memory, count, size_bytes, engine) if kind == "raw_block" else None
        self.runner = Runner(build(parse_adapter(self._spec(kind, engine), 0)), Metrics().l2, SystemClock())
        self.ratios: dict[str, list[float]] = {"store": [], "load": []}
        self.speeds: dict[str, list[tuple[float, float, float]]] = {"store": [], "load": []}

    def _spec(self, kind: str, engine: str) -> dict[str, Any]:
        if kind == "fs_native":
            return {
                "type": kind,
                "base_path": str(self.folder / "l2"),
                "use_odirect": True,
                "num_workers": QUEUE_DEPTH if engine == "io_uring" else THREADS,
                "io_engine": engine,
            }
        device = self.folder / "device"
        write_whole(device, META_BYTES + self.count * self.size_bytes)
        return {
            "type": kind,
            "device_path": str(device),
            "slot_bytes": self.size_bytes,
            "meta_total_bytes": META_BYTES,
            "io_engine": engine,
            "iouring_queue_depth": QUEUE_DEPTH,
            "num_store_workers": THREADS,
            "num_load_workers": THREADS,
        }

    async def run(self, rounds: int) -> list[Result]:
        await self.runner.open()
        assert await self.runner.wait_for_inventory(60)
        if self.engine is None:
            await keep_folders(self.runner, NAMESPACE, self.memory, self.size_bytes)
        for number in range(rounds + 1):
            await self._round(number)
        await self.runner.drain(10)
        await self.runner.close(10)
        if self.engine is not None:
            self.engine.close()
        return [self._result("store"), self._result("load")]

    async def _round(self, number: int) -> None:
        """The first one warms up. Who goes first changes from round to round."""
        template = header_template(NAMESPACE, self.size_bytes - FRAME_HEADER_BYTES)
        keys = [ObjectKey(NAMESPACE, bytes([index % 256]) + os.urandom(31)) for index in range(self.count)]
        for index, key in enumerate(keys):
            _native.frame_seal(self.memory.address + index * self.size_bytes, template, key.chunk_hash)
        for ours, theirs in (("store", "write"), ("load", "read")):
            speeds = {}
            for program in ("fio", "we") if number % 2 else ("we", "fio"):
                if program == "fio":
                    speeds[program] = await asyncio.to_thread(self.fio.run, theirs)
                else:
                    speeds[program] = self.count * self.size_bytes / await self._ours(ours, keys)
                await asyncio.to_thread(os.sync)
            alone = 0.0
            if self.engine is not None:
                alone = await asyncio.to_thread(self.engine.run, theirs)
            if number:
                self.ratios[ours].append(speeds["we"] / speeds["fio"])
                self.speeds[ours].append((speeds["we"], speeds["fio"], alone))
        await self.runner.layers.deletion.delete(keys)

    async def _ours(self, which: str, keys: Sequence[ObjectKey]) -> float:
        operation: Callable[..., Awaitable[Sequence[object]]] = (
            self.runner.store if which == "store" else self.runner.load
        )
        started = time.perf_counter()
        outcomes = await asyncio.gather(
            *(
                operation(
                    keys[at : at + MAX_L2_BATCH_OBJECTS], self.views[at : at + MAX_L2_BATCH_OBJECTS], lambda: None
                )
                for at in range(0, len(keys), MAX_L2_BATCH_OBJECTS)
            )
        )
        seconds = time.perf_counter() - started
        good = StoreOutcome.STORED if which == "store" else LoadOutcome.LOADED
        assert all(outcome is good for batch in outcomes for outcome in batch), outcomes
        return seconds

    def _result(self, which: str) -> Result:
        own, floor, alone = (statistics.median(column) for column in zip(*self.speeds[which], strict=True))
        beside = f", engine alone {alone / 1e6:.0f}" if alone else ""
        return at_least(
            f"{self.name} {which}, {self.count} x {self.size_bytes >> 10} KiB, of fio",
            statistics.median(self.ratios[which]),  # of each round: a shared disk changes its speed
            "ratio",
            TARGET,
            f"{own / 1e6:.0f} of {floor / 1e6:.0f} MB/s{beside}, ratios {spread(self.ratios[which])}",
        )


def write_full_table(path: Path, objects: int) -> tuple[Geometry, list[ObjectKey]]:
    """A device whose table claims that many objects; their slots are holes."""
    geometry = Geometry.plan(8192, 4096, 16 << 20)
    spec = {"type": "raw_block", "device_path": str(path), "slot_bytes": 8192, "meta_total_bytes": 16 << 20}
    with path.open("wb") as file:
        file.truncate(geometry.meta_total_bytes + objects * geometry.slot_bytes)

    async def form() -> None:
        runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock())
        await runner.open()
        await runner.close(10)

    asyncio.run(form())
    with path.open("r+b") as file:  # type: ignore[assignment]
        superblock = raw_format.decode_superblock(file.read(4096))
        assert superblock is not None
        keys = [ObjectKey(NAMESPACE, os.urandom(32)) for _ in range(objects)]
        file.seek(geometry.namespace_page_offset(0))
        file.write(raw_format.encode_namespace(0, superblock.device, NAMESPACE.encode(), 4096))
        index = _native.RawIndex(objects, 8192, 8192, geometry.slot_offset(0), 4096, 1, superblock.device)
        space = index.intern(NAMESPACE.digest, 0)
        for slot, key in enumerate(keys):
            index.add(slot, space, key.chunk_hash, 8192, slot + 2)
        for page in range(geometry.table_pages(objects)):
            file.seek(geometry.table_page_offset(page))
            file.write(index.page_image(page))
    return geometry, keys


async def recovery_and_lookup(path: Path, keys: Sequence[ObjectKey], runs: int) -> list[Result]:
    spec = {"type": "raw_block", "device_path": str(path), "slot_bytes": 8192, "meta_total_bytes": 16 << 20}
    recoveries, lookups = [], []
    for _ in range(runs):
        runner = Runner(build(parse_adapter({**spec, "meta_verify_on_load": False}, 0)), Metrics().l2, SystemClock())
        started = time.perf_counter()
        await runner.open()
        assert await runner.wait_for_inventory(120)
        recoveries.append(time.perf_counter() - started)
        assert len(runner.ledger) == len(keys)
        for _ in range(20):
            started = time.perf_counter()
            found = await runner.probe(keys[:LOOKUP_KEYS])
            lookups.append(time.perf_counter() - started)
            assert all(found)
        await runner.close(10)
    count = min(LOOKUP_KEYS, len(keys))
    return [
        at_most(f"raw_block recovery of {len(keys)}", statistics.median(recoveries), "s", 1.0, spread(recoveries)),
        at_most(f"raw_block lookup of {count} keys", statistics.median(lookups) * 1e3, "ms", 0.5, spread(lookups, 1e3)),
    ]


def main() -> int:
    parser = command_line(__doc__, rounds=9, on_disk=True)
    parser.add_argument("--only", default="", help="a part of the names of what to measure")
    options = parser.parse_args()
    refused = _native.io_uring_refusal()
    cases = [(kind, engine) for kind in ("raw_block", "fs_native") for engine in ("posix", "io_uring")]
    results = []
    if not present():
        print(MISSING, file=sys.stderr)
        cases = []
    for kind, engine in cases:
        for count, size_bytes in ((8, 64 << 10),) if options.small else SHAPES:
            if options.only not in f"{kind} {engine} {size_bytes}" or (engine == "io_uring" and refused):
                continue
            with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-tiers-") as folder:
                bench = Bench(Path(folder), kind, engine, count, size_bytes)
                results += asyncio.run(bench.run(1 if options.small else options.rounds))
    if options.only in "recovery":
        with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-tiers-") as folder:
            path = Path(folder) / "device"
            _, keys = write_full_table(path, 1000 if options.small else RECOVERED_OBJECTS)
            results += asyncio.run(recovery_and_lookup(path, keys, 1 if options.small else 5))
    status = report(results, as_json=options.json)
    return 0 if options.small else status


if __name__ == "__main__":
    sys.exit(main())
