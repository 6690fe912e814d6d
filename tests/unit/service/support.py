"""The service over a real L1, with a clock, a message loop, a storage loop and process locks that the test moves."""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache._native import Committed
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import Namespace
from lmcache.core.key_batch import KeyBatch
from lmcache.l1.store import L1Options, L1Store
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.service.chunk_changes import ChunkChangeService
from lmcache.service.context import ServiceContext, ServiceSettings
from lmcache.service.instances import SCHEDULER_SIDE, InstanceRegistry
from lmcache.service.key_probes import KeyProbeService
from lmcache.service.liveness import LivenessService
from lmcache.service.lookup import LookupService
from lmcache.service.lookup_counts import LookupCounts
from lmcache.service.owners import Owners
from lmcache.service.session_table import SessionTable
from lmcache.service.socket_copies import SocketCopies
from lmcache.service.socket_frames import SocketFrameService
from lmcache.service.stores import StoreService
from lmcache.telemetry.metrics import Metrics
from lmcache.telemetry.tracing import Span, Tracer
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.transport.deferred import Deferred
from lmcache.transport.timers import Timer
from manual_clock import ManualClock
from seeds import SEED

CHUNK_TOKENS = 4
PAYLOAD_BYTES = 4096
FRAME_BYTES = 8192
LAYOUT = "ab" * 16
SERVER_EPOCH = b"b" * 16
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
class Search:
    tiers: bytearray
    on_done: Callable[[], None]


