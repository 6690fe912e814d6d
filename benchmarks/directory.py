"""The directory of a coordinator with ten million copies: memory for each, a lookup of 500 keys, what it costs to take
a batch of events from its JSON on, and to forget a server. Times are of the processor: what else runs on the machine is
no property of the directory."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from array import array

from lmcache import _native
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.object_changes import ChangePage, ObjectsPage, Run
from lmcache.environment import SYSTEM
from lmcache.fleet import messages as m
from lmcache.fleet.event_batches import Stream, decode_events
from lmcache.fleet.events import EventIntake
from lmcache.fleet.instances import Instances
from lmcache.fleet.keys import encode_scope
from measure import Result, at_least, at_most, command_line, report, resident_bytes, spread

OBJECT_BYTES = 64 << 10
BATCH_KEYS = 4096
CALL_KEYS = 500
MEMORY_LIMIT_BYTES = 64
LOOKUP_LIMIT_MS = 0.5
STEP_LIMIT_MS = 5.0
EVENTS_A_SECOND = 10_000
SWEEP_STEP = 65_536
MODELS, TENANTS = 8, 16


class Filled:
    """A native directory with so many copies, of servers with a holder each. Every key has one copy."""

    def __init__(self, copies: int, servers: int, scopes: int) -> None:
        self.rng = random.Random(1)
        self.scopes = [encode_scope("model", rank % 8, 0, f"salt-{rank // 8}") for rank in range(scopes)]
        before = resident_bytes()
        self.directory = _native.FleetDirectory(2 * copies)
        self.holders = [self.directory.add_holder(number) for number in range(servers)]
        self.prompts: list[tuple[bytes, bytes]] = []
        self.times: list[float] = []
        while (stored := self.directory.stats().records) < copies:
            count = min(BATCH_KEYS, copies - stored)
            scope, hashes = self.rng.choice(self.scopes), os.urandom(CHUNK_HASH_BYTES * count)
            if len(self.prompts) < 4096:
                self.prompts.append((scope, hashes[: CHUNK_HASH_BYTES * CALL_KEYS]))
            started = time.thread_time()
            self.directory.store(
                *(self.rng.choice(self.holders), [scope], b"", bytes(4 * count), hashes),
                array("Q", [OBJECT_BYTES]) * count,
            )
            self.times.append(time.thread_time() - started)
        self.resident_bytes = resident_bytes() - before

    def lookup(self) -> float:
        """Seconds for 500 keys, from packed keys to columns."""
        scope, hashes = self.rng.choice(self.prompts)
        keys = len(hashes) // CHUNK_HASH_BYTES
        started = time.thread_time()
        page = self.directory.lookup([scope], bytes(4 * keys), hashes, 64)
        seconds = time.thread_time() - started
        assert len(page) == keys
        return seconds * CALL_KEYS / keys

    def forget(self) -> tuple[float, list[float]]:
        """Seconds until a server's copies are seen no more, and of each step that frees them."""
        started = time.thread_time()
        self.directory.void_holder(self.holders.pop())
        voided = time.thread_time() - started
        steps, more = [], True
        while more:
            started = time.thread_time()
            more = self.directory.sweep(SWEEP_STEP)
            steps.append(time.thread_time() - started)
        return voided, steps


class Memory:
    """L1 of a server, as the reporter reads it: hashes by chance, the same whenever they are read."""

    tier, backend, shared = "l1", "", False

    def __init__(self, number: int, objects: int, object_bytes: int) -> None:
        self._number, self.count, self._object_bytes = number, objects, object_bytes
        self.namespace = Namespace(
            f"model-{number % MODELS}", 8, number % 8, 0, "5e" * 16, f"tenant-{number % TENANTS}"
        )
        self.changed: list[Run] = []
        self._told = 0

    def capacity_bytes(self) -> int:
        return self.count * self._object_bytes

    def cursor(self) -> int:
        return self._told

    def run(self, seed: int, objects: int, *, added: bool = True) -> Run:
        hashes = random.Random(self._number << 32 | seed).randbytes(objects * CHUNK_HASH_BYTES)
        return Run(self.namespace, hashes, (array("Q", [self._object_bytes]) * objects).tobytes(), added)

    def changes(self, cursor: int, most: int) -> ChangePage:
        runs, self.changed = self.changed, []
        self._told += len(runs)
        return ChangePage(runs, self._told)

    def objects(self, start: int, most: int) -> ObjectsPage:
        objects = min(most, self.count - start)
        end = start + objects
        return ObjectsPage([self.run(start, objects)], end if end < self.count else 0)


