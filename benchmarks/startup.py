"""What the server costs before anybody uses it: packages, disk, start, memory, idle processor time; and the start of
its command. All with a copy of the installed package and of what it requires without extras, and with nothing else."""

from __future__ import annotations

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


# ---- the package alone -----------------------------------------------------------------------------------------------
ALONE = ("-S", "-m", "lmcache.cli.main")  # without the packages of this environment


def required(package: str) -> dict[str, metadata.Distribution]:
    """The package and all that it requires without extras, by name."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [package]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found


def install_alone(packages: dict[str, metadata.Distribution], folder: Path) -> None:
    """Installs files as pip would, compiled. Commands, which lie outside of the packages' folder, are left out."""
    for package in packages.values():
        for file in package.files or ():
            source = Path(str(file.locate()))
            if source.is_file() and ".." not in file.parts and "__pycache__" not in file.parts:
                copy = folder / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
    compileall.compile_dir(folder, quiet=1)


def disk_bytes(folder: Path) -> int:
    """That the files take, in whole blocks."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def help_seconds(environment: dict[str, str], runs: int) -> list[float]:
    command = [sys.executable, *ALONE, "--help"]

    def run() -> object:
        return subprocess.run(command, check=True, capture_output=True, env=environment)

    return median_seconds(run, runs, warm_up=1)


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    starts: list[float] = []
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name:
        packages, folder = required("lmcache"), Path(name) / "alone"
        install_alone(packages, folder)
        results.append(at_most("server: packages", len(packages), "", 25, ", ".join(sorted(packages))))
        results.append(at_most("server: disk", disk_bytes(folder) / 1e6, "MB", 80))
        alone = {"PYTHONPATH": str(folder)}
        helps = help_seconds({**os.environ, **alone}, arguments.runs)
        for run in range(arguments.runs):
            started = time.perf_counter()
            with CacheServer(Path(name), l1_size_gb=4, program=ALONE, environment=alone) as server:
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
