"""One connection of another server to this one: the answers to its lookups and reads, out of L1."""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache import _native
from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import AdapterError, ProtocolError
from lmcache.l1.store import L1Store
from lmcache.l2.background import spawn
from lmcache.l2.call_threads import CallThreads
from lmcache.memory.ownership import PEER_OWNER
from lmcache.peers.leases import PeerLeases
from lmcache.peers.protocol import (
    Describe,
    Described,
    Found,
    Frames,
    Kind,
    Lookup,
    Read,
    Refused,
    Release,
    Renew,
    check_keys,
    decode,
    encode,
)
from lmcache.peers.sockets import PeerRefused, PeerSocket
from lmcache.peers.transports.library_process import LibraryProcess
from lmcache.telemetry.metrics import P2PMetrics

log = logging.getLogger("lmcache.peers")

_LOOK_SECONDS = 0.005  # between looks at chunks that are being stored
_LEAST_RATE = 1e6  # bytes a second that a reader must take
_SEND_SECONDS = 10.0  # and this long beside


@dataclass(frozen=True)
class ServingContext:
    """What all connections share. Belongs to the listener's loop."""

    l1: L1Store
    leases: PeerLeases
    threads: CallThreads
    metrics: P2PMetrics
    clock: Clock
    library: LibraryProcess | None  # that reaches L1 for others


