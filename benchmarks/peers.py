"""Loading frames from another server: over TCP beside a plain recv_into program with as many connections, out of its
mapped memory beside plain streaming copies on as many threads, or by transfer engines beside plain programs of them, in
the same run. Variables such as UCX_TLS are in force for both.

64 MiB at a time, in batches of at most 17 MiB and 256 objects as the storage loop makes them. The other server is a
process with a real L1 and the listener of a server; here is the adapter under its layers.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Callable, Iterator, Sequence
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
from lmcache.peers.transports.library import ENGINES, LibrarySettings, refuse_missing
from lmcache.peers.transports.library_process import LibraryProcess
from lmcache.peers.transports.shared_memory import copy_threads
from lmcache.server import THREAD_SWITCH_SECONDS
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import load_objects
from lmcache.transport.listening import listen
from measure import MIB, Result, at_least, command_line, report, spread
from plain_engines import PLAIN

FOREVER = 1e18
FIRST_SLOT_BYTES = 4096  # of L1, where its slots begin
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


def l1_of(size_bytes: int) -> L1Store:
    options = L1Options(size_bytes, policy="LRU", init_bytes=size_bytes)
    return L1Store.open(f"lmcache-bench-peers-{os.getpid()}-{time.monotonic_ns()}", os.urandom(16), options)


def library_of(engine: str, l1: L1Store, *, serves: bool) -> LibraryProcess | None:
    if not engine:
        return None
    memory = l1.memory
    settings = LibrarySettings(engine, memory.path, memory.size_bytes, memory.server_epoch, "127.0.0.1", serves)
    return LibraryProcess(settings, this_host_alone=True)


def identity_of(address: str, l1: L1Store | None = None, engine: str = "") -> Identity:
    sample = ChunkHasher("blake3", 256).sample()
    if l1 is None:
        return Identity(os.urandom(16), address, 256, "blake3", sample)
    memory = l1.memory
    return Identity(
        memory.server_epoch,
        address,
        256,
        "blake3",
        sample,
        shm_path=memory.path,
        shm_bytes=memory.size_bytes,
        transfer_engine=engine,
    )


# ---- the other server ------------------------------------------------------------------------------------------------
def holder(shape: Shape, engine: str, told: Connection) -> None:
    """Holds the objects, and sends as many bytes to whoever connects to its plain port. With a transfer engine, also by
    a plain program of it."""
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    l1 = l1_of(4 * shape.size_bytes)  # peers may lease a quarter
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
        listening,
        Introducer(identity_of(address, l1, engine), "", os.urandom),
        l1,
        Metrics().p2p,
        SystemClock(),
        library_of(engine, l1, serves=True),
    )
    listener.start()
    plain = socket.create_server(("127.0.0.1", 0))
    frames = l1.memory.view(array("Q", reserved.slots)[0], shape.size_bytes)
    threading.Thread(target=send_plain, args=(plain, frames, shape.size_bytes // CONNECTIONS), daemon=True).start()
    slots = [l1.address_of(slot) for slot in array("Q", reserved.slots)]
    registered = PLAIN[engine](l1.memory.address, l1.memory.size_bytes, serves=True) if engine else None
    described = registered.described if registered is not None else ("", b"")
    told.send((address, plain.getsockname()[1], l1.memory.path, described, slots))
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
        self._share_bytes = shape.size_bytes // copy_threads()
        self._threads = ThreadPoolExecutor(copy_threads())

    def run(self) -> None:
        list(self._threads.map(self._copy, range(copy_threads())))

    def _copy(self, number: int) -> None:
        first = number * self._share_bytes
        _native.copy_plain(self._target + first, self._source + first, self._share_bytes, "stream")


class PlainRead:
    def __init__(self, engine: str, described: tuple[str, bytes], slots: Sequence[int], l1: L1Store, shape: Shape):
        self._engine = PLAIN[engine](l1.memory.address, l1.memory.size_bytes, serves=False)
        self._described = described
        self._slots = slots
        first = l1.memory.address + FIRST_SLOT_BYTES
        self._targets = range(first, first + shape.size_bytes, shape.frame_bytes)
        self._frame_bytes = shape.frame_bytes

    def run(self) -> None:
        self._engine.read(self._described, self._targets, self._slots, self._frame_bytes)


# ---- this server -----------------------------------------------------------------------------------------------------
class Loader:
    def __init__(
        self, address: str, memory: memoryview, shape: Shape, transport: str, l1: L1Store | None = None
    ) -> None:
        """`memory` is of `l1`, where there is one."""
        metrics = self._metrics = Metrics()
        self._transport = transport
        config = PeersConfig(index=0, type="p2p", maps_memory=transport == "shared_memory")
        introducer = Introducer(identity_of("127.0.0.1:1"), "", os.urandom)
        library = library_of(transport, l1, serves=False) if l1 is not None else None
        self._adapter = PeersAdapter(
            config, introducer, metrics.p2p, SystemClock(), library, l1.memory if l1 is not None else None
        )
        self._runner = Runner(ConfiguredAdapter(config, self._adapter), metrics.l2, SystemClock())
        self._address = address
        self._keys = shape.keys()
        self._buffers = [
            memory[first : first + shape.frame_bytes] for first in range(0, shape.size_bytes, shape.frame_bytes)
        ]
        self._batches = shape.batches()

    async def open(self) -> None:
        await self._runner.open()
        await self._adapter.ready()
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
        labels = {"transport": self._transport}
        if not self._metrics.registry.get_sample_value("lmcache_mp_p2p_received_bytes_total", labels):
            raise SystemExit(f"nothing came by {self._transport}")
        await self._runner.drain(10)
        await self._runner.close(10)


@contextlib.contextmanager
def other_server(shape: Shape, engine: str = "") -> Iterator[tuple[str, int, str, tuple[str, bytes], list[int]]]:
    """What `holder` tells."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=holder, args=(shape, engine, theirs))
    process.start()
    try:
        if not ours.poll(120):
            raise SystemExit("the other server did not start")
        yield ours.recv()
        ours.send("stop")
        process.join(20)
    finally:
        process.kill()


