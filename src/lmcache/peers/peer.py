"""One other server: the connections to it, what it has done so far, and whether it is left alone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import is_
from typing import Any

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.address import host_port
from lmcache.core.key import CHUNK_HASH_BYTES, ObjectKey
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import ProtocolError
from lmcache.l2.background import spawn
from lmcache.l2.call_threads import CallThreads
from lmcache.l2.circuit_breaker import CircuitBreaker
from lmcache.l2.turns import Turns
from lmcache.peers.connections import LookupConnection, ReadConnections, connect, connect_at
from lmcache.peers.handshake import Introducer
from lmcache.peers.identity import Identity
from lmcache.peers.protocol import Found, Kind, Lookup, Message, Release, Renew
from lmcache.peers.sockets import Endpoint, PeerRefused, PeerSocket, within
from lmcache.peers.transports.contract import Fetched, Transfer, Transport
from lmcache.peers.transports.library_process import LibraryProcess
from lmcache.peers.transports.one_sided import OneSidedTransport
from lmcache.peers.transports.shared_memory import MappedFrames, SharedMemoryTransport
from lmcache.peers.transports.tcp import TcpTransport
from lmcache.telemetry.metrics import P2PMetrics

log = logging.getLogger("lmcache.peers")

_FAULTS = (OSError, EOFError, ProtocolError, asyncio.TimeoutError)
_LEAST_MEASURED_BYTES = 1 << 20
_RATE_SHARE = 0.25  # of the latest transfer, in the measured rate
_LEAST_TIME_SHARE = 0.1  # of a load's time, that is left when it begins


class NothingGiven(Exception):
    """Nothing of what a peer keeps from eviction was there when it was read: once that may be so, in a row it lies."""


@dataclass(frozen=True)
class PeerContext:
    """What all peers share. Belongs to the storage loop."""

    introducer: Introducer
    threads: CallThreads
    metrics: P2PMetrics
    clock: Clock
    lookup_timeout_seconds: float
    load_timeout_seconds: float
    mapped: MappedFrames | None  # of peers on the same host, where their memory may be mapped
    library: LibraryProcess | None  # that reads from peers into L1
    l1_address: int = 0
    l1_bytes: int = 0
    forget: Callable[[Peer], None] = lambda peer: None  # what it said before it was started anew
    lost: Callable[[Peer], None] = lambda peer: None  # its connection has ended

    def breaker(self) -> CircuitBreaker:
        return CircuitBreaker(
            self.clock,
            failures=limits.PEER_BREAKER_FAILURES,
            open_seconds=limits.L2_BREAKER_OPEN_SECONDS,
            max_open_seconds=limits.L2_BREAKER_MAX_OPEN_SECONDS,
        )


@dataclass(frozen=True)
class Answer:
    """To a lookup, element for element; `slots` may be empty."""

    lease: int
    sizes: Sequence[int]
    slots: Sequence[int]


class Peer:
    """Belongs to the storage loop. Figures may be read from any thread."""

    def __init__(self, host: str, port: int, address: str, context: PeerContext) -> None:
        """`address` names it, in logs and figures."""
        self.address = address
        self.identity: Identity | None = None  # while connected
        self.in_flight_bytes = 0
        self._host, self._port = host, port
        self._context = context
        self._lookups: LookupConnection | None = None
        self._endpoint: Endpoint | None = None  # of that one: a name may have others, where the peer is not
        self._reads = ReadConnections(self._open_for_reads)
        self._tcp = TcpTransport(self._reads, context.threads)
        self._direct: SharedMemoryTransport | OneSidedTransport | None = None  # TCP has what it does not give
        self._turns = Turns(limits.MAX_PEER_LOADS)
        self._lookup_breaker, self._load_breaker = context.breaker(), context.breaker()
        self._asked_at: dict[object, float] = {}  # lookups without an answer, the oldest first
        self._rate = limits.PEER_FIRST_RATE  # bytes a second
        self._lost = asyncio.Event()
        self._refusal = ""
        self._last_epoch = b""
        self._connected_at = 0.0
        self._level = logging.INFO  # of what is logged of a short connection: once, where each ends at once
        self._unreached_is_said = False  # since the last stable connection
        self._background: set[asyncio.Task[None]] = set()
        self._figures = {"lookups": 0, "hits": 0, "received_bytes": 0, "failures": 0}
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    # ---- the connection ----------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._keeper = spawn(self._keep_connected(), f"peer-{self.address}")

    async def close(self) -> None:
        """Ends what is under way and what waits. Idempotent."""
        self._is_closed = True
        self._turns.end()
        self._tcp.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._let_go()
        if self._background:
            await asyncio.wait(set(self._background))

    async def _keep_connected(self) -> None:
        pause_seconds = limits.PEER_RETRY_SECONDS
        while True:
            try:
                sock, identity = await connect(self._host, self._port, self._context.introducer)
            except PeerRefused as refusal:
                if self._refusal != str(refusal):
                    self._refusal = str(refusal)
                    log.warning("The peer %s is not used: %s", self.address, refusal)
                self._context.metrics.p2p_failures.labels("refused").inc()
                await asyncio.sleep(limits.PEER_REFUSED_SECONDS)
                continue
            except Exception as fault:  # the root of a peer: it is tried again, whatever it was
                if isinstance(fault, _FAULTS):
                    lasts = 2 * pause_seconds >= limits.MAX_PEER_RETRY_SECONDS
                    level = logging.INFO if lasts and not self._unreached_is_said else logging.DEBUG
                    self._unreached_is_said |= lasts
                    log.log(level, "The peer %s is not reached: %s", self.address, fault or type(fault).__name__)
                else:
                    log.exception("The connection to the peer %s failed by a fault", self.address)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, limits.MAX_PEER_RETRY_SECONDS)
                continue
            if identity.epoch == self._context.introducer.identity.epoch:
                log.info("The peer %s is this server itself: it is left out", self.address)
                sock.close()
                return
            self._refusal = ""
            try:
                self._connected(sock, identity)
                await self._lost.wait()
            except Exception:
                sock.close()
                log.exception("The connection to the peer %s ended by a fault", self.address)
            finally:
                await self._let_go()
            self._context.lost(self)
            was_stable = self._lasted_seconds >= limits.MAX_PEER_RETRY_SECONDS  # not cut off again and again
            await asyncio.sleep(pause_seconds)
            self._level = logging.INFO if was_stable else logging.DEBUG
            self._unreached_is_said &= not was_stable
            longer_seconds = min(2 * pause_seconds, limits.MAX_PEER_RETRY_SECONDS)
            pause_seconds = limits.PEER_RETRY_SECONDS if was_stable else longer_seconds

    @property
    def _lasted_seconds(self) -> float:
        return self._context.clock.monotonic() - self._connected_at

    def _connected(self, sock: PeerSocket, identity: Identity) -> None:
        self._lost.clear()
        self._connected_at = self._context.clock.monotonic()
        self._reads.forget_idle()
        self._endpoint = sock.endpoint
        self._lookups = LookupConnection(sock, self._on_lost)
        self._direct = self._direct_way(identity, self._lookups)
        self.identity = identity
        if identity.epoch != self._last_epoch:  # a server that was started anew is judged anew
            self._last_epoch = identity.epoch
            self._level = logging.INFO
            self._lookup_breaker, self._load_breaker = self._context.breaker(), self._context.breaker()
            self._rate = limits.PEER_FIRST_RATE
            self._context.forget(self)  # its leases have the numbers of those before
        log.log(
            *(self._level, "The peer %s is connected, frames come by %s", self.address),
            (self._direct or self._tcp).name,
        )

    def _direct_way(
        self, identity: Identity, lookups: LookupConnection
    ) -> SharedMemoryTransport | OneSidedTransport | None:
        context = self._context
        if context.mapped is not None:
            return SharedMemoryTransport.of(identity, context.mapped)
        if (library := context.library) is None or identity.transfer_engine != library.engine:
            return None
        return OneSidedTransport(
            self.address,
            library,
            context.l1_address,
            context.l1_bytes,
            partial(lookups.describe, library.engine),
            context.threads,
            context.breaker(),
            context.metrics.p2p_failures.labels("transfer_engine"),
        )

    def _on_lost(self, fault: BaseException | None) -> None:
        if fault is not None:
            lasted_seconds = self._lasted_seconds
            level = logging.INFO if lasted_seconds >= limits.MAX_PEER_RETRY_SECONDS else self._level
            log.log(level, "The connection to the peer %s ended after %.0f s: %s", self.address, lasted_seconds, fault)
        self._lost.set()

    async def _let_go(self) -> None:
        self.identity = None
        if (lookups := self._lookups) is not None:
            self._lookups = None
            await lookups.close()
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    async def _open_for_reads(self) -> PeerSocket:
        if self.identity is None or self._endpoint is None:
            raise EOFError("its connection ended")
        address = host_port(self._host, self._port)
        sock, identity = await connect_at(self._endpoint, address, self._context.introducer)
        if self.identity is None or identity.epoch != self.identity.epoch:
            sock.close()
            raise EOFError("its connection ended, or it has been started anew")
        return sock

    # ---- lookups -----------------------------------------------------------------------------------------------------
    @property
    def may_ask(self) -> bool:
        """Whether a lookup makes sense: it answers in time, and what it has could be loaded."""
        if self._lookups is None or self._lookups.unanswered >= limits.MAX_PEER_LOOKUPS:
            return False
        monotonic = self._context.clock.monotonic()
        if any(monotonic - at > limits.PEER_PATIENCE_SECONDS for at in self._asked_at.values()):
            return False
        return self._lookup_breaker.would_admit and self._load_breaker.would_admit

    async def lookup(self, digests: bytes, hashes: bytes, wait_seconds: float = 0.0) -> Answer | None:
        """Looks up keys as `pack_keys` packs them. None where the peer does not answer within --p2p-lookup-timeout."""
        connection, context = self._lookups, self._context
        if connection is None or not self._lookup_breaker.admits():
            return None
        count = len(hashes) // CHUNK_HASH_BYTES
        wait_ms = int(1000 * min(wait_seconds, limits.MAX_PEER_WAIT_SECONDS))
        question, started = object(), context.clock.monotonic()
        if not wait_ms:
            self._asked_at[question] = started
        try:
            asking = connection.lookup(Lookup(digests, hashes, wait_ms))
            answer = _checked(await within(context.lookup_timeout_seconds + wait_seconds, asking), count)
        except _FAULTS as fault:
            self._failed(self._lookup_breaker, fault)
            await connection.close()
            return None
        finally:
            self._asked_at.pop(question, None)
        self._lookup_breaker.succeeded()
        context.metrics.p2p_lookup.observe(context.clock.monotonic() - started)
        hits = count - answer.sizes.count(0)
        self._figures["lookups"] += 1
        self._figures["hits"] += hits
        context.metrics.p2p_hits.inc(hits)
        return answer

    def release(self, lease: int) -> None:
        """A lease that a lookup gave."""
        if lease:
            self._tell(Kind.RELEASE, Release(lease))

    def renew(self, lease: int) -> None:
        """It is in use. A read tells that by itself, a copy out of mapped memory does not."""
        if lease:
            self._tell(Kind.RENEW, Renew(lease))

    def _tell(self, kind: Kind, message: Message) -> None:
        """What has no answer, and is of no importance where it does not come through."""
        if self._lookups is not None:
            self._spawn(self._send(self._lookups, kind, message), "peer-message")

    async def _send(self, connection: LookupConnection, kind: Kind, message: Message) -> None:
        with contextlib.suppress(*_FAULTS):
            await within(limits.PEER_HELLO_SECONDS, connection.tell(kind, message))

    # ---- loads -------------------------------------------------------------------------------------------------------
    def load_seconds(self, size_bytes: int) -> float:
        """The deadline of a load, from its size, what is on its way already, and the measured rate."""
        expected_seconds = (size_bytes + self.in_flight_bytes) / self._rate
        most_seconds = self._context.load_timeout_seconds
        return min(most_seconds, limits.PEER_LOAD_FLOOR_SECONDS + limits.PEER_LOAD_MARGIN * expected_seconds)

    async def load(self, transfer: Transfer) -> list[LoadOutcome]:
        """LOADED, MISSING, or FAILED: it did not come, or was another thing. At most MAX_PEER_LOADS at once; others
        wait until then, and for no longer than this peer is worth it."""
        if self._is_closed or not self._load_breaker.admits():
            return [LoadOutcome.FAILED] * len(transfer.keys)
        if self._load_breaker.is_open:  # it is time to see whether it works again, and nobody waits for that
            self._spawn(self._try(transfer.keys[0], transfer.buffers[0].nbytes), "peer-trial")
            return [LoadOutcome.FAILED] * len(transfer.keys)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + transfer.seconds
        self.in_flight_bytes += transfer.room_bytes
        try:
            if not await self._turns.acquire(deadline):
                return [LoadOutcome.FAILED] * len(transfer.keys)
            try:
                left_seconds = deadline - loop.time()
                # Suspended by one that this one waited for; or late because of those, which is no fault of this peer.
                if self._load_breaker.is_open or left_seconds < _LEAST_TIME_SHARE * transfer.seconds:
                    return [LoadOutcome.FAILED] * len(transfer.keys)
                return await self._load(transfer.within(left_seconds))
            finally:
                self._turns.release()
        finally:
            self.in_flight_bytes -= transfer.room_bytes

    def load_broke(self, fault: BaseException) -> None:
        """A load raised: it counts as one that failed."""
        log.error("A load from the peer %s ended by a fault", self.address, exc_info=fault)
        self._failed(self._load_breaker, fault)

    def gave_nothing(self) -> None:
        """A load found nothing of what is under a lease."""
        self._failed(self._load_breaker, NothingGiven("it gives nothing of what it says it has"))

    async def _load(self, transfer: Transfer) -> list[LoadOutcome]:
        clock = self._context.clock
        started = clock.monotonic()
        outcomes = [LoadOutcome.FAILED] * len(transfer.keys)
        left = list(range(len(transfer.keys)))
        transports: list[Transport] = [self._tcp] if self._direct is None else [self._direct, self._tcp]
        for transport in transports:
            seconds = transfer.seconds - (clock.monotonic() - started)
            if seconds <= 0 and transport is not transports[0]:
                break  # the first has taken all of the time, which the next is not to be blamed for
            asked = transfer.pick(left, seconds)
            fetched = await transport.fetch(asked)
            self._count(transport, asked, fetched)
            if fetched.outcomes.count(LoadOutcome.LOADED) == len(outcomes):
                outcomes = list(fetched.outcomes)
                break
            for index, outcome in zip(left, fetched.outcomes, strict=True):
                outcomes[index] = LoadOutcome.FAILED if outcome is LoadOutcome.CORRUPT else outcome
            left = [index for index in left if outcomes[index] is LoadOutcome.FAILED]
            if not left:
                break
        if LoadOutcome.LOADED in outcomes and LoadOutcome.FAILED not in outcomes:
            self._load_breaker.succeeded()
            came_bytes = sum(buffer.nbytes for buffer in compress(transfer.buffers, _came(outcomes)))
            self._measure(came_bytes, clock.monotonic() - started)
        return outcomes

    def _count(self, transport: Transport, transfer: Transfer, fetched: Fetched) -> None:
        came_bytes = sum(compress(transfer.sizes, _came(fetched.outcomes)))
        self._figures["received_bytes"] += came_bytes
        self._context.metrics.p2p_received.labels(transport.name).inc(came_bytes)
        if LoadOutcome.CORRUPT in fetched.outcomes:
            self._failed(self._load_breaker, ProtocolError("it sent other frames than those that were asked for"))
        elif fetched.fault is not None:
            self._failed(self._load_breaker, fetched.fault)

    def _measure(self, size_bytes: int, seconds: float) -> None:
        self._context.metrics.p2p_load.observe(seconds)
        if size_bytes >= _LEAST_MEASURED_BYTES and seconds > 0:
            self._rate += _RATE_SHARE * (size_bytes / seconds - self._rate)

    async def _try(self, key: ObjectKey, size_bytes: int) -> None:
        """Loads into memory that nobody else has. An answer is what counts: the object may have been evicted."""
        buffer = memoryview(mmap.mmap(-1, size_bytes))
        seconds = self.load_seconds(size_bytes)
        outcomes = await self._load(Transfer([key], [buffer], [size_bytes], [], 0, size_bytes, seconds))
        if outcomes == [LoadOutcome.MISSING]:
            self._load_breaker.succeeded()

    def _failed(self, breaker: CircuitBreaker, fault: BaseException) -> None:
        """What cost a deadline, or broke the protocol, is one too many; others are when they come in a row."""
        if self._is_closed:  # it was ended here
            return
        is_late = isinstance(fault, asyncio.TimeoutError | TimeoutError)
        reason = "deadline" if is_late else "protocol" if isinstance(fault, ProtocolError) else "connection"
        if isinstance(fault, NothingGiven):
            reason = "nothing_given"
        self._figures["failures"] += 1
        self._context.metrics.p2p_failures.labels(reason).inc()
        if breaker.failed(at_once=reason in ("deadline", "protocol")):
            sentence = "it did not answer in time" if is_late else str(fault) or "the connection ended"
            log.warning("The peer %s is left alone for %.0f s: %s", self.address, breaker.open_seconds, sentence)

    # ---- figures -----------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "connected": self.identity is not None,
            "refused": self._refusal,
            "left_alone": self._lookup_breaker.is_open or self._load_breaker.is_open,
            "transport": (self._direct or self._tcp).name,
            "bytes_per_second": int(self._rate),
            **self._figures,
        }

    def check_idle(self) -> None:
        """AssertionError while something is under way."""
        held = {"lookups": len(self._asked_at), "bytes": self.in_flight_bytes, "tasks": len(self._background)}
        assert not any(held.values()), f"The peer {self.address} is not idle: {held}"

    def _spawn(self, coroutine: Any, name: str) -> None:
        task = spawn(coroutine, name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _checked(found: Found, count: int) -> Answer:
    """ProtocolError where it cannot be an answer for that many keys."""
    if len(found.sizes) != 8 * count or len(found.slots) not in (0, 8 * count):
        raise ProtocolError("it answered a lookup with another number of objects")
    sizes = array("Q", found.sizes)
    most = limits.MAX_OBJECT_BYTES + limits.FRAME_HEADER_BYTES + limits.FRAME_ALIGN_BYTES
    if any(size <= limits.FRAME_HEADER_BYTES or size > most for size in set(sizes) - {0}):
        raise ProtocolError("it has objects of sizes that no object has")
    return Answer(found.lease, sizes, array("Q", found.slots))


def _came(outcomes: Iterable[LoadOutcome]) -> Iterator[bool]:
    return map(partial(is_, LoadOutcome.LOADED), outcomes)