@dataclass
class Storage:
    """Prefetches and searches wait for the test; commits are written down."""

    asked: list[tuple[PrefetchRequest, Callable[[PrefetchResult], None]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    searched: list[Search] = field(default_factory=list)
    commits: list[tuple[KeyBatch, Committed]] = field(default_factory=list)
    runners: list[Any] = field(default_factory=list)
    fault: Exception | None = None

    @property
    def own_runners(self) -> list[Any]:
        return self.runners

    def prefetch(self, request: PrefetchRequest, on_done: Callable[[PrefetchResult], None]) -> Callable[[], None]:
        if self.fault is not None:
            raise self.fault
        number = len(self.asked)
        self.asked.append((request, on_done))
        return lambda: self.cancelled.append(number)

    def find(self, keys: KeyBatch, tiers: bytearray, deadline_seconds: float, on_done: Callable[[], None]) -> None:
        self.searched.append(Search(tiers, on_done))

    def objects_committed(self, keys: KeyBatch, committed: Committed, trace: Any = None) -> None:
        self.commits.append((keys, committed))


@dataclass
class Locks:
    """Which owners' processes run, and whether one does that loaded for a previous server."""

    alive: set[int] = field(default_factory=set)
    writer_lives: bool = False

    def other_writer_lives(self) -> bool:
        return self.writer_lives

    def owner_alive(self, owner: int) -> bool:
        return owner in self.alive


class CopyThread:
    """The copying thread: runs when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.closed = False

    def submit(self, work: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("closed")
        self.waiting.append(work)


class Service:
    def __init__(
        self,
        l1: L1Store,
        clock: ManualClock,
        metrics: Metrics,
        *,
        with_l2: bool,
        events: Any = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.l1 = l1
        self.clock = clock
        self.metrics = metrics
        self.loop = Loop(clock)
        self.storage = Storage()
        self.locks = Locks()
        self.hasher = ChunkHasher("blake3", CHUNK_TOKENS)
        self.noted_ranks: list[Sequence[Sequence[Namespace]]] = []
        context = ServiceContext(
            settings=ServiceSettings(SERVER_EPOCH, LEASE_TTL, RESERVATION_TTL, has_l2=with_l2),
            l1=l1,
            locks=self.locks,  # type: ignore[arg-type]
            hasher=self.hasher,
            loop=self.loop,  # type: ignore[arg-type]
            storage=self.storage,  # type: ignore[arg-type]
            events=events,
            tracer=tracer,
            metrics=metrics.service,
            clock=clock,
            note_ranks=self.noted_ranks.append,
        )
        self.copy_thread = CopyThread()
        self.copies = SocketCopies(context.loop, self.copy_thread)  # type: ignore[arg-type]
        self.registry = InstanceRegistry(context)
        self.sessions = SessionTable(l1.core, self.hasher, metrics.service, clock)
        self.owners = Owners(context, self.copies)
        counts = LookupCounts(context)
        self.lookups = LookupService(context, self.registry, self.sessions, counts)
        self.probes = KeyProbeService(context, self.registry, counts)
        self.changes = ChunkChangeService(context, self.registry)
        self.stores = StoreService(context, self.registry)
        self.socket_frames = SocketFrameService(context, self.registry, self.copies)
        self.liveness = LivenessService(context, self.registry, self.sessions, self.owners)

    # ---- what an engine does -----------------------------------------------------------------------------------------
    def register(
        self, instance: str = "engine", *, ranks: int = 1, groups: int = 1, layout: str = LAYOUT, tails: Any = ()
    ) -> int:
        """The scheduler side and one worker a rank, whose processes run; the scheduler's owner."""
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
        return self.stores.reserve(m.Reserve(instance, worker, salt, self.hashes(tokens)))

    def commit(self, reservation: int, written: bytes = b"", *, instance: str = "engine", worker: int = 0) -> int:
        return self.stores.commit(m.Commit(instance, worker, reservation, written)).committed

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
        source: m.Source | None = None,
    ) -> m.LookupReply | Deferred:
        message = m.Lookup(instance, request, salt, first, tokens, identity, [], deadline_seconds, source=source)
        return self.lookups.lookup(message)

    def lookup(self, request: str, tokens: bytes, first: int = 0, **options: Any) -> m.LookupReply:
        """A lookup that L1 decides; options of `ask`."""
        reply = self.ask(request, tokens, first, **options)
        assert isinstance(reply, m.LookupReply)
        return reply

    def append(
        self, request: str, tokens: bytes, first: int = 0, extras: Any = (), *, instance: str = "engine"
    ) -> bytes:
        """The hashes that are new."""
        return self.lookups.append(m.Append(instance, request, "", first, tokens, b"", list(extras))).hashes

    def end(self, request: str, instance: str = "engine") -> None:
        self.lookups.end_session(m.EndSession(instance, request))

    def beat(self, worker: int = -1, instance: str = "engine") -> bool:
        return self.liveness.beat(m.Ping(instance, worker))

    # ---- what a test asks --------------------------------------------------------------------------------------------
    def hashes(self, tokens: bytes, identity: bytes = b"") -> bytes:
        return self.hasher.extend(self.hasher.root(identity), tokens)

    def timers(self) -> list[Timer]:
        """Those that wait, without the sweep's."""
        waiting = [timer for timer in self.loop.timers if timer.action is not None]
        return [timer for timer in waiting if getattr(timer.action, "__self__", None) is not self.liveness]

    def stat(self, name: str) -> int:
        return self.l1.core.stats()[name]

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value("lmcache_mp_" + name, labels) or 0.0


def has_answer(deferred: object) -> bool:
    assert isinstance(deferred, Deferred)
    answers: list[object] = []
    deferred.bind(answers.append)
    return bool(answers)


@contextlib.contextmanager
def a_service(
    *,
    with_l2: bool = False,
    capacity_bytes: int = 64 * FRAME_BYTES,
    events: Any = None,
    put_span: Callable[[Span], object] | None = None,
    sample_rate: float = 1.0,
) -> Iterator[Service]:
    """Whatever the test did: at its end every engine leaves, and nothing may be held any more."""
    clock, metrics = ManualClock(), Metrics()
    l1 = L1Store.open(
        f"lmcache-unit-service-{os.getpid()}",
        bytes(16),
        L1Options(capacity_bytes, policy="LRU"),
        metrics=metrics.l1,
        clock=clock,
    )
    try:
        tracer = Tracer(put_span, sample_rate=sample_rate, clock=clock, rng=random.Random(SEED)) if put_span else None
        service = Service(l1, clock, metrics, with_l2=with_l2, events=events, tracer=tracer)
        yield service
        service.sessions.check()
        for instance in list(service.registry.instances.values()):
            for worker in [*instance.workers, SCHEDULER_SIDE]:
                service.liveness.unregister(m.Unregister(instance.instance_id, worker))
        service.locks.alive.clear()
        service.owners.release_quarantine()
        assert service.sessions.size_bytes == 0
        l1.check_idle()
    finally:
        l1.close()


def chunks(*numbers: int) -> bytes:
    """Packed tokens of full chunks, each filled with its number."""
    return pack_tokens([number for number in numbers for _ in range(CHUNK_TOKENS)])


def slots(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))
