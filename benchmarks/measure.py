"""Small pieces that every benchmark here shares: medians, one line a result, limits of the machine."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lmcache import _native
from lmcache.cli import bench_timing
from lmcache.cli.bench_timing import Region
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import StoreOutcome
from lmcache.l2.runner import Runner

MIB = 1 << 20
_ALL_THREADS = 2  # in the number of a process's clock, as clock_getcpuclockid(3) makes it: CPUCLOCK_SCHED of the kernel


def command_line(
    description: str | None, *, runs: int = 0, rounds: int = 0, on_disk: bool = False
) -> argparse.ArgumentParser:
    """Gives a benchmark --json, and --runs or --rounds where it repeats itself so often. `on_disk`: --folder on the
    disk that is measured, and --small."""
    parser = argparse.ArgumentParser(description=description)
    for name, number in (("--runs", runs), ("--rounds", rounds)):
        if number:
            parser.add_argument(name, type=int, default=number)
    if on_disk:
        parser.add_argument("--folder", default=str(Path(__file__).resolve().parents[1]), help="on the disk to measure")
        parser.add_argument("--small", action="store_true", help="a quick run of everything, without targets")
    parser.add_argument("--json", action="store_true")
    return parser


@dataclass
class Result:
    """One figure with its target. `target` is "" when there is none; `ok` then stays True."""

    name: str
    value: float
    unit: str
    target: str = ""
    ok: bool = True
    detail: str = ""

    def line(self) -> str:
        verdict = "" if not self.target else ("ok  " if self.ok else "MISS")
        return f"{verdict:<5}{self.name:<58} {self.value:>10.3f} {self.unit:<10} {self.target:<18} {self.detail}"


def at_most(name: str, value: float, unit: str, limit: float, detail: str = "") -> Result:
    return Result(name, value, unit, f"at most {limit:g}", value <= limit, detail)


def at_least(name: str, value: float, unit: str, limit: float, detail: str = "") -> Result:
    return Result(name, value, unit, f"at least {limit:g}", value >= limit, detail)


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Lowest and highest, for the detail column."""
    return f"[{min(values) * scale:.3g}-{max(values) * scale:.3g}] n={len(values)}"


def median_seconds(call: Callable[[], object], runs: int, warm_up: int = 2) -> list[float]:
    """Wall seconds of each counted run."""
    return [bench_timing.timed(call) for _ in range(warm_up + runs)][warm_up:]


def best_copy_seconds(source: Region, destination: Region, size_bytes: int, runs: int = 9) -> float:
    """The best single-thread copy loop of this machine."""
    return bench_timing.best_copy_seconds(destination.address, source.address, size_bytes, runs)


def resident_bytes() -> int:
    """Of this process's memory, by the kernel."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(pid: int) -> float:
    """That a process has run, with threads that have ended. ProcessLookupError when it has ended itself."""
    try:
        return time.clock_gettime((~pid << 3) | _ALL_THREADS)
    except OSError:
        raise ProcessLookupError(f"process {pid} has ended") from None


async def keep_folders(runner: Runner, namespace: Namespace, memory: Region, frame_bytes: int) -> None:
    """An object in each folder of a file adapter, as in a cache that is in use: one that nothing is in is removed."""
    template = header_template(namespace, frame_bytes - FRAME_HEADER_BYTES)
    view = memoryview(memory.map)[:frame_bytes]
    for first in range(256):
        key = ObjectKey(namespace, bytes([first]) + bytes(31))
        _native.frame_seal(memory.address, template, key.chunk_hash)
        assert await runner.store([key], [view], lambda: None) == [StoreOutcome.STORED]


def report(results: Sequence[Result], as_json: bool) -> int:
    """Prints the results; 0 when every target was met."""
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        for result in results:
            print(result.line(), flush=True)
    return 0 if all(result.ok for result in results) else 1