def events(batches: int, *, packed: bool) -> tuple[float, float, int]:
    """Seconds a key at a server, which writes a batch, and at a coordinator, which reads and takes it; bytes a key."""
    instances = Instances(SYSTEM, 1e9)
    instances.register(m.RegisterRequest("127.0.0.1", 1, "a"), token="a token")
    intake = EventIntake(instances.knows)
    stream = Stream("a", 1)
    stream.packs = packed
    namespace = Namespace("meta-llama/Llama-3.1-8B-Instruct", 8, 3, 0, "0" * 32, "")
    wrote = took = sent_bytes = 0.0
    for _ in range(batches):
        run = Run(namespace, os.urandom(CHUNK_HASH_BYTES * BATCH_KEYS), bytes(array("Q", [OBJECT_BYTES]) * BATCH_KEYS))
        started = time.thread_time()
        body, _ = stream.request([stream.changes(Memory(0, 0, OBJECT_BYTES), run, 0.0)])
        wrote += time.thread_time() - started
        sent_bytes += len(body)
        started = time.thread_time()
        answer = intake.apply(decode_events(body).batches)
        took += time.thread_time() - started
        assert answer.applied == 1
    keys = batches * BATCH_KEYS
    return wrote / keys, took / keys, int(sent_bytes / keys)


def main() -> int:
    parser = command_line(__doc__, runs=101)
    parser.add_argument("--copies", type=int, default=10_000_000)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=50)
    arguments = parser.parse_args()
    small, filled = Filled(10_000, 10, 8), Filled(arguments.copies, arguments.servers, 64)
    lookups = {"small": [small.lookup() for _ in range(arguments.runs)], "large": []}
    lookups["large"] = [filled.lookup() for _ in range(arguments.runs)]
    memory_bytes = filled.directory.stats().memory_bytes / arguments.copies
    voided, steps = filled.forget()
    written = {form: events(arguments.batches, packed=form == "columns") for form in ("JSON", "columns")}
    large_ms = statistics.median(lookups["large"]) * 1e3
    results: list[Result] = [
        at_most("memory", memory_bytes, "bytes/copy", MEMORY_LIMIT_BYTES, f"{arguments.copies:,} copies"),
        at_most("memory by the kernel", filled.resident_bytes / arguments.copies, "bytes/copy", MEMORY_LIMIT_BYTES),
        at_most(
            f"lookup of {CALL_KEYS} keys",
            large_ms,
            "ms",
            LOOKUP_LIMIT_MS,
            f"{spread(lookups['large'], 1e3)}; of 10,000 copies {statistics.median(lookups['small']) * 1e3:.3f} ms",
        ),
        at_most(
            f"a batch of {BATCH_KEYS} stored, 99 of 100",
            statistics.quantiles(filled.times, n=100)[-1] * 1e3 if len(filled.times) > 1 else filled.times[0] * 1e3,
            "ms",
            STEP_LIMIT_MS,
        ),
        at_most("a server forgotten: until nobody sees it", voided * 1e3, "ms", 0.1),
        at_most(
            f"a server forgotten: {len(steps)} steps, each",
            statistics.median(steps) * 1e3,
            "ms",
            STEP_LIMIT_MS,
            spread(steps, 1e3),
        ),
    ]
    for form, (wrote, took, key_bytes) in written.items():
        results += [
            at_least(f"events taken from {form}, one thread", 1 / took, "keys/s", 10 * EVENTS_A_SECOND),
            Result(f"events written by a server, {form}", wrote * 1e6, "us/key", detail=f"{key_bytes} bytes a key"),
        ]
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
