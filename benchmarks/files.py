"""fs_native beside a plain preadv/pwritev program: the same files, depth and run, one after the other.

    python benchmarks/files.py [--folder FOLDER] [--rounds N] [--depth N] [--small]

Needs a C++ compiler for the plain program (benchmarks/plain_files.cc). Targets: with O_DIRECT 90% of it; without,
where reading is one copy out of the page cache by several threads, loads 80%, as the prefetch controller makes them: in
its batches, every frame verified.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmcache import _native
from lmcache.cli.bench_timing import Region
from lmcache.clock import SystemClock
from lmcache.core.frame import header_template, verify_frames
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES, L2_LOAD_BATCH_BYTES, MAX_L2_BATCH_OBJECTS
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from measure import Result, at_least, command_line, keep_folders, report, spread

SOURCE = Path(__file__).resolve().with_name("plain_files.cc")
SHAPES = ((32, 2 << 20), (256, 64 << 10))
DIRECT_TARGET = 0.9
BUFFERED_TARGET = 0.8
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)
READS = 3  # of what a round wrote


class PlainProgram:
    def __init__(self, folder: Path, depth: int, count: int, size_bytes: int, *, direct: bool) -> None:
        binary = folder / "plain_files"
        if not binary.exists():
            compiler = os.environ.get("CXX", "c++")
            subprocess.run([compiler, "-O2", "-std=c++20", "-pthread", str(SOURCE), "-o", str(binary)], check=True)
        self._process = subprocess.Popen(
            [str(binary), str(depth), str(count), str(size_bytes), str(int(direct))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, folder: Path) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command} {folder}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the plain program failed")
        return float(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Bench:
    """`size_bytes` is that of a frame on disk, header included: what the plain program moves."""

    def __init__(self, folder: Path, depth: int, count: int, size_bytes: int, *, direct: bool) -> None:
        self.folder = folder
        self.direct = direct
        self.count = count
        self.size_bytes = size_bytes
        self.plain = PlainProgram(folder, depth, count, size_bytes, direct=direct)
        self.memory = Region(count * size_bytes)
        self.base = folder / "l2"
        spec = {
            "type": "fs_native",
            "base_path": str(self.base),
            "use_odirect": direct,
            "num_workers": depth,
            "io_engine": "posix",  # the plain program has threads, too
        }
        self.runner = Runner(build(parse_adapter(spec, 0)), Metrics().l2, SystemClock())
        self.verifier = ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)))
        self.times: dict[str, list[float]] = {"write": [], "store": [], "read": [], "load": []}

    async def run(self, rounds: int) -> list[Result]:
        await self.runner.open()
        await keep_folders(self.runner, NAMESPACE, self.memory, self.size_bytes)
        for number in range(rounds + 1):
            await self._round(number)
        assert not self.runner.status()["buffered_fallbacks"], "O_DIRECT was not possible in this folder"
        await self.runner.drain(10)
        await self.runner.close(10)
        self.plain.close()
        self.verifier.shutdown()
        return [self._result("store", "write"), self._result("load", "read")]

    async def _round(self, number: int) -> None:
        """The first one warms up. Who goes first changes from turn to turn."""
        folder = self.folder / f"plain{number}"
        folder.mkdir()
        template = header_template(NAMESPACE, self.size_bytes - FRAME_HEADER_BYTES)
        keys = [ObjectKey(NAMESPACE, bytes([index % 256]) + os.urandom(31)) for index in range(self.count)]
        views = [
            memoryview(self.memory.map)[i * self.size_bytes : (i + 1) * self.size_bytes] for i in range(self.count)
        ]
        for index, key in enumerate(keys):
            _native.frame_seal(self.memory.address + index * self.size_bytes, template, key.chunk_hash)
        for turn, (plain, ours) in enumerate((("write", "store"), *[("read", "load")] * READS), number):
            for program in (plain, ours) if turn % 2 else (ours, plain):
                seconds = (
                    self.plain.run(program, folder) if program == plain else await self._ours(program, keys, views)
                )
                if number:
                    self.times[program].append(seconds)
        shutil.rmtree(folder)
        await self.runner.layers.deletion.delete(keys)
        await asyncio.to_thread(os.sync)

    async def _ours(self, which: str, keys: Sequence[ObjectKey], views: Sequence[memoryview]) -> float:
        step = MAX_L2_BATCH_OBJECTS
        if not self.direct:
            step = min(step, max(1, L2_LOAD_BATCH_BYTES // self.size_bytes))
        operation: Any = (
            self.runner.store if which == "store" else self.runner.load if self.direct else self._load_verified
        )
        started = time.perf_counter()
        outcomes = await asyncio.gather(
            *(operation(keys[at : at + step], views[at : at + step], lambda: None) for at in range(0, len(keys), step))
        )
        seconds = time.perf_counter() - started
        good = StoreOutcome.STORED if which == "store" else LoadOutcome.LOADED
        assert all(outcome is good for batch in outcomes for outcome in batch), outcomes
        return seconds

    async def _load_verified(
        self, keys: Sequence[ObjectKey], views: Sequence[memoryview], release: Callable[[], None]
    ) -> list[LoadOutcome]:
        """Loads as the prefetch controller does (lmcache.tiering.l2_loads)."""
        outcomes = await self.runner.load(keys, views, release)
        if self.runner.verifies:
            return outcomes
        faults = await asyncio.get_running_loop().run_in_executor(
            self.verifier,
            verify_frames,
            keys,
            views,
        )
        assert not any(faults), faults
        return outcomes

    def _result(self, ours: str, plain: str) -> Result:
        total_mb = self.count * self.size_bytes / 1e6
        floor, own = statistics.median(self.times[plain]), statistics.median(self.times[ours])
        # Of each round: a shared disk changes its speed from one second to the next.
        ratio = statistics.median(p / o for p, o in zip(self.times[plain], self.times[ours], strict=True))
        kind = "O_DIRECT" if self.direct else "page cache"
        name = f"fs_native {kind} {ours}, {self.count} x {self.size_bytes >> 10} KiB, of plain {plain}"
        detail = f"{total_mb / own:.0f} of {total_mb / floor:.0f} MB/s, ms {spread(self.times[ours], 1e3)}"
        if ours == "store" and not self.direct:
            return Result(name, ratio, "ratio", detail=detail)
        return at_least(name, ratio, "ratio", DIRECT_TARGET if self.direct else BUFFERED_TARGET, detail)


def main() -> int:
    parser = command_line(__doc__, rounds=15, on_disk=True)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    results = []
    for direct in (True, False):
        for count, size_bytes in ((4, 64 << 10),) if options.small else SHAPES:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-files-") as folder:
                bench = Bench(Path(folder), options.depth, count, size_bytes, direct=direct)
                results += asyncio.run(bench.run(1 if options.small else options.rounds))
    status = report(results, as_json=options.json)
    return 0 if options.small else status


if __name__ == "__main__":
    sys.exit(main())