async def measure(shape: Shape, runs: int, engine: str | None) -> Sequence[Result]:
    if engine:
        return await measure_engine(shape, runs, engine)
    with other_server(shape) as (address, plain_port, path, _, _):
        return await measure_built_in(shape, runs, address, plain_port, path)


async def measure_engine(shape: Shape, runs: int, engine: str) -> Sequence[Result]:
    l1 = l1_of(shape.size_bytes + FIRST_SLOT_BYTES)
    memory = l1.memory.view(FIRST_SLOT_BYTES, shape.size_bytes)
    with other_server(shape, engine) as (address, _, _, described, slots):
        loader = Loader(address, memory, shape, engine, l1)
        await loader.open()
        results = await compare(shape, engine, loader, PlainRead(engine, described, slots, l1, shape).run, runs)
        await loader.close()
    l1.close()
    return results


async def measure_built_in(shape: Shape, runs: int, address: str, plain_port: int, path: str) -> list[Result]:
    memory = map_like_l1(-(-shape.size_bytes // _native.LARGE_PAGE_BYTES) * _native.LARGE_PAGE_BYTES)
    results: list[Result] = []
    for transport, floor in (
        ("tcp", PlainProgram(plain_port, memory, shape)),
        ("shared_memory", PlainCopies(path, memory, shape)),
    ):
        loader = Loader(address, memory, shape, transport)
        await loader.open()
        results += await compare(shape, transport, loader, floor.run, runs)
        await loader.close()
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
    plain = {"tcp": "plain recv_into", "shared_memory": "plain copies"}.get(transport, f"plain {transport}")
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
    parser.add_argument("--engine", choices=ENGINES, help="a transfer engine instead of what is built in")
    arguments = parser.parse_args()
    if arguments.engine:
        refuse_missing(arguments.engine)
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    shapes = [Shape(payload, max(CONNECTIONS, arguments.mib * MIB // payload)) for payload in (2 * MIB, 64 << 10)]
    results = [result for shape in shapes for result in asyncio.run(measure(shape, arguments.runs, arguments.engine))]
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
