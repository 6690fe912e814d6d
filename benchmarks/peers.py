"""Loading frames from another server: over TCP beside a plain recv_into program with as many connections, and out of
its mapped memory beside plain streaming copies on as many threads, in the same run.

64 MiB at a time, in batches of at most 16 MiB and 256 objects as the storage loop makes them. The other server is a
process with a real L1 and the listener of a server; here is the adapter under its layers.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from lmcache import _native
from lmcache.clock import SystemClock
from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.core.frame import frame_bytes, header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet
from lmcache.core.outcome import LoadOutcome
from lmcache.l1.store import L1Options, L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.l2.runner import Runner
from lmcache.memory.mapping import map_like_l1
from lmcache.peers.adapter import PeersAdapter
from lmcache.peers.config import PeersConfig
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.listener import PeerListener
from lmcache.server import THREAD_SWITCH_SECONDS
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import load_objects
from lmcache.transport.listening import listen
from measure import MIB, Result, at_least, command_line, report, spread

FOREVER = 1e18
OWNER = 7
CONNECTIONS = limits.MAX_PEER_READS
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32, "")
FLOORS = {(2 * MIB, "tcp"): 85.0, (2 * MIB, "shared_memory"): 80.0, (64 << 10, "tcp"): 70.0}


@dataclass(frozen=True)
class Shape:
    payload_bytes: int
    count: int

    @property
    def frame_bytes(self) -> int:
        return frame_bytes(self.payload_bytes)

    @property
    def size_bytes(self) -> int:
        return self.frame_bytes * self.count

    def keys(self) -> list[ObjectKey]:
        return [
            ObjectKey(NAMESPACE, hashlib.sha256(f"{self}/{index}".encode()).digest()) for index in range(self.count)
        ]

    def batches(self) -> list[range]:
        most_objects = load_objects(PeersAdapter.most_load_objects, self.count)
        step = max(1, min(most_objects, limits.L2_LOAD_BATCH_BYTES // self.frame_bytes))
        return [range(first, min(first + step, self.count)) for first in range(0, self.count, step)]


def identity_of(address: str, l1: L1Store | None = None) -> Identity:
    sample = ChunkHasher("blake3", 256).sample()
    if l1 is None:
        return Identity(os.urandom(16), address, 256, "blake3", sample)
    memory = l1.memory
    return Identity(
        memory.server_epoch, address, 256, "blake3", sample, shm_path=memory.path, shm_bytes=memory.size_bytes
    )


# ---- the other server ------------------------------------------------------------------------------------------------
def holder(shape: Shape, told: Connection) -> None:
    """Holds the objects, and sends as many bytes to whoever connects to its plain port."""
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    size_bytes = 4 * shape.size_bytes  # peers may lease a quarter
    options = L1Options(size_bytes, policy="LRU", init_bytes=size_bytes)
    l1 = L1Store.open(f"lmcache-bench-peers-{os.getpid()}", os.urandom(16), options)
    keys = shape.keys()
    hashes = ChunkHashes(b"".join(key.chunk_hash for key in keys))
    reserved = l1.reserve(OWNER, KeyBatch(NamespaceSet((NAMESPACE,), (shape.frame_bytes,)), hashes), FOREVER)
    template = header_template(NAMESPACE, shape.payload_bytes)
    for key, slot in zip(keys, array("Q", reserved.slots), strict=True):
        l1.memory.view(slot + limits.FRAME_HEADER_BYTES, shape.payload_bytes)[:] = os.urandom(64) * (
            shape.payload_bytes // 64
        )
        _native.frame_seal(l1.address_of(slot), template, key.chunk_hash)
    l1.core.commit(reserved.reservation)
    listening = listen("127.0.0.1", 0, "the benchmark")
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    listener = PeerListener(
        listening, Introducer(identity_of(address, l1), "", os.urandom), l1, Metrics().p2p, SystemClock()
    )
    listener.start()
    plain = socket.create_server(("127.0.0.1", 0))
    frames = l1.memory.view(array("Q", reserved.slots)[0], shape.size_bytes)
    threading.Thread(target=send_plain, args=(plain, frames, shape.size_bytes // CONNECTIONS), daemon=True).start()
    told.send((address, plain.getsockname()[1], l1.memory.path))
    told.recv()
    listener.stop()
    l1.close()


def send_plain(plain: socket.socket, frames: memoryview, share_bytes: int) -> None:
    """A share to a connection, for each byte that comes on it."""

    def serve(connection: socket.socket, first: int) -> None:
        while connection.recv(1):
            connection.sendall(frames[first : first + share_bytes])

    for number in range(CONNECTIONS):
        connection, _ = plain.accept()
        threading.Thread(target=serve, args=(connection, number * share_bytes), daemon=True).start()


# ---- what it is compared with ----------------------------------------------------------------------------------------
class PlainProgram:
    def __init__(self, port: int, memory: memoryview, shape: Shape) -> None:
        self._share_bytes = shape.size_bytes // CONNECTIONS
        self._memory = memory
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        self._threads = ThreadPoolExecutor(CONNECTIONS)

    def run(self) -> None:
        list(self._threads.map(self._receive, range(CONNECTIONS)))

    def _receive(self, number: int) -> None:
        connection = self._connections[number]
        left = self._memory[number * self._share_bytes : (number + 1) * self._share_bytes]
        connection.sendall(b"x")
        while left:
            left = left[connection.recv_into(left) :]


class PlainCopies:
    def __init__(self, path: str, memory: memoryview, shape: Shape) -> None:
        with open(path, "rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._source = _native.buffer_address(self._mapping) + 4096
        self._target = _native.buffer_address(memory)
        self._shape = shape
        self._threads = ThreadPoolExecutor(CONNECTIONS)

    def run(self) -> None:
        list(self._threads.map(self._copy, self._shape.batches()))

    def _copy(self, batch: range) -> None:
        first, size_bytes = batch[0] * self._shape.frame_bytes, len(batch) * self._shape.frame_bytes
        _native.copy_plain(self._target + first, self._source + first, size_bytes, "stream")


# ---- this server -----------------------------------------------------------------------------------------------------
class Loader:
    def __init__(self, address: str, memory: memoryview, shape: Shape, *, maps_memory: bool) -> None:
        metrics = Metrics()
        config = PeersConfig(index=0, type="p2p", maps_memory=maps_memory)
        introducer = Introducer(identity_of("127.0.0.1:1"), "", os.urandom)
        self._adapter = PeersAdapter(config, introducer, metrics.p2p, SystemClock())
        self._runner = Runner(ConfiguredAdapter(config, self._adapter), metrics.l2, SystemClock())
        self._address = address
        self._keys = shape.keys()
        self._buffers = [
            memory[first : first + shape.frame_bytes] for first in range(0, shape.size_bytes, shape.frame_bytes)
        ]
        self._batches = shape.batches()

    async def open(self) -> None:
        await self._runner.open()
        self._adapter.set_members([self._address])
        for _ in range(6000):
            if any(peer["connected"] for peer in self._adapter.status()["peers"]):
                return
            await asyncio.sleep(0.01)
        raise SystemExit("the other server does not answer")

    async def run(self) -> float:
        """Seconds of the loads; the lookup before them is not counted."""
        for _ in range(1000):  # a late answer is no answer
            if all((await self._runner.ask(self._keys)).exist):
                break
            await asyncio.sleep(0.05)
        started = time.perf_counter()
        outcomes = await asyncio.gather(*map(self._load, self._batches))
        seconds = time.perf_counter() - started
        if any(outcome is not LoadOutcome.LOADED for batch in outcomes for outcome in batch):
            raise SystemExit("a frame did not come")
        return seconds

    async def _load(self, batch: range) -> list[LoadOutcome]:
        keys, buffers = ([of[index] for index in batch] for of in (self._keys, self._buffers))
        return await self._runner.load(keys, buffers, lambda: None)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._runner.drain(10)
        await self._runner.close(10)


async def measure(shape: Shape, runs: int) -> list[Result]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=holder, args=(shape, theirs), daemon=True)
    process.start()
    if not ours.poll(120):
        raise SystemExit("the other server did not start")
    address, plain_port, path = ours.recv()
    memory = map_like_l1(-(-shape.size_bytes // _native.LARGE_PAGE_BYTES) * _native.LARGE_PAGE_BYTES)
    results: list[Result] = []
    for transport, floor in (
        ("tcp", PlainProgram(plain_port, memory, shape)),
        ("shared_memory", PlainCopies(path, memory, shape)),
    ):
        loader = Loader(address, memory, shape, maps_memory=transport == "shared_memory")
        await loader.open()
        results += await compare(shape, transport, loader, floor.run, runs)
        await loader.close()
    ours.send("stop")
    process.join(20)
    return results


async def compare(
    shape: Shape, transport: str, loader: Loader, floor: Callable[[], None], runs: int
) -> Sequence[Result]:
    """In turns, so that both see the same machine."""
    loads, floors = [], []
    for run in range(runs + 1):
        seconds = await loader.run()
        started = time.perf_counter()
        floor()
        if run:  # the first one warms up
            loads.append(seconds)
            floors.append(time.perf_counter() - started)
    gigabytes = shape.size_bytes / 1e9
    name = f"{shape.payload_bytes >> 10} KiB objects, {transport}"
    plain = "plain recv_into" if transport == "tcp" else "plain copies"
    rates, floor_rates = [gigabytes / seconds for seconds in loads], [gigabytes / seconds for seconds in floors]
    part = 100 * statistics.median(rates) / statistics.median(floor_rates)
    limit = FLOORS.get((shape.payload_bytes, transport))
    share = f"{name}, of {plain}"
    return [
        Result(name, statistics.median(rates), "GB/s", detail=spread(rates)),
        Result(f"{name}: {plain}", statistics.median(floor_rates), "GB/s", detail=spread(floor_rates)),
        Result(share, part, "%") if limit is None else at_least(share, part, "%", limit),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=15)
    parser.add_argument("--mib", type=int, default=64, help="loaded at a time")
    arguments = parser.parse_args()
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    shapes = [Shape(payload, max(CONNECTIONS, arguments.mib * MIB // payload)) for payload in (2 * MIB, 64 << 10)]
    results = [result for shape in shapes for result in asyncio.run(measure(shape, arguments.runs))]
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
