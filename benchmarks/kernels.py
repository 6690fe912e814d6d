"""The native core alone, on one thread: copies with checksum against the best copy loop, and chunk hashes.

Every round measures everything once, so that a noisy neighbour disturbs all rows alike.
"""

from __future__ import annotations

import array
import random
import statistics
import sys
import time
from collections.abc import Callable

from lmcache import _native
from lmcache.cli.bench_timing import Region
from measure import MIB, Result, at_least, at_most, command_line, report, spread

HEADER_BYTES = _native.FRAME_HEADER_BYTES
LAYERS = 8
CHUNK_BYTES = 2 * MIB
DIGEST = bytes(32)
WAIT_SECONDS = 60.0
HASHED_TOKENS = 131_072


class PagedLoop:
    """Stores and loads chunks of 2 MiB through blocks of `block_bytes` a layer, in random order."""

    def __init__(self, arena: Region, kv: Region, chunks: int, block_bytes: int, run_bytes: int) -> None:
        blocks_per_chunk = CHUNK_BYTES // LAYERS // block_bytes
        num_blocks = chunks * blocks_per_chunk
        self.copier = _native.PagedCopier(arena.address, arena.size_bytes, 1)
        # A block of short runs has gaps as long as its runs: half of the memory is another tensor's.
        spacing = 1 if run_bytes == block_bytes else 2
        dims = () if spacing == 1 else ((block_bytes // run_bytes, run_bytes * spacing),)
        layer_bytes = num_blocks * block_bytes * spacing
        segments = [
            (kv.address + layer * layer_bytes, block_bytes * spacing, run_bytes, dims) for layer in range(LAYERS)
        ]
        self.group = self.copier.add_group(segments, blocks_per_chunk, num_blocks)
        self.slots = array.array("Q", (i * (HEADER_BYTES + CHUNK_BYTES) for i in range(chunks)))
        order = list(range(num_blocks))
        random.Random(1).shuffle(order)
        self.blocks = array.array("q", order)
        self.hashes = bytes(32 * chunks)
        self.template = _native.frame_template(b"", DIGEST, CHUNK_BYTES)
        self.good = b"\x01" * chunks

    def store(self) -> None:
        job = self.copier.submit_store(self.group, self.slots, self.blocks, self.hashes, self.template)
        assert self.copier.wait(job, WAIT_SECONDS) == self.good

    def load(self) -> None:
        job = self.copier.submit_load(self.group, self.slots, self.blocks, self.hashes, DIGEST)
        assert self.copier.wait(job, WAIT_SECONDS) == self.good


def rounds(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Wall seconds of each call in each counted round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(runs + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - started)
    return times


def copies(chunks: int, runs: int) -> list[Result]:
    size = chunks * CHUNK_BYTES
    arena = Region(chunks * (HEADER_BYTES + CHUNK_BYTES))
    kv = Region(2 * size)
    loops = {
        "blocks of 128 KiB": PagedLoop(arena, kv, chunks, 128 << 10, 128 << 10),
        "blocks of 32 KiB": PagedLoop(arena, kv, chunks, 32 << 10, 32 << 10),
        "runs of 1 KiB": PagedLoop(arena, kv, chunks, 32 << 10, 1 << 10),
        "runs of 64 B": PagedLoop(arena, kv, chunks, 32 << 10, 64),
    }
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: _native.copy_plain(arena.address, kv.address, size, "memcpy"),
        "stream": lambda: _native.copy_plain(arena.address, kv.address, size, "stream"),
        "with checksum": lambda: _native.copy_with_checksum(arena.address, kv.address, size),
    }
    for name, loop in loops.items():
        calls[f"store, {name}"] = loop.store
        calls[f"load, {name}"] = loop.load
    times = rounds(calls, runs)
    for loop in loops.values():
        loop.copier.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(medians["memcpy"], medians["stream"])
    results = [Result(f"plain copy: {name}", size / 1e9 / medians[name], "GB/s") for name in ("memcpy", "stream")]
    for name, median in list(medians.items())[2:]:
        detail = f"{size / 1e9 / median:.1f} GB/s, {spread(times[name], 1000)} ms"
        if "of 128 KiB" in name:
            results.append(at_least(f"{name} / best plain copy", best / median, "ratio", 0.85, detail))
        else:
            results.append(Result(f"{name} / best plain copy", best / median, "ratio", detail=detail))
    return results


def hashing(runs: int) -> list[Result]:
    source = random.Random(2)
    tokens = array.array("I", (source.randrange(200_000) for _ in range(HASHED_TOKENS)))
    times = rounds({"hash": lambda: _native.hash_chunks(tokens, 256, DIGEST)}, 10 * runs)["hash"]
    name = f"hashes of {HASHED_TOKENS} tokens in chunks of 256"
    return [at_most(name, statistics.median(times) * 1000, "ms", 0.3, spread(times, 1000) + " ms")]


def main() -> int:
    parser = command_line(__doc__, runs=15)
    parser.add_argument("--chunks", type=int, default=32, help="chunks of 2 MiB (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"copy path: {_native.copy_path()}", file=sys.stderr)
    return report(copies(arguments.chunks, arguments.runs) + hashing(arguments.runs), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
