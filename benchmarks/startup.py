"""What the server costs before anybody uses it: start, memory, idle processor time, and the command's own start."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lmcache.testing.processes import CacheServer
from measure import MIB, Result, at_most, report, spread

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def private_bytes(pid: int) -> int:
    """Memory of the process without what it shares in /dev/shm: RssAnon + RssFile."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssFile:")):
            total += int(line.split()[1]) * 1024
    return total


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def wait_until_faulted_in(server: CacheServer) -> None:
    """Returns when the background pre-fault of L1 is over."""
    deadline = time.monotonic() + 60.0
    while True:
        l1 = server.status()["l1"]
        if l1["committed_bytes"] == l1["capacity_bytes"]:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"L1 was not faulted in within 60 s: {l1}")
        time.sleep(0.2)


def help_seconds(runs: int) -> list[float]:
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "lmcache.cli.main", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return times[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    helps = help_seconds(arguments.runs)
    starts: list[float] = []
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name:
        for run in range(arguments.runs):
            started = time.perf_counter()
            with CacheServer(Path(name), l1_size_gb=4) as server:
                server.wait_ready()
                starts.append(time.perf_counter() - started)
                if run == arguments.runs - 1:
                    wait_until_faulted_in(server)
                    before, since = processor_seconds(server.pid), time.monotonic()
                    time.sleep(arguments.idle_seconds)
                    share = (processor_seconds(server.pid) - before) / (time.monotonic() - since)
                    results.append(at_most("server: idle processor", share * 100, "% of a core", 0.3))
                    memory = private_bytes(server.pid) / MIB
                    results.append(at_most("server: idle memory beside L1", memory, "MiB", 100))
    ready = statistics.median(starts)
    results.append(at_most("server: start to ready, 4 GB L1", ready, "s", 1.0, spread(starts)))
    results.append(at_most("lmcache --help", statistics.median(helps), "s", 0.3, spread(helps)))
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
