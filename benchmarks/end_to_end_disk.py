"""Time to first token from L2 with the page cache dropped, beside an L1 hit and beside fio, in turn in one run.

    python benchmarks/end_to_end_disk.py [--folder FOLDER] [--tokens N] [--runs N] [--adapter JSON] [--direct]

Target: 1.15 x (L1 hit + the time that fio needs to read as many bytes from as many files on the same file system, by as
many threads, with the page cache dropped). `--direct`: both with O_DIRECT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from end_to_end import first_token_seconds, prompt_of
from fio import MISSING, Fio, present
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import make_llama
from measure import MIB, Result, at_most, report, spread

THREADS = 4
TARGET = 1.15
STORED_SECONDS = 60.0


CHUNK_TOKENS = 256
FRAME_BYTES = CHUNK_TOKENS * 8192 + 4096


def drop_from_page_cache(folder: Path) -> None:
    """Every file below the folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def wait_until_stored(server: CacheServer, objects: int) -> None:
    deadline = time.monotonic() + STORED_SECONDS
    while server.status()["l2"]["adapters"][0]["objects"] < objects:
        if time.monotonic() > deadline:
            raise SystemExit("the prompt did not reach L2")
        time.sleep(0.1)


def measure(server: CacheServer, engine: VllmEngine, l2: Path, fio: Fio, tokens: int, runs: int) -> list[Result]:
    prompt = prompt_of(1, tokens)
    chunks = tokens // CHUNK_TOKENS
    size_bytes = chunks * FRAME_BYTES
    cold, _ = first_token_seconds(engine, prompt)
    wait_until_stored(server, chunks)
    fio.run("write")
    seconds: dict[str, list[float]] = {"L1": [], "fio": [], "L2": []}
    cached = {"L1": 0, "L2": 0}
    for run in range(runs + 1):
        for what in ("L1", "fio", "L2") if run % 2 else ("fio", "L1", "L2"):
            if what == "L2":
                server.clear("l1")
            drop_from_page_cache(l2)
            if what == "fio":
                took = size_bytes / fio.run("read")
            else:
                took, cached[what] = first_token_seconds(engine, prompt)
            if run:
                seconds[what].append(took)
    assert cached["L1"] == cached["L2"] >= tokens - 257, cached
    name = f"{tokens} tokens"
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    ratios = [l2 / (l1 + disk) for l1, disk, l2 in zip(*seconds.values(), strict=True)]
    beside = f"median of runs {statistics.median(ratios):.2f} {spread(ratios)}"
    return [
        Result(f"{name}: cold", cold * 1000, "ms"),
        *(
            Result(f"{name}: {label}", medians[what] * 1000, "ms", detail=spread(seconds[what], 1000))
            for what, label in (
                ("L1", "L1 hit"),
                ("fio", f"fio, {size_bytes // MIB} MiB"),
                ("L2", "L2 hit, page cache dropped"),
            )
        ),
        at_most(
            f"{name}: L2 hit / (L1 hit + fio)",
            medians["L2"] / (medians["L1"] + medians["fio"]),
            "ratio",
            TARGET,
            beside,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=str(Path(__file__).resolve().parents[1]), help="on the disk to measure")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--direct", action="store_true", help="use_odirect, and O_DIRECT for fio")
    parser.add_argument("--adapter", default="{}", help="further settings of fs_native")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not present():
        print(MISSING, file=sys.stderr)
        return 0
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-disk-") as on_disk,
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name,
    ):
        folder, l2 = Path(name), Path(on_disk) / "l2"
        make_llama(folder / "model")
        count = options.tokens // CHUNK_TOKENS // THREADS * THREADS
        fio = Fio(
            Path(on_disk),
            count,
            FRAME_BYTES,
            "psync",
            threads=THREADS,
            depth=THREADS,
            one_file=False,
            direct=options.direct,
        )
        adapter = {
            "type": "fs_native",
            "base_path": str(l2),
            "use_odirect": options.direct,
            **json.loads(options.adapter),
        }
        with CacheServer(folder, l1_size_gb=1, extra=["--l2-adapter", json.dumps(adapter)]) as server:
            server.wait_ready()
            with VllmEngine(folder / "model", folder, cache_port=server.port) as engine:
                engine.wait_ready()
                engine.complete(prompt_of(0, 600), max_tokens=4)
                results = measure(server, engine, l2, fio, options.tokens, options.runs)
    return report(results, options.json)


if __name__ == "__main__":
    sys.exit(main())
