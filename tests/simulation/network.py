"""A server in process, started again and again, and the connections that the engine's clients have to it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any

import msgspec

from lmcache._native import Committed, usable_prefix
from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import KeyBatch, SlotGrid
from lmcache.core.outcome import MissReason
from lmcache.errors import RemoteError, ServerUnavailable
from lmcache.l1.store import L1Options, L1Store
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.protocol.messages import METHODS
from lmcache.service.cache_service import CacheService
from lmcache.service.context import ServiceContext, ServiceSettings
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.transport.deferred import Deferred
from lmcache.transport.rpc_server import Method
from lmcache.transport.timers import Timer
from simulation.world import World

NO_SLOT = 2**64 - 1
LEASE_TTL_SECONDS = 8.0
RESERVATION_TTL_SECONDS = 12.0
_names = itertools.count()


class _Loop:
    """The message loop as far as the service uses it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.methods: dict[str, Method] = {}
        self.stopped = False
        self.caller = None  # nobody has a key

    def start(self, methods: dict[str, Method]) -> None:
        self.methods = methods

    def post(self, action: Callable[[], None]) -> None:
        self._world.at(0.0, lambda: None if self.stopped else action())

    def responsive(self, within_seconds: float) -> bool:
        """Nothing runs beside the one who asks."""
        return not self.stopped

    def call_later(self, delay_seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(self._world.now + delay_seconds, 0, action)
        self._world.at(delay_seconds, lambda: timer.action() if timer.action and not self.stopped else None)
        return timer


class _L2:
    """A storage loop over a dictionary that outlives the server."""

    def __init__(self, world: World, objects: dict[ObjectKey, bytes]) -> None:
        self.world = world
        self.objects = objects
        self.l1: L1Store | None = None
        self.own_runners: list[Any] = []  # it has no ledgers that could be followed
        self.stopped = False

    def call_soon(self, action: Callable[[], None]) -> None:
        self.world.at(0.0, lambda: None if self.stopped else action())

    def objects_committed(self, keys: KeyBatch, committed: Committed, trace: object = None) -> None:
        assert self.l1 is not None
        for record in committed.records:
            if self.world.random.random() < 0.7:
                frame = ctypes.string_at(self.l1.address_of(record.slot), record.size_bytes)
                self.objects[keys.key(record.namespace, record.chunk)] = frame

    def prefetch(self, request: PrefetchRequest, on_done: Callable[[PrefetchResult], None]) -> Callable[[], None]:
        seconds = self.world.random.choice((0.0, 0.001, 0.01, 0.1, 1.0, 5.0))
        late = seconds > request.deadline_seconds
        self.world.at(min(seconds, request.deadline_seconds), lambda: on_done(self._load(request, late)))
        return lambda: None

    def _load(self, request: PrefetchRequest, late: bool) -> PrefetchResult:
        if self.stopped or late:
            return PrefetchResult(MissReason.L2_DEADLINE)
        assert self.l1 is not None
        core, of, wanted = self.l1.core, request.keys.namespaces, request.keys[request.first_chunk :]
        places = [(namespace, chunk) for chunk in range(wanted.chunks) for namespace in range(len(of))]
        there = bytes(wanted.key(*place) in self.objects for place in places)
        chunks = usable_prefix(there, of.tails or bytes(4 * len(of)))
        if chunks:
            needed = bytes(chunk >= of.first_needed(n, chunks) for n in range(len(of)) for chunk in range(chunks))
            digests, hashes = of.digests, wanted.hashes[:chunks].packed
            reserved = core.reserve(
                STORAGE_OWNER, digests, of.cache_salt, of.sizes, hashes, float("inf"), wanted=needed
            )
            slots = SlotGrid(reserved.slots, chunks)
            for place in slots.places():
                frame = self.objects[wanted.key(*place)]
                ctypes.memmove(self.l1.address_of(slots[place]), frame, len(frame))
            core.commit(reserved.reservation)
        acquired = core.acquire(request.owner, of.digests, wanted.hashes.packed, request.lease_deadline, tails=of.tails)
        return PrefetchResult(MissReason.NOT_STORED, acquired.lease, SlotGrid(acquired.slots, acquired.chunks))


class SimServer:
    """One server process."""

    def __init__(self, world: World, objects: dict[ObjectKey, bytes], chunk_tokens: int, capacity: int) -> None:
        self.world = world
        self.server_epoch = world.random.randbytes(16)
        self.chunk_tokens = chunk_tokens
        self.paused_until = 0.0
        name = f"lmcache-simulated-{os.getpid()}-{next(_names)}"
        metrics = Metrics()
        self.l1 = L1Store.open(
            name, self.server_epoch, L1Options(capacity, policy="LRU"), metrics=metrics.l1, clock=world
        )
        self.loop = _Loop(world)
        self.storage = _L2(world, objects)
        self.storage.l1 = self.l1
        self.service = CacheService(
            ServiceContext(
                settings=ServiceSettings(self.server_epoch, LEASE_TTL_SECONDS, RESERVATION_TTL_SECONDS, has_l2=True),
                l1=self.l1,
                locks=self.l1.memory,
                hasher=ChunkHasher("blake3", chunk_tokens),
                loop=self.loop,  # type: ignore[arg-type]
                storage=self.storage,  # type: ignore[arg-type]
                events=None,
                metrics=metrics.service,
                clock=world,
            )
        )
        self.service.start()

    def handle(self, method: str, payload: bytes) -> Any:
        """An answer, an error or a Deferred."""
        route = self.loop.methods[method]
        try:
            return route.handler(msgspec.msgpack.decode(payload, type=route.request))
        except RemoteError as error:
            return error

    def spoil(self) -> None:
        """Flips a bit of some object in L1, or of many."""
        listed = list(self.l1.core.list_objects(0, 1000))
        count = min(len(listed), self.world.random.choice((3, 20, 100)))
        for found in self.world.random.sample(listed, count):
            acquired = self.l1.core.acquire(
                STORAGE_OWNER, found.namespace_digest, found.chunk_hash, float("inf"), is_use=False
            )
            if acquired.lease:
                offset = SlotGrid(acquired.slots, 1)[0, 0] + 4096 + self.world.random.randrange(64)
                address = self.l1.address_of(offset)
                ctypes.memmove(address, bytes([ctypes.string_at(address, 1)[0] ^ 1]), 1)
                self.l1.core.release(acquired.lease)

    def end(self) -> None:
        self.loop.stopped = self.storage.stopped = True
        self.service.close()
        self.l1.close()


class Network:
    """The address where servers live one after another."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.server: SimServer | None = None
        self.connections: list[SimConnection] = []
        self.slow = 1.0

    def delay(self) -> float:
        return self.slow * self.world.random.choice((0.0001, 0.0002, 0.0005, 0.003))

    def kill(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.end()
        self.drop()

    def drop(self) -> None:
        """Every connection breaks, as its client will notice soon."""
        for connection in self.connections:
            self.world.at(self.delay(), lambda connection=connection: connection.fail("the connection broke"))
        self.connections = []


class SimPending:
    def __init__(self, connection: SimConnection, deadline: float) -> None:
        self.method = ""
        self._connection = connection
        self._deadline = deadline
        self._outcome: Any = None

    def done(self) -> bool:
        if self._outcome is None and self._connection.world.now >= self._deadline:
            self.settle(ServerUnavailable("no answer in time"))
        return self._outcome is not None

    def wait(self, seconds: float) -> bool:
        self._connection.world.block(self.done, min(seconds, self._deadline - self._connection.world.now))
        return self.done()

    def result(self) -> Any:
        self.wait(float("inf"))
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        self._connection.pendings.pop(self, None)

    def settle(self, outcome: Any) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._connection.pendings.pop(self, None)
            if isinstance(outcome, Exception):
                self._connection.on_trouble(outcome)


class SimConnection:
    """Stands in for transport.connection.Connection."""

    def __init__(
        self, network: Network, endpoint: str, context: Any, clock: Any, on_trouble: Callable[[Exception], None]
    ) -> None:
        self.network = network
        self.endpoint = endpoint
        self.world = network.world
        self.on_trouble = on_trouble
        self.broken = ""
        self.pendings: dict[SimPending, None] = {}  # in order, so that a seed decides everything
        self.server: SimServer | None = None
        self._interrupted = False
        self._last_sent = self._last_received = 0.0

    def wait_established(self, seconds: float) -> None:
        def up() -> bool:
            server = self.network.server
            return server is not None and server.paused_until <= self.world.now

        if not self.world.block(up, min(seconds, 0.5)):
            raise ServerUnavailable("Nothing answers.")
        self.server = self.network.server
        self.network.connections.append(self)

    def submit(self, method: str, message: Any, reply_type: Any, timeout_seconds: float) -> SimPending:
        if self.broken:
            raise ServerUnavailable(self.broken)
        pending = SimPending(self, self.world.now + timeout_seconds)
        self.pendings[pending] = None
        pending.method = method
        assert isinstance(message, METHODS[method][0])
        payload = msgspec.msgpack.encode(message)
        self._last_sent = max(self._last_sent, self.world.now + self.network.delay())  # in order
        self._deliver(method, payload, pending, self._last_sent)
        return pending

    def _deliver(self, method: str, payload: bytes, pending: SimPending, at: float) -> None:
        def arrive() -> None:
            server = self.server
            if server is None or server is not self.network.server:
                return
            if server.paused_until > self.world.now:
                self._deliver(method, payload, pending, server.paused_until)
                return
            answer = server.handle(method, payload)
            if isinstance(answer, Deferred):
                answer.bind(lambda final: self._answer(method, final, pending))
            else:
                self._answer(method, answer, pending)

        self.world.at(max(0.0, at - self.world.now), arrive)

    def _answer(self, method: str, answer: Any, pending: SimPending) -> None:
        if not isinstance(answer, Exception):
            answer = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=METHODS[method][1])
        at = self._last_received = max(self._last_received, self.world.now + self.network.delay())
        self.world.at(at - self.world.now, lambda: None if self.broken else pending.settle(answer))

    def wait_broken(self, seconds: float) -> bool:
        self.world.block(lambda: bool(self.broken) or self._interrupted, seconds)
        self._interrupted = False
        return bool(self.broken)

    def interrupt(self) -> None:
        self._interrupted = True

    def fail(self, reason: str) -> None:
        if not self.broken:
            self.broken = reason
            for pending in list(self.pendings):
                pending.settle(ServerUnavailable(reason))

    def close(self) -> None:
        self.fail("closed")
        with contextlib.suppress(ValueError):
            self.network.connections.remove(self)
