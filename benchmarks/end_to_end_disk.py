"""Time to first token from L2 with the page cache dropped, beside an L1 hit and beside fio, in turn in one run.

    python benchmarks/end_to_end_disk.py [--folder FOLDER] [--tokens N] [--runs N] [--adapter JSON] [--direct]

Target: 1.15 x (L1 hit + the time that fio needs to read as many bytes from as many files on the same file system, by as
many threads): with O_DIRECT or with the page cache dropped, whichever is faster. `--direct`: the server uses O_DIRECT.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from engines import beside_a_server, first_token_seconds, prompt_of
from fio import MISSING, Fio, present
from lmcache.testing.demo import wait_until_stored
from lmcache.testing.processes import CacheServer, VllmEngine
from measure import Result, at_most, command_line, report, spread

THREADS = 4
TARGET = 1.15
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


def measure(
    server: CacheServer, engine: VllmEngine, l2: Path, fios: dict[str, Fio], tokens: int, runs: int
) -> list[Result]:
    prompt = prompt_of(1, tokens)
    chunks = tokens // CHUNK_TOKENS
    size_bytes = chunks * FRAME_BYTES
    before = int(server.status()["l2"]["adapters"][0]["objects"])
    cold, _ = first_token_seconds(engine, prompt)
    wait_until_stored(server, before + chunks)
    for fio in fios.values():
        fio.run("write")
    seconds: dict[str, list[float]] = {medium: [] for medium in ("L1", *fios, "L2")}
    cached = {"L1": 0, "L2": 0}
    for run in range(runs + 1):
        for medium in ("L1", *fios, "L2") if run % 2 else (*fios, "L1", "L2"):
            if medium == "L2":
                server.clear("l1")
            drop_from_page_cache(l2)
            if medium in fios:
                took = size_bytes / fios[medium].run("read")
            else:
                took, cached[medium] = first_token_seconds(engine, prompt)
            if run:
                seconds[medium].append(took)
    assert cached["L1"] == cached["L2"] >= tokens - 257, cached
    name = f"{tokens} tokens"
    medians = {medium: statistics.median(values) for medium, values in seconds.items()}
    disk = min(fios, key=medians.__getitem__)
    ratios = [l2 / (l1 + fio) for l1, fio, l2 in zip(seconds["L1"], seconds[disk], seconds["L2"], strict=True)]
    labels = {"L1": "L1 hit", "L2": "L2 hit, page cache dropped"}
    return [
        Result(f"{name}: cold", cold * 1000, "ms"),
        *(
            Result(f"{name}: {labels.get(medium, medium)}", medians[medium] * 1000, "ms", detail=spread(values, 1000))
            for medium, values in seconds.items()
        ),
        at_most(
            f"{name}: L2 hit / (L1 hit + {disk})",
            medians["L2"] / (medians["L1"] + medians[disk]),
            "ratio",
            TARGET,
            f"median of runs {statistics.median(ratios):.2f} {spread(ratios)}",
        ),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=9)
    parser.add_argument("--folder", default=str(Path(__file__).resolve().parents[1]), help="on the disk to measure")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--direct", action="store_true", help="use_odirect")
    parser.add_argument("--adapter", default="{}", help="further settings of fs_native")
    options = parser.parse_args()
    if not present():
        print(MISSING, file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-disk-") as on_disk:
        l2 = Path(on_disk) / "l2"
        count = options.tokens // CHUNK_TOKENS // THREADS * THREADS
        fios = {}
        for name, direct in (("fio, O_DIRECT", True), ("fio, page cache dropped", False)):
            of_fio = Path(on_disk) / f"fio{int(direct)}"
            of_fio.mkdir()
            fios[name] = Fio(
                of_fio, count, FRAME_BYTES, "psync", threads=THREADS, depth=THREADS, one_file=False, direct=direct
            )
        adapter = {
            "type": "fs_native",
            "base_path": str(l2),
            "use_odirect": options.direct,
            **json.loads(options.adapter),
        }
        with beside_a_server({}, l1_size_gb=1, extra=["--l2-adapter", json.dumps(adapter)]) as (server, (engine,)):
            results = measure(server, engine, l2, fios, options.tokens, options.runs)
    return report(results, options.json)


if __name__ == "__main__":
    sys.exit(main())
