"""What the server costs before anybody uses it: start, memory, idle processor time, and the command's own start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lmcache.testing.processes import CacheServer
from measure import MIB, Result, at_most, command_line, median_seconds, processor_seconds, report, spread


def private_bytes(pid: int) -> int:
    """Memory of the process without what it shares in /dev/shm: RssAnon + RssFile."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssFile:")):
            total += int(line.split()[1]) * 1024
    return total


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
    command = [sys.executable, "-m", "lmcache.cli.main", "--help"]
    return median_seconds(lambda: subprocess.run(command, check=True, capture_output=True), runs, warm_up=1)


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
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
