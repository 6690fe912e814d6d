"""Pages of SGLang's hierarchical cache through a real server, against the best plain copy loop of the same run.

A call is what SGLang makes of a batch of pages: lookup with its lease, copy and release for a load; reserve, copy
and commit for a store. Pages have two buffers, as in a host pool with the layout page_first.
"""

from __future__ import annotations

import array
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from copies import wait_until_mapped
from lmcache.cli.bench_timing import Region, timed
from lmcache.core.layout import LayerLayout
from lmcache.device.cpu import PagedGroup
from lmcache.integration.engine.connection_settings import ConnectionSettings
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.sglang.page_pool import PagePool
from lmcache.testing.processes import CacheServer
from measure import MIB, Result, at_least, best_copy_seconds, command_line, report, spread

CALL_BYTES = 64 * MIB
PAGE_KIB = (64, 256, 2048)
BATCH_PAGES = 128  # of SGLang's calls
L1_GB = 2


class Pages:
    """A host pool of 64 MiB, K and V apart, and its pool at the server."""

    def __init__(self, url: str, page_bytes: int) -> None:
        self.count = CALL_BYTES // page_bytes
        half = page_bytes // 2
        self.halves = [Region(CALL_BYTES // 2) for _ in range(2)]
        layers = tuple(LayerLayout(name, "uint8", (half,), (1,), half) for name in ("k", "v"))
        segments = tuple((region.address, half, half, ()) for region in self.halves)
        group = PagedGroup(f"bench {page_bytes}", 64, self.count, layers, segments, is_page=True)
        identity = WorkerIdentity(f"bench-pages-{page_bytes}", 0, "bench", 1, 0, stores=True)
        self.pool = PagePool(ConnectionSettings(url), identity, group, "", counts_lookups=False)
        self.numbers = array.array("q", range(self.count)).tobytes()

    def hashes(self, turn: int, pages: int) -> bytes:
        return b"".join(f"{turn} {page}".encode().rjust(32) for page in range(pages))

    def store(self, turn: int, pages: int) -> float:
        hashes, numbers = self.hashes(turn, pages), self.numbers[: 8 * pages]
        return self._timed(lambda: self.pool.store(hashes, numbers))

    def load(self, turn: int, pages: int) -> float:
        hashes, numbers = self.hashes(turn, pages), self.numbers[: 8 * pages]
        return self._timed(lambda: self.pool.load(hashes, numbers))

    def _timed(self, call: Callable[[], list[bool]]) -> float:
        answers: list[bool] = []
        seconds = timed(lambda: answers.extend(call()))
        assert answers and all(answers), f"{answers.count(False)} of {len(answers)} pages were missing"
        return seconds


def measure_pages(url: str, page_kib: int, runs: int, source: Region, target: Region) -> list[Result]:
    pages = Pages(url, page_kib << 10)
    wait_until_mapped(L1_GB << 30)
    stores, loads, copies, batches = [], [], [], []
    batch = min(BATCH_PAGES, pages.count)
    for turn in range(runs + 2):
        turn_store = pages.store(turn, pages.count)
        turn_load = pages.load(turn, pages.count)
        turn_batch = pages.load(turn, batch)
        copy = best_copy_seconds(source, target, CALL_BYTES, runs=3)
        if turn >= 2:  # the first two warm up
            stores.append(turn_store)
            loads.append(turn_load)
            batches.append(turn_batch)
            copies.append(copy)
    pages.pool.close()
    copy, store, load = statistics.median(copies), statistics.median(stores), statistics.median(loads)
    name = f"{pages.count} pages of {page_kib} KiB"
    batch_rate = batch * (page_kib << 10) / statistics.median(batches) / 1e9
    return [
        Result(f"{name}: copy loop", CALL_BYTES / copy / 1e9, "GB/s"),
        at_least(f"{name}: store / copy loop", copy / store, "ratio", 0.8, spread(stores, 1000) + " ms"),
        at_least(f"{name}: load / copy loop", copy / load, "ratio", 0.8, spread(loads, 1000) + " ms"),
        Result(f"{name}: {batch} in one call, load", batch_rate, "GB/s", detail=spread(batches, 1000) + " ms"),
    ]


def main() -> int:
    arguments = command_line(__doc__, runs=9).parse_args()
    source, target = Region(CALL_BYTES), Region(CALL_BYTES)
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder,
        CacheServer(Path(folder), l1_size_gb=L1_GB) as server,
    ):
        server.wait_ready()
        url = f"tcp://127.0.0.1:{server.port}"
        results = [
            result for page_kib in PAGE_KIB for result in measure_pages(url, page_kib, arguments.runs, source, target)
        ]
        return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
