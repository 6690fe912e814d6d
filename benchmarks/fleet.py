"""A fleet on one machine: 1,000 servers that tell a coordinator of 100 million copies, 10,000 changes a second, a tenth
of the servers cut off, and a coordinator that begins with nothing.

Servers are the real reporter on simulated time, the coordinator is the real intake over the real directory, and between
them is the text that travels; only the network is left out. Seconds are the processor's: a coordinator takes events on
one thread, so they are what it needs at least. `requests` are those of a coordinator's process, over HTTP.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from directory import CALL_KEYS, MEMORY_LIMIT_BYTES, Memory
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.environment import Environment
from lmcache.fleet import messages as m
from lmcache.fleet.event_batches import Stream, decode_events
from lmcache.fleet.events import EventIntake
from lmcache.fleet.instances import Instance, Instances
from lmcache.fleet.reporter import Reporter
from lmcache.http.client import JSON_TYPE, request
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.processes import CoordinatorProcess
from measure import Result, at_most, command_line, processor_seconds, report, resident_bytes, spread

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from manual_clock import ManualClock

OBJECT_BYTES = 2 << 20
LOOKUP_EVERY_REQUESTS = 16  # with so many objects
TIMEOUT_SECONDS = 30.0
LOOKUP_LIMIT_MS = 10.0
PROCESSOR_LIMIT = 0.5  # of one


class Coordinator:
    """Its state without its process. `seconds`: what it took to answer; `sent_bytes`: what it was told."""

    def __init__(self, clock: ManualClock) -> None:
        self.instances = Instances(Environment(clock, os.urandom), TIMEOUT_SECONDS, self)
        self.intake = EventIntake(self.instances.knows, clock)
        self.seconds, self.sent_bytes, self.requests = 0.0, 0, 0
        self.lookups: list[float] = []
        self._large_requests = 0

    def joined(self, instance: Instance) -> None:
        pass

    def left(self, instance_id: str) -> None:
        self.intake.forget(instance_id)

    def read(self, kind: Any, method: str, path: str, body: Any = None, content_type: str = JSON_TYPE) -> Any:
        if path.endswith("/resync"):
            return {"wait_seconds": 0.0}
        began = time.thread_time()
        batches = decode_events(body).batches
        answer = self.intake.apply(batches)
        self.seconds += time.thread_time() - began
        self.sent_bytes += len(body)
        self.requests += 1
        objects = batches[-1].objects
        if objects is not None and len(objects) >= CALL_KEYS:
            self._large_requests += 1
            if self._large_requests % LOOKUP_EVERY_REQUESTS == 0:
                self._look_up(keys_of(objects, CALL_KEYS))
        return answer

    def _look_up(self, keys: Sequence[m.Key]) -> None:
        began = time.thread_time()
        assert all(result.placements for result in self.intake.directory.lookup(keys))
        self.lookups.append(time.thread_time() - began)

    def take(self) -> tuple[float, int, int]:
        """Seconds, bytes and requests since the last call."""
        taken = self.seconds, self.sent_bytes, self.requests
        self.seconds, self.sent_bytes, self.requests = 0.0, 0, 0
        return taken


def keys_of(objects: m.Objects, most: int) -> list[m.Key]:
    scope = objects.model_name, objects.kv_rank, objects.object_group_id, objects.cache_salt
    hashes = objects.hashes[: most * CHUNK_HASH_BYTES]
    starts = range(0, len(hashes), CHUNK_HASH_BYTES)
    return [m.Key(hashes[at : at + CHUNK_HASH_BYTES].hex(), *scope) for at in starts]


class Server:
    def __init__(
        self, number: int, objects: int, coordinator: Coordinator, clock: ManualClock, metrics: Metrics
    ) -> None:
        self.name, self.memory = f"server-{number}", Memory(number, objects, OBJECT_BYTES)
        self._coordinator = coordinator
        self.reporter = Reporter(
            *(self.name, [self.memory], coordinator, metrics.fleet, clock, lambda seconds: None),
            capacity_seconds=float("inf"),
        )

    def join(self) -> None:
        self._coordinator.instances.register(m.RegisterRequest("10.0.0.1", 8080, self.name))
        self.reporter.tell_everything()


def simulate(servers: int, copies: int, events: int, seconds: int) -> Iterator[Result]:
    clock = ManualClock()
    before = resident_bytes()
    coordinator = Coordinator(clock)
    metrics = Metrics()
    fleet = [Server(number, copies // servers, coordinator, clock, metrics) for number in range(servers)]
    told_seconds = time.thread_time()
    for server in fleet:
        server.join()
    told_seconds = time.thread_time() - told_seconds
    taken, sent, requests = coordinator.take()
    stats = coordinator.intake.directory.stats()
    assert stats.records == copies // servers * servers
    bytes_a_copy = stats.memory_bytes / stats.records
    yield at_most("memory", bytes_a_copy, "bytes/copy", MEMORY_LIMIT_BYTES, f"{stats.memory_bytes / 1e9:.2f} GB")
    yield Result("memory by the kernel", (resident_bytes() - before) / 1e9, "GB")
    yield Result("everything told: the coordinator", taken, "s", detail=f"{sent / 1e9:.1f} GB in {requests} requests")
    yield Result("everything told: each server", (told_seconds - taken) / servers, "s")
    milliseconds = statistics.median(coordinator.lookups) * 1e3
    yield at_most(
        f"lookup of {CALL_KEYS} keys meanwhile, from keys to placements",
        *(milliseconds, "ms", LOOKUP_LIMIT_MS, spread(coordinator.lookups, 1e3)),
    )
    yield from _changes(fleet, coordinator, events, seconds)
    yield from _partition(fleet, coordinator, clock)


def _changes(fleet: Sequence[Server], coordinator: Coordinator, events: int, seconds: int) -> Iterator[Result]:
    """Each server tells once a second: half of it comes, half goes."""
    each = max(1, events // len(fleet) // 2)
    for second in range(seconds):
        for server in fleet:
            seed = (1 << 30) + second
            server.memory.changed = [server.memory.run(seed, each), server.memory.run(seed - 1, each, added=False)]
            server.reporter.tell_changes()
    taken, sent, requests = coordinator.take()
    name = f"{2 * each * len(fleet):,} changes a second, {requests // seconds} requests"
    yield at_most(f"{name}: of a processor", taken / seconds, "share", PROCESSOR_LIMIT, "without HTTP")
    yield Result(f"{name}: on the wire", sent / seconds / 1e6, "MB/s")


def _partition(fleet: Sequence[Server], coordinator: Coordinator, clock: ManualClock) -> Iterator[Result]:
    """A tenth is silent until it counts as gone, and comes back."""
    cut_off = fleet[: max(1, len(fleet) // 10)]
    directory, before = coordinator.intake.directory, coordinator.intake.directory.stats().records
    clock.advance(TIMEOUT_SECONDS + 1)
    for server in fleet[len(cut_off) :]:
        assert coordinator.instances.heartbeat(server.name)
    began = time.thread_time()
    assert len(coordinator.instances.expire()) == len(cut_off)
    forgotten = time.thread_time() - began
    while directory.sweep():
        pass
    swept = time.thread_time() - began
    lost = before - directory.stats().records
    assert lost >= sum(server.memory.count for server in cut_off)
    yield Result(f"{len(cut_off)} servers gone: seen by nobody", forgotten * 1e3, "ms", detail=f"{lost:,} copies")
    yield Result(f"{len(cut_off)} servers gone: their memory free", swept, "s")
    for server in cut_off:
        server.join()
    taken, sent, _ = coordinator.take()
    yield Result(f"{len(cut_off)} servers back: all is known", taken, "s", detail=f"{sent / 1e9:.2f} GB")


def over_http(requests: int, entries: int) -> Iterator[Result]:
    """Processor time of a coordinator's process for a request with the changes of a second of one server, and for a
    heartbeat."""
    memory, stream = Memory(0, 1, OBJECT_BYTES), Stream("server", 1)
    stream.packs = True
    bodies = [stream.request([stream.changes(memory, memory.run(at, entries), 0.0)]) for at in range(2 * requests)]
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder, CoordinatorProcess(Path(folder)) as process:
        process.wait_ready()
        process.answer("POST", "/instances", {"instance_id": "server", "ip": "127.0.0.1", "http_port": 1})
        with process.connection(process.port, 60.0) as connection:

            def tell(number: int) -> None:
                body, media_type = bodies[number]
                connection.request("POST", "/events", body, {"Content-Type": media_type})
                assert msgspec.json.decode(connection.getresponse().read())["applied"] == 1

            def tell_apart(number: int) -> None:
                body, media_type = bodies[requests + number]
                assert request(process.url, "POST", "/events", body, content_type=media_type)["applied"] == 1

            def beat(number: int) -> None:
                connection.request("PUT", "/instances/server/heartbeat")
                assert msgspec.json.decode(connection.getresponse().read())["status"]

            name = f"a request with {entries} changes over HTTP"
            for title, call in ((name, tell), (f"{name}, its own connection", tell_apart), ("a heartbeat", beat)):
                began = processor_seconds(process.pid)
                for number in range(requests):
                    call(number)
                seconds = (processor_seconds(process.pid) - began) / requests
                yield Result(title, seconds * 1e3, "ms", detail="of a processor")


def main() -> int:
    parser = command_line(__doc__, runs=1)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=100_000_000)
    parser.add_argument("--events", type=int, default=10_000, help="changes a second of the whole fleet")
    parser.add_argument("--seconds", type=int, default=10, help="of changes")
    parser.add_argument("--requests", type=int, default=5000)
    options = parser.parse_args()
    logging.getLogger("lmcache.fleet").setLevel(logging.ERROR)  # each server that is gone
    results = list(simulate(options.servers, options.copies, options.events, options.seconds))
    results += over_http(options.requests, max(1, options.events // options.servers))
    return report(results, options.json)


if __name__ == "__main__":
    sys.exit(main())