class ServedPeer:
    """One connection after the handshake."""

    def __init__(
        self, sock: PeerSocket, context: ServingContext, sends: asyncio.Semaphore, on_wait: Callable[[int], bool]
    ) -> None:
        """`sends`: how many reads of that host may go on at once. `on_wait(1)` asks whether one more lookup may wait,
        `on_wait(-1)` ends that."""
        self._sock = sock
        self._context = context
        self._sends = sends
        self._on_wait = on_wait
        self._core = context.l1.core
        self._waiting: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # an answer that waited must not come in between

    async def run(self) -> None:
        """Until the other side has closed. OSError, EOFError, ProtocolError."""
        try:
            while True:
                kind, number, body = await self._sock.receive()
                if kind is Kind.LOOKUP:
                    await self._lookup(number, decode(body, Lookup))
                elif kind is Kind.READ:
                    await self._read(number, decode(body, Read))
                elif kind is Kind.DESCRIBE:
                    await self._describe(number, decode(body, Describe))
                elif kind is Kind.RENEW:
                    self._context.leases.renew(decode(body, Renew).lease)
                elif kind is Kind.RELEASE:
                    self._context.leases.release(decode(body, Release).lease, self)
                elif kind is Kind.REFUSED:
                    raise PeerRefused(decode(body, Refused).sentence)
                else:
                    raise ProtocolError(f"it sent {kind.name} after the handshake")
                await asyncio.sleep(0)  # what has arrived already is received without a turn of anybody else
        finally:
            for waiting in self._waiting:
                waiting.cancel()
            await asyncio.gather(*self._waiting, return_exceptions=True)
            self._context.leases.release_all(self)

    # ---- lookups -----------------------------------------------------------------------------------------------------
    async def _lookup(self, number: int, lookup: Lookup) -> None:
        check_keys(lookup)
        if lookup.wait_ms and 0 in self._resident(lookup) and self._on_wait(1):
            waiting = spawn(self._answer_later(number, lookup), "peer-wait")
            self._waiting.add(waiting)
            waiting.add_done_callback(self._wait_ended)
        else:
            await self._answer(number, lookup)

    def _wait_ended(self, waiting: asyncio.Task[None]) -> None:
        self._waiting.discard(waiting)
        self._on_wait(-1)

    async def _answer_later(self, number: int, lookup: Lookup) -> None:
        """What was announced is waited for from one object to the next: each may be staged, or not even reserved. Of a
        group with a tail most objects are never stored: nothing more comes once the last of each namespace is there."""
        loop = asyncio.get_running_loop()
        progress_at = loop.time()
        deadline = progress_at + lookup.wait_ms / 1000
        ends = _ends(lookup)
        awaited = 0
        was_staged = False
        while (now_seconds := loop.time()) < deadline:
            resident = self._resident(lookup)
            missing = resident.count(0)
            if not missing:
                break
            is_staged = any(self._is_staged(lookup, position) for position in _next(resident, ends))
            if missing != awaited or is_staged:
                awaited, progress_at = missing, now_seconds
            elif was_staged or now_seconds - progress_at >= limits.HANDOVER_START_SECONDS:
                break  # its store has ended without it, or does not begin
            if not is_staged and all(resident[end] for end in ends):
                break
            was_staged = is_staged
            await asyncio.sleep(min(_LOOK_SECONDS, deadline - now_seconds))
        try:
            await self._answer(number, lookup)
        except OSError:
            self._sock.cut()  # `run` sees it

    def _resident(self, lookup: Lookup) -> bytes:
        """A byte for each of these objects, 0 where it is not there."""
        return self._core.resident_each(lookup.digests, lookup.hashes)

    def _is_staged(self, lookup: Lookup, position: int) -> bool:
        """Whether an engine is storing that object."""
        first = position * CHUNK_HASH_BYTES
        digest, chunk_hash = (keys[first : first + CHUNK_HASH_BYTES] for keys in (lookup.digests, lookup.hashes))
        return self._core.fate_of(digest, chunk_hash) is _native.Fate.BEING_STORED

    async def _answer(self, number: int, lookup: Lookup) -> None:
        context = self._context
        acquired = self._core.acquire_each(PEER_OWNER, lookup.digests, lookup.hashes, math.inf)
        memory = context.l1.memory
        sizes, total_bytes = _native.frame_sizes(memory.address, memory.size_bytes, acquired.slots)
        lease = acquired.lease
        if not lookup.lease or not context.leases.admits(total_bytes):
            self._core.release(lease)
            lease = 0
        if lease:
            context.leases.add(lease, total_bytes, self)
        context.metrics.p2p_served_lookups.inc()
        async with self._sending:
            await self._sock.send(Kind.FOUND, number, Found(lease, sizes, acquired.slots if lease else b""))

    async def _describe(self, number: int, describe: Describe) -> None:
        library = self._context.library
        region = library.region if library is not None and library.engine == describe.engine else b""
        async with self._sending:
            await self._sock.send(Kind.REGION, number, Described(region))

    # ---- reads -------------------------------------------------------------------------------------------------------
    async def _read(self, number: int, read: Read) -> None:
        check_keys(read)
        self._context.leases.renew(read.lease)
        async with self._sends, self._sending:
            await self._send_frames(number, read)

    async def _send_frames(self, number: int, read: Read) -> None:
        context = self._context
        acquired = self._core.acquire_each(PEER_OWNER, read.digests, read.hashes, math.inf)
        try:
            memory = context.l1.memory
            packed, total_bytes = _native.frame_sizes(memory.address, memory.size_bytes, acquired.slots)
            sizes, slots = array("Q", packed), array("Q", acquired.slots)
            addresses = array("Q", [memory.address + slot for slot, size in zip(slots, sizes, strict=True) if size])
            present = array("Q", filter(None, sizes))
            head = encode(Kind.FRAMES, number, Frames(packed))
            seconds = _SEND_SECONDS + total_bytes / _LEAST_RATE
            ranges = memoryview(addresses), memoryview(present)
            error = await context.threads.run(
                partial(_native.send_ranges, self._sock.fd, head, *ranges, seconds, limits.PEER_IDLE_SECONDS)
            )
        finally:
            self._core.release(acquired.lease)
        if error:
            raise OSError(error, "it did not take what it asked for")
        context.metrics.p2p_sent.inc(total_bytes)


def _ends(lookup: Lookup) -> list[int]:
    """Position of the last object of each namespace."""
    digests = lookup.digests
    last = {
        digests[at : at + CHUNK_HASH_BYTES]: at // CHUNK_HASH_BYTES for at in range(0, len(digests), CHUNK_HASH_BYTES)
    }
    return list(last.values())


def _next(resident: bytes, ends: Sequence[int]) -> Iterator[int]:
    """Where a store is to be seen first, as objects are stored from the first chunk to the last: the first object that
    is missing, those of the chunk behind the last one that is there, and the last of each namespace."""
    yield resident.find(0)
    behind = len(resident.rstrip(b"\0"))
    yield from range(behind, min(behind + len(ends), len(resident)))
    for end in ends:
        if not resident[end]:
            yield end


def is_expected(fault: BaseException) -> bool:
    """Whether a connection may end so."""
    return isinstance(fault, OSError | EOFError | ProtocolError | AdapterError | asyncio.TimeoutError)
