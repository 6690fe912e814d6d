"""64 MiB through a real server: reserve, copy, commit and lookup, copy, release, against the copy loop.

The two calls around a copy cannot take less than two ZMQ echoes to a process that slept meanwhile; the same copy
between two such echoes is measured beside it.

The engine's memory is shaped like the baseline model's: 8 layers, blocks of 128 tokens, 1 KiB of KV a token and layer.
"""

from __future__ import annotations

import array
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lmcache import _native
from lmcache.cli.bench_timing import Region
from lmcache.client.client import Client
from lmcache.core.key import Namespace
from lmcache.protocol.messages import Commit, EndSession, Lookup, RegisterInstance, RegisterWorker, Release, Reserve
from lmcache.testing.processes import CacheServer, free_port
from measure import MIB, Result, at_least, best_copy_seconds, command_line, report, spread
from rpc import Echo, echo_server

LAYERS = 8
BLOCK_TOKENS = 128
LAYER_BLOCK_BYTES = BLOCK_TOKENS * 1024
CHUNK_TOKENS = 256
CHUNKS = 32
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
BLOCKS = CHUNKS * BLOCKS_PER_CHUNK
PAYLOAD_BYTES = LAYERS * BLOCKS_PER_CHUNK * LAYER_BLOCK_BYTES
INSTANCE = "bench-copies"
LAYOUT = "0" * 32
TIMEOUT_SECONDS = 10.0


class PagedMemory:
    """KV tensors of an engine, each layer a run of blocks, and the copier between them and the server's memory."""

    def __init__(self, client: Client, threads: int) -> None:
        assert client.memory is not None
        client.memory.map_ahead()
        self.layers = [Region(BLOCKS * LAYER_BLOCK_BYTES) for _ in range(LAYERS)]
        self.copier = _native.PagedCopier(client.memory.address, client.memory.size_bytes, threads)
        segments = [(layer.address, LAYER_BLOCK_BYTES, LAYER_BLOCK_BYTES, ()) for layer in self.layers]
        self.group = self.copier.add_group(segments, BLOCKS_PER_CHUNK, BLOCKS)
        self.blocks = array.array("q", range(BLOCKS)).tobytes()
        self.namespace = Namespace("bench", 1, 0, 0, LAYOUT)
        self.template = _native.frame_template(self.namespace.encode(), self.namespace.digest, PAYLOAD_BYTES)


class Round:
    """One prompt of 8,192 tokens: stored once, then retrieved."""

    def __init__(self, client: Client, memory: PagedMemory, number: int) -> None:
        self.client = client
        self.memory = memory
        self.request = f"request-{number}"
        self.tokens = array.array("I", range(number * 100_000, number * 100_000 + CHUNKS * CHUNK_TOKENS)).tobytes()

    def lookup(self) -> tuple[int, int, bytes, bytes]:
        reply = self.client.call("lookup", Lookup(INSTANCE, self.request, "", 0, self.tokens), TIMEOUT_SECONDS)
        return reply.chunks, reply.lease, reply.hashes, reply.slots

    def store(self, hashes: bytes) -> float:
        started = time.perf_counter()
        reply = self.client.call("reserve", Reserve(INSTANCE, 0, "", hashes), TIMEOUT_SECONDS)
        job = self.memory.copier.submit_store(
            self.memory.group, reply.slots, self.memory.blocks, hashes, self.memory.template
        )
        written = self.memory.copier.wait(job, TIMEOUT_SECONDS)
        assert written is not None, "the copies did not end"
        committed = self.client.call("commit", Commit(INSTANCE, 0, reply.reservation, written), TIMEOUT_SECONDS)
        seconds = time.perf_counter() - started
        assert committed.committed == CHUNKS, committed
        return seconds

    def retrieve(self) -> float:
        """Session and hashes are there already; counted: lookup with its lease, copy, release."""
        started = time.perf_counter()
        chunks, lease, hashes, slots = self.lookup()
        job = self.memory.copier.submit_load(
            self.memory.group, slots, self.memory.blocks, hashes, self.memory.namespace.digest
        )
        copied = self.memory.copier.wait(job, TIMEOUT_SECONDS)
        self.client.call("release", Release(INSTANCE, lease), TIMEOUT_SECONDS)
        seconds = time.perf_counter() - started
        assert chunks == CHUNKS and copied == b"\x01" * CHUNKS, (chunks, copied)
        return seconds

    def end(self) -> None:
        self.client.call("end_session", EndSession(INSTANCE, self.request), TIMEOUT_SECONDS)


