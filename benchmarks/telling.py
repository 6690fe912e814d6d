"""What it costs a server to tell a coordinator what comes and goes: stores beside stores at a server that tells nobody.

Two servers are stored into in turns, so many objects a second, each with an L1 that is full, so that as much goes as
comes. What telling costs the server alone is the processor's time of its process, beside that of the whole store:
client and server. The time of a store includes what the coordinator takes from the machine's processors meanwhile.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lmcache import _native
from lmcache.cli.bench_timing import Region, timed
from lmcache.client.client import Client
from lmcache.core.frame import header_template
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.protocol.messages import Commit, RegisterInstance, RegisterWorker, Reserve
from lmcache.testing.processes import LOOPBACK, CacheServer, CoordinatorProcess
from measure import MIB, Result, at_most, command_line, processor_seconds, report, spread

INSTANCE, MODEL, LAYOUT = "bench-telling", "bench", "0" * 32
STORE_BYTES = 64 * MIB
L1_GB = 0.5
COPY_THREADS = 2
TIMEOUT_SECONDS = 30.0
MOST_STORES_A_SECOND = 60  # 4 GB/s; changes of objects of 64 KiB are then noted for two seconds
SETTLE_SECONDS = 2.5  # until what was stored has been told
LIMIT_PERCENT = 3.0


@dataclass
class Costs:
    """Of the stores of each turn."""

    store_seconds: list[float] = field(default_factory=list)
    client_seconds: list[float] = field(default_factory=list)  # these of a processor
    server_seconds: list[float] = field(default_factory=list)
    coordinator_seconds: list[float] = field(default_factory=list)


class Storing:
    """An engine of one server, which stores new objects."""

    def __init__(self, server: CacheServer, payload_bytes: int) -> None:
        self._count = max(1, STORE_BYTES // payload_bytes)
        self._client = Client(f"tcp://{LOOPBACK}:{server.port}")
        self._client.register(RegisterInstance(INSTANCE, MODEL, 1, 1, 10.0, "bench"), TIMEOUT_SECONDS)
        self._client.register(RegisterWorker(INSTANCE, 0, 0, [LAYOUT], [payload_bytes]), TIMEOUT_SECONDS)
        memory = self._client.memory
        assert memory is not None
        memory.map_ahead()
        self._blocks = Region(self._count * payload_bytes)
        self._copier = _native.PagedCopier(memory.address, memory.size_bytes, COPY_THREADS)
        self._group = self._copier.add_group([(self._blocks.address, payload_bytes, payload_bytes, ())], 1, self._count)
        self._template = header_template(Namespace(MODEL, 1, 0, 0, LAYOUT, ""), payload_bytes)
        self._server = server

    def store(self) -> None:
        hashes = os.urandom(self._count * CHUNK_HASH_BYTES)
        reply = self._client.call("reserve", Reserve(INSTANCE, 0, "", hashes), TIMEOUT_SECONDS)
        blocks = memoryview(_BLOCK_NUMBERS)[: 8 * self._count]
        job = self._copier.submit_store(self._group, reply.slots, bytes(blocks), hashes, self._template)
        written = self._copier.wait(job, TIMEOUT_SECONDS)
        assert written is not None, "the copies did not end"
        committed = self._client.call("commit", Commit(INSTANCE, 0, reply.reservation, written), TIMEOUT_SECONDS)
        assert committed.committed == self._count, committed

    def turn(self, seconds: float, coordinator: CoordinatorProcess, costs: Costs) -> None:
        pids = self._server.pid, coordinator.pid
        stores = max(1, int(seconds * MOST_STORES_A_SECOND))
        began, processor, before = time.perf_counter(), time.process_time(), [processor_seconds(pid) for pid in pids]
        stored_seconds = 0.0
        for number in range(stores):
            time.sleep(max(0.0, began + number / MOST_STORES_A_SECOND - time.perf_counter()))
            stored_seconds += timed(self.store)
        costs.store_seconds.append(stored_seconds / stores)
        costs.client_seconds.append((time.process_time() - processor) / stores)
        time.sleep(SETTLE_SECONDS)
        server, told = ((processor_seconds(pid) - since) / stores for pid, since in zip(pids, before, strict=True))
        costs.server_seconds.append(server)
        costs.coordinator_seconds.append(told)

    def close(self) -> None:
        self._client.close()


_BLOCK_NUMBERS = b"".join(number.to_bytes(8, "little") for number in range(STORE_BYTES // (64 << 10)))


def compare(payload_bytes: int, rounds: int, seconds: float) -> Iterator[Result]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-bench-")))
        coordinator = stack.enter_context(CoordinatorProcess(folder))
        coordinator.wait_ready()
        telling = ("--coordinator-url", coordinator.url)
        servers = [
            stack.enter_context(CacheServer(folder, l1_size_gb=L1_GB, extra=extra, log_name=f"server-{len(extra)}.log"))
            for extra in ((), telling)
        ]
        storing = []
        for server in servers:
            server.wait_ready()
            storing.append(Storing(server, payload_bytes))
            stack.callback(storing[-1].close)
        all_costs = Costs(), Costs()
        for engine in storing:
            engine.turn(seconds / 4, coordinator, Costs())
        for _ in range(rounds):
            for engine, costs in zip(storing, all_costs, strict=True):
                engine.turn(seconds, coordinator, costs)
        resyncs = servers[1].metric("lmcache_mp_coordinator_resyncs_total")
        yield from figures(payload_bytes, *all_costs, resyncs)


def figures(payload_bytes: int, quiet: Costs, told: Costs, resyncs: float) -> Iterator[Result]:
    name = f"{payload_bytes >> 10} KiB objects"
    objects = max(1, STORE_BYTES // payload_bytes)
    quiet_server, told_server = statistics.median(quiet.server_seconds), statistics.median(told.server_seconds)
    whole = statistics.median(quiet.client_seconds) + quiet_server
    taken = statistics.median(told.coordinator_seconds) - statistics.median(quiet.coordinator_seconds)
    slower = statistics.median(told.store_seconds) / statistics.median(quiet.store_seconds)
    yield Result(f"{name}: a store of 64 MiB that is not told", whole * 1e3, "ms", detail="of a processor")
    yield at_most(
        f"{name}: telling, of that, at the server",
        100 * (told_server - quiet_server) / whole,
        "%",
        LIMIT_PERCENT,
        f"{(told_server - quiet_server) / objects * 1e6:.2f} us an object, which comes and goes",
    )
    yield Result(f"{name}: the coordinator", taken / objects * 1e6, "us/object", detail=f"{resyncs:.0f} resyncs")
    yield Result(
        f"{name}: time of a store beside one that is not told",
        *(slower, "x", "", True),
        f"{spread(quiet.store_seconds, 1e3)} and {spread(told.store_seconds, 1e3)} ms",
    )


def main() -> int:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of stores, in each turn")
    parser.add_argument("--kib", type=int, nargs="*", default=[2048, 64])
    arguments = parser.parse_args()
    results = [result for kib in arguments.kib for result in compare(kib << 10, arguments.rounds, arguments.seconds)]
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
