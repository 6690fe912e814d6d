"""A server in process, one life after another, and the connections that the engine's clients have to it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lmcache.core.chunking import ChunkHasher
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.outcome import MissReason
from lmcache.errors import RemoteError, ServerUnavailable
from lmcache.l1.adoption import STORAGE_OWNER
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import METHODS
from lmcache.service.service import CacheService, ServiceSettings
from lmcache.telemetry.metrics import Metrics
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.tiering.tails import is_needed, longest_whole
from lmcache.transport.deferred import Deferred
from lmcache.transport.server import Method
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

    def __init__(self, world: World, objects: dict[tuple[bytes, bytes], bytes]) -> None:
        self.world = world
        self.objects = objects
        self.l1: L1Store | None = None
        self.stopped = False

    def call_soon(self, action: Callable[[], None]) -> None:
        self.world.at(0.0, lambda: None if self.stopped else action())

    def objects_committed(self, namespaces: Sequence[Namespace], hashes: bytes, records: bytes) -> None:
        assert self.l1 is not None
        for at in range(0, len(records), 32):
            position, chunk, offset, size = struct.unpack_from("<4Q", records, at)
            if self.world.random.random() < 0.7:
                key = (namespaces[position].digest, hashes[chunk * 32 : chunk * 32 + 32])
                self.objects[key] = ctypes.string_at(self.l1.address_of(offset), size)

    def prefetch(self, request: PrefetchRequest, on_done: Callable[[PrefetchResult], None]) -> Callable[[], None]:
        seconds = self.world.random.choice((0.0, 0.001, 0.01, 0.1, 1.0, 5.0))
        late = seconds > request.deadline_seconds
        self.world.at(min(seconds, request.deadline_seconds), lambda: on_done(self._load(request, late)))
        return lambda: None

    def _load(self, request: PrefetchRequest, late: bool) -> PrefetchResult:
        if self.stopped or late:
            return PrefetchResult(0, 0, b"", MissReason.L2_DEADLINE)
        assert self.l1 is not None
        core = self.l1.core
        hashes = [request.hashes[at : at + 32] for at in range(0, len(request.hashes), 32)]
        digests, salt = b"".join(one.digest for one in request.namespaces), request.namespaces[0].cache_salt
        tails = request.tail_chunks or [0] * len(request.namespaces)
        there = [[(one.digest, digest) in self.objects for one in request.namespaces] for digest in hashes]
        chunks = longest_whole(there, tails)
        sizes = struct.pack(f"<{len(request.frame_bytes)}Q", *request.frame_bytes)
        wanted = request.hashes[: chunks * CHUNK_HASH_BYTES]
        if chunks:
            needed = bytes(is_needed(chunk, chunks, tail) for tail in tails for chunk in range(chunks))
            reservation, slots, _ = core.reserve(STORAGE_OWNER, digests, salt, sizes, wanted, float("inf"), needed)
            for index in range(len(slots) // 8):
                (offset,) = struct.unpack_from("<Q", slots, index * 8)
                if offset != NO_SLOT:
                    namespace, chunk = divmod(index, len(slots) // 8 // len(request.namespaces))
                    frame = self.objects[request.namespaces[namespace].digest, hashes[chunk]]
                    ctypes.memmove(self.l1.address_of(offset), frame, len(frame))
            if reservation:
                core.commit(reservation, b"")
        lease, found, offsets = core.acquire(
            request.owner, digests, request.hashes, request.lease_deadline, True, struct.pack(f"<{len(tails)}I", *tails)
        )
        return PrefetchResult(found, lease, offsets, MissReason.NOT_STORED)


class Life:
    """One server process."""

    def __init__(self, world: World, objects: dict[tuple[bytes, bytes], bytes], chunk_tokens: int, capacity: int):
        self.world = world
        self.boot_token = world.random.randbytes(16)
        self.paused_until = 0.0
        name = f"lmcache-simulated-{os.getpid()}-{next(_names)}"
        metrics = Metrics()
        self.l1 = L1Store.open(name, capacity, self.boot_token, policy="LRU", metrics=metrics, clock=world)
        self.loop = _Loop(world)
        self.storage = _L2(world, objects)
        self.storage.l1 = self.l1
        self.service = CacheService(
            ServiceSettings(self.boot_token, LEASE_TTL_SECONDS, RESERVATION_TTL_SECONDS, has_l2=True),
            self.loop,  # type: ignore[arg-type]
            self.l1,
            self.storage,  # type: ignore[arg-type]
            ChunkHasher("blake3", chunk_tokens),
            None,
            metrics,
            world,
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
        digests, packed, hashes, _, _ = self.l1.core.list_objects(0, 1000)
        positions = struct.unpack(f"<{len(packed) // 4}I", packed)
        count = len(hashes) // 32
        for index in self.world.random.sample(range(count), min(count, self.world.random.choice((3, 20, 100)))):
            digest = digests[32 * positions[index] : 32 * positions[index] + 32]
            lease, _, offsets = self.l1.core.acquire(
                STORAGE_OWNER, digest, hashes[32 * index : 32 * index + 32], float("inf"), False
            )
            if lease:
                (offset,) = struct.unpack("<Q", offsets)
                at = self.l1.address_of(offset + 4096 + self.world.random.randrange(64))
                ctypes.memmove(at, bytes([ctypes.string_at(at, 1)[0] ^ 1]), 1)
                self.l1.core.release(lease)

    def end(self) -> None:
        self.loop.stopped = self.storage.stopped = True
        self.service.close()
        self.l1.close()


class Network:
    """The address where servers live one after another."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.life: Life | None = None
        self.connections: list[SimConnection] = []
        self.slow = 1.0

    def delay(self) -> float:
        return self.slow * self.world.random.choice((0.0001, 0.0002, 0.0005, 0.003))

    def kill(self) -> None:
        life, self.life = self.life, None
        if life is not None:
            life.end()
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
    """Stands in for transport.client.Connection."""

    network: Network

    def __init__(self, endpoint: str, context: Any, clock: Any, on_trouble: Callable[[Exception], None]) -> None:
        self.endpoint = endpoint
        self.world = self.network.world
        self.on_trouble = on_trouble
        self.broken = ""
        self.pendings: dict[SimPending, None] = {}  # in order, so that a seed decides everything
        self.life: Life | None = None
        self._interrupted = False
        self._last_sent = self._last_received = 0.0

    def wait_established(self, seconds: float) -> None:
        def up() -> bool:
            life = self.network.life
            return life is not None and life.paused_until <= self.world.now

        if not self.world.block(up, min(seconds, 0.5)):
            raise ServerUnavailable("Nothing answers.")
        self.life = self.network.life
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
            life = self.life
            if life is None or life is not self.network.life:
                return
            if life.paused_until > self.world.now:
                self._deliver(method, payload, pending, life.paused_until)
                return
            answer = life.handle(method, payload)
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
