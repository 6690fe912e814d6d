"""The service over a real L1, with a clock, a message loop, a storage loop and process locks that the test moves."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.clock import ManualClock
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import Namespace
from lmcache.l1.store import L1Store
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.service.liveness import LivenessService
from lmcache.service.lookup import LookupService
from lmcache.service.registry import Registry
from lmcache.service.transfer import TransferService
from lmcache.telemetry.bus import EventBus
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.transport.deferred import Deferred
from lmcache.transport.timers import Timer

CHUNK_TOKENS = 4
PAYLOAD_BYTES = 4096
FRAME_BYTES = 8192
LAYOUT = "ab" * 16
LEASE_TTL = 300.0
RESERVATION_TTL = 600.0
NO_SLOT = 2**64 - 1


@dataclass
class Loop:
    """Posted work and timers run when the test says so."""

    clock: ManualClock
    posted: list[Callable[[], None]] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)

    def post(self, action: Callable[[], None]) -> None:
        self.posted.append(action)

    def call_later(self, delay_seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(self.clock.monotonic() + delay_seconds, len(self.timers), action)
        self.timers.append(timer)
        return timer

    def run(self) -> None:
        while self.posted:
            self.posted.pop(0)()
        for timer in list(self.timers):
            if timer.due <= self.clock.monotonic():
                self.timers.remove(timer)
                if timer.action is not None:
                    timer.action()


@dataclass
class Storage:
    """Prefetches wait for the test; commits are written down."""

    asked: list[tuple[PrefetchRequest, Callable[[PrefetchResult], None]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    commits: list[tuple[bytes, bytes]] = field(default_factory=list)
    fault: Exception | None = None

    def prefetch(self, request: PrefetchRequest, on_done: Callable[[PrefetchResult], None]) -> Callable[[], None]:
        if self.fault is not None:
            raise self.fault
        number = len(self.asked)
        self.asked.append((request, on_done))
        return lambda: self.cancelled.append(number)

    def objects_committed(self, namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> None:
        self.commits.append((records, hashes))


@dataclass
class Locks:
    """Which owners' processes live."""

    alive: set[int] = field(default_factory=set)

    def owner_alive(self, owner: int) -> bool:
        return owner in self.alive


class Service:
    def __init__(self, l1: L1Store, clock: ManualClock, metrics: Metrics, *, with_l2: bool) -> None:
        self.l1 = l1
        self.clock = clock
        self.metrics = metrics
        self.loop = Loop(clock)
        self.storage = Storage()
        self.locks = Locks()
        self.registry = Registry(l1, self.locks, metrics, clock, CHUNK_TOKENS)
        self.hasher = ChunkHasher("blake3", CHUNK_TOKENS)
        storage = self.storage if with_l2 else None
        self.events = EventBus([], 10, metrics)
        self.lookups = LookupService(
            self.registry, l1, self.hasher, storage, self.loop, self.events, metrics, clock, LEASE_TTL
        )
        self.transfer = TransferService(self.registry, l1, storage, metrics, clock, RESERVATION_TTL)
        self.liveness = LivenessService(self.registry, l1, self.locks, clock, LEASE_TTL, RESERVATION_TTL)

    # ---- what an engine does -----------------------------------------------------------------------------------------
    def register(
        self, instance: str = "engine", *, ranks: int = 1, groups: int = 1, layout: str = LAYOUT, tails=()
    ) -> int:
        """The scheduler side and one worker a rank, whose processes live; the scheduler's owner."""
        message = m.RegisterInstance(instance, "model", ranks, groups, 10.0, tail_tokens=list(tails))
        owner = self.liveness.register_instance(message).owner
        self.locks.alive.add(owner)
        for rank in range(ranks):
            self.register_worker(instance, rank, groups=groups, layout=layout)
        return owner

    def register_worker(self, instance: str, rank: int, *, groups: int = 1, layout: str = LAYOUT) -> int:
        message = m.RegisterWorker(instance, rank, rank, [layout] * groups, [PAYLOAD_BYTES] * groups)
        owner = self.liveness.register_worker(message).owner
        self.locks.alive.add(owner)
        return owner

    def reserve(self, tokens: bytes, *, instance: str = "engine", worker: int = 0, salt: str = "") -> m.ReserveReply:
        return self.transfer.reserve(m.Reserve(instance, worker, salt, self.hashes(tokens)))

    def commit(self, reservation: int, written: bytes = b"", *, instance: str = "engine", worker: int = 0) -> int:
        return self.transfer.commit(m.Commit(instance, worker, reservation, written)).committed

    def store(self, tokens: bytes, *, instance: str = "engine", workers: int = 1, salt: str = "") -> None:
        for worker in range(workers):
            reply = self.reserve(tokens, instance=instance, worker=worker, salt=salt)
            self.commit(reply.reservation, instance=instance, worker=worker)

    def ask(
        self,
        request: str,
        tokens: bytes,
        first: int = 0,
        *,
        instance: str = "engine",
        salt: str = "",
        identity: bytes = b"",
        deadline_seconds: float = 30.0,
    ) -> m.LookupReply | Deferred:
        return self.lookups.lookup(m.Lookup(instance, request, salt, first, tokens, identity, [], deadline_seconds))

    def lookup(self, request: str, tokens: bytes, first: int = 0, **options: Any) -> m.LookupReply:
        """A lookup that L1 decides; options of `ask`."""
        reply = self.ask(request, tokens, first, **options)
        assert isinstance(reply, m.LookupReply)
        return reply

    def append(self, request: str, tokens: bytes, first: int = 0, extras=(), *, instance: str = "engine") -> bytes:
        """The hashes that are new."""
        return self.lookups.append(m.Append(instance, request, "", first, tokens, b"", list(extras))).hashes

    def end(self, request: str, instance: str = "engine") -> None:
        self.lookups.end_session(m.EndSession(instance, request))

    def beat(self, worker: int = -1, instance: str = "engine") -> bool:
        return self.liveness.beat(m.Ping(instance, worker))

    # ---- what a test asks --------------------------------------------------------------------------------------------
    def hashes(self, tokens: bytes, identity: bytes = b"") -> bytes:
        return self.hasher.extend(self.hasher.root(identity), tokens)

    def stat(self, name: str) -> int:
        return self.l1.core.stats()[name]

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value("lmcache_mp_" + name, labels) or 0.0


@contextlib.contextmanager
def a_service(*, with_l2: bool = False, capacity_bytes: int = 64 * FRAME_BYTES) -> Iterator[Service]:
    """Whatever the test did: at its end every party leaves, and nothing may be held any more."""
    clock, metrics = ManualClock(), Metrics()
    l1 = L1Store.open(
        f"lmcache-unit-service-{os.getpid()}", capacity_bytes, bytes(16), policy="LRU", metrics=metrics, clock=clock
    )
    try:
        service = Service(l1, clock, metrics, with_l2=with_l2)
        yield service
        service.lookups.check()
        for instance in list(service.registry.instances.values()):
            service.registry.remove_scheduler(instance, said_so=True)
            for worker in list(instance.workers):
                service.registry.remove_worker(instance, worker, said_so=True)
        service.locks.alive.clear()
        service.registry.drop_retired()
        assert service.lookups.session_bytes == 0
        l1.check_idle()
    finally:
        l1.close()


def chunks(*numbers: int) -> bytes:
    """Packed tokens of full chunks, each filled with its number."""
    return pack_tokens([number for number in numbers for _ in range(CHUNK_TOKENS)])


def slots(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))