def wait_until_mapped(size_bytes: int) -> None:
    """Returns when this process has mapped as much shared memory, which the client does in the background."""
    deadline = time.monotonic() + 60.0
    while True:
        status = Path("/proc/self/status").read_text()
        mapped_kib = int(status.split("RssShmem:")[1].split()[0])
        if mapped_kib << 10 >= size_bytes:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{mapped_kib} KiB of shared memory were mapped within 60 s")
        time.sleep(0.2)


def bare_seconds(echo: Echo, source: Region, destination: Region) -> float:
    """An echo, a plain copy by one thread, an echo."""
    started = time.perf_counter()
    echo.call(b"")
    _native.copy_plain(destination.address, source.address, source.size_bytes, "stream")
    echo.call(b"")
    return time.perf_counter() - started


def measure(server: CacheServer, echo: Echo, runs: int, threads: int) -> list[Result]:
    client = Client(f"tcp://127.0.0.1:{server.port}")
    client.connect(TIMEOUT_SECONDS)
    client.register(RegisterInstance(INSTANCE, "bench", 1, 1, 10.0), TIMEOUT_SECONDS)
    client.register(RegisterWorker(INSTANCE, 0, 0, [LAYOUT], [PAYLOAD_BYTES]), TIMEOUT_SECONDS)
    assert client.memory is not None
    memory = PagedMemory(client, threads)
    wait_until_mapped(client.memory.size_bytes)
    size = CHUNKS * PAYLOAD_BYTES
    source, destination = Region(size), Region(size)
    stores, retrieves, copies, bare = [], [], [], []
    for number in range(runs + 2):
        turn = Round(client, memory, number)
        hashes = turn.lookup()[2]
        turn_store = turn.store(hashes)
        turn_retrieve = turn.retrieve()
        turn.end()
        copy = best_copy_seconds(source, destination, size, runs=3)
        around = bare_seconds(echo, source, destination)
        if number >= 2:  # the first two warm up
            stores.append(turn_store)
            retrieves.append(turn_retrieve)
            copies.append(copy)
            bare.append(around)
    client.close()
    copy = statistics.median(copies)
    gigabytes = size / 1e9
    floor, store, retrieve = statistics.median(bare), statistics.median(stores), statistics.median(retrieves)
    return [
        Result("best single-thread copy loop", gigabytes / copy, "GB/s"),
        Result("the same copy between two bare echoes", gigabytes / floor, "GB/s"),
        Result(f"store of {size // MIB} MiB, {threads} threads", gigabytes / store, "GB/s"),
        Result(f"retrieve of {size // MIB} MiB, {threads} threads", gigabytes / retrieve, "GB/s"),
        at_least("store / copy loop", copy / store, "ratio", 0.85, spread(stores, 1000) + " ms"),
        at_least("retrieve / copy loop", copy / retrieve, "ratio", 0.85, spread(retrieves, 1000) + " ms"),
        at_least("store / copy between two echoes", floor / store, "ratio", 0.85),
        at_least("retrieve / copy between two echoes", floor / retrieve, "ratio", 0.85),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    port = free_port()
    echoing = multiprocessing.Process(target=echo_server, args=(port,), daemon=True)
    echoing.start()
    echo = Echo(port)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder,
            CacheServer(Path(folder), l1_size_gb=2) as server,
        ):
            server.wait_ready()
            return report(measure(server, echo, arguments.runs, arguments.threads), arguments.json)
    finally:
        echo.close()
        echoing.terminate()


if __name__ == "__main__":
    sys.exit(main())
