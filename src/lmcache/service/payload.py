"""Frames of workers that cannot map L1: their bytes come and go in the messages of this service.

Invariants: a part is copied only into a slot whose reservation stands, and a reservation does not end while a part is
being copied into it. A part that is sent belongs to the frame that its lease names, whatever became of the lease during
the copy. Copies run on a thread of their own, in the order of their messages; everything else runs on the message loop.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.errors import RemoteError
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import ErrorCode, Read, TransferMode, Write, WriteReply
from lmcache.service.registry import Instance, Registry, Worker
from lmcache.telemetry.metrics import Metrics
from lmcache.transport.bulk import Bulk
from lmcache.transport.deferred import Answer, Deferred
from lmcache.transport.timers import Timer

log = logging.getLogger("lmcache.service")

_READ_REPLY_HEAD = struct.Struct(">2sI")  # msgpack: an array of one bin
_ARRAY_OF_BIN32 = b"\x91\xc6"
_SPARE_SECONDS = 1.0


class Loop(Protocol):
    """The message loop, as far as payload needs it."""

    def post(self, action: Callable[[], None]) -> None: ...
    def call_later(self, delay_seconds: float, action: Callable[[], None]) -> Timer: ...


class _Buffers:
    """Payloads of answers, filled again when they have been sent: fresh memory costs more than the copy into it.

    `take` is called by the copying thread, everything else by the message loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._spare: deque[bytearray] = deque()
        self._taken = 0
        self._taken_before = 0
        self._looking = False

    def take(self, size_bytes: int) -> bytearray:
        self._taken += 1
        try:
            spare = self._spare.pop()
        except IndexError:
            return bytearray(size_bytes)
        return spare if len(spare) == size_bytes else bytearray(size_bytes)

    def give(self, payload: bytearray) -> None:
        if len(self._spare) * limits.MAX_PAYLOAD_PART_BYTES < limits.PAYLOAD_WINDOW_BYTES:
            self._spare.append(payload)

    def look_later(self, collect: Callable[[], bool]) -> None:
        """Lets all spare memory go when nothing was taken for a while and `collect` says that nothing is unsent."""
        if not self._looking:
            self._looking = True
            self._loop.call_later(_SPARE_SECONDS, lambda: self._look(collect))

    def _look(self, collect: Callable[[], bool]) -> None:
        self._looking = False
        all_sent = collect()
        if not all_sent or self._taken != self._taken_before:
            self._taken_before = self._taken
            self.look_later(collect)
        else:
            self._spare.clear()


@dataclass
class _Held:
    """What the server holds for one owner."""

    copies: int = 0
    copying_bytes: int = 0
    unsent: deque[Bulk] = field(default_factory=deque)

    def collect_sent(self, buffers: _Buffers) -> bool:
        """Whether everything has been sent."""
        while self.unsent and self.unsent[0].sent:
            buffers.give(self.unsent.popleft().payload)
        return not self.unsent

    @property
    def size_bytes(self) -> int:
        return self.copying_bytes + sum(bulk.size_bytes for bulk in self.unsent)


class PayloadService:
    """Handlers of write and read."""

    def __init__(
        self, registry: Registry, l1: L1Store, boot_token: bytes, loop: Loop, threads: Executor, metrics: Metrics
    ) -> None:
        """`threads` must run what it is given one after the other. Closing it is the caller's business."""
        self._registry = registry
        self._l1 = l1
        self._boot_token = boot_token
        self._loop = loop
        self._threads = threads
        self._metrics = metrics
        self._held: dict[int, _Held] = {}
        self._buffers = _Buffers(loop)
        registry.is_copying = self.is_copying

    def is_copying(self, owner: int) -> bool:
        """Whether a copy into a slot of that owner is under way."""
        held = self._held.get(owner)
        return held is not None and held.copies > 0

    # ---- handlers ----------------------------------------------------------------------------------------------------
    def write(self, message: Write) -> Deferred:
        _, worker = self._socket_worker(message)
        reservation = worker.reservations.get(message.reservation)
        if reservation is None:
            raise RemoteError(ErrorCode.ENDED, f"Reservation {message.reservation} has ended.")
        frame_bytes = self._frame_bytes(worker, message.group)
        _check_range("chunk", message.chunk, reservation.chunks)
        position = message.group * reservation.chunks + message.chunk
        slot = reservation.slot(position)
        if slot == _native.NO_SLOT:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"Chunk {message.chunk} got no slot: there is nothing to write.")
        size_bytes = len(message.data)
        received_bytes = reservation.received.get(position, 0)
        if message.offset != received_bytes:
            raise RemoteError(
                ErrorCode.BAD_REQUEST, f"The next part of this frame is at {received_bytes}, not at {message.offset}."
            )
        _check_part(message.offset, size_bytes, frame_bytes)
        address = self._l1.address_of(slot)
        is_last = message.offset + size_bytes == frame_bytes
        digest = reservation.keyspace.namespaces[message.group].digest
        chunk_hash = reservation.chunk_hash(message.chunk)

        def copy() -> Answer:
            _native.frame_write_part(address, message.offset, message.data)
            if is_last:
                fault = _native.frame_verify(address, frame_bytes, digest, chunk_hash)
                if fault:
                    return RemoteError(ErrorCode.BAD_REQUEST, f"What arrived is not the frame: wrong {fault}.")
            return WriteReply(message.offset + size_bytes)

        def ended(answer: Answer, delivered: bool) -> None:
            if is_last and not isinstance(answer, RemoteError):
                reservation.whole.add(position)
            elif is_last:
                self._metrics.corrupt_frames.labels("socket").inc()
            reservation.copy_ended()

        deferred = self._copy(worker, size_bytes, copy, ended)
        reservation.received[position] = message.offset + size_bytes
        reservation.copies += 1
        return deferred

    def read(self, message: Read) -> Deferred:
        instance, worker = self._socket_worker(message)
        session = instance.leases.get(message.lease)
        lease = session.lease if session is not None else None
        if lease is None or not lease.offsets:
            raise RemoteError(ErrorCode.ENDED, f"Lease {message.lease} has ended.")
        frame_bytes = self._frame_bytes(worker, message.group)
        _check_range("chunk", message.chunk, lease.chunks)
        row = worker.registration.kv_rank * len(worker.registration.layouts) + message.group
        if row >= len(lease.keyspace.namespaces):
            raise RemoteError(ErrorCode.LAYOUT_CONFLICT, "The lease does not cover the rank of this worker.")
        _check_part(message.offset, message.size_bytes, frame_bytes)
        (slot,) = struct.unpack_from("<Q", lease.offsets, 8 * (row * lease.chunks + message.chunk))
        if slot == _native.NO_SLOT:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"Chunk {message.chunk} of this group lies before its tail.")
        address = self._l1.address_of(slot)
        digest = lease.keyspace.namespaces[row].digest
        first = message.chunk * CHUNK_HASH_BYTES
        chunk_hash = lease.hashes[first : first + CHUNK_HASH_BYTES]

        def copy() -> Answer:
            payload = self._buffers.take(_READ_REPLY_HEAD.size + message.size_bytes)
            _READ_REPLY_HEAD.pack_into(payload, 0, _ARRAY_OF_BIN32, message.size_bytes)
            part = memoryview(payload)[_READ_REPLY_HEAD.size :]
            fault = _native.frame_read_part(address, frame_bytes, message.offset, part, digest, chunk_hash)
            if fault:
                return RemoteError(ErrorCode.ENDED, f"The slot does not hold this frame (any more): wrong {fault}.")
            return Bulk(payload)

        def ended(answer: Answer, delivered: bool) -> None:
            if isinstance(answer, Bulk) and delivered:  # else it was refused meanwhile, and is never sent
                self._held[worker.owner].unsent.append(answer)
                self._buffers.look_later(self._collect_sent)

        return self._copy(worker, message.size_bytes, copy, ended)

    # ---- copies ------------------------------------------------------------------------------------------------------
    def _copy(
        self, worker: Worker, size_bytes: int, copy: Callable[[], Answer], ended: Callable[[Answer, bool], None]
    ) -> Deferred:
        """Runs `copy` on the copying thread, then answers and calls `ended` on the loop."""
        held = self._room_for(worker.owner, size_bytes)
        deferred = Deferred()

        def finish(answer: Answer) -> None:
            held.copies -= 1
            held.copying_bytes -= size_bytes
            ended(answer, deferred.answer(answer))

        def run() -> None:
            try:
                answer = copy()
            except Exception:  # the root of one copy
                log.exception("A copy between the socket and L1 failed")
                answer = RemoteError(ErrorCode.INTERNAL, "The copy failed; see the server's log.")
            self._loop.post(lambda: finish(answer))

        try:
            self._threads.submit(run)
        except RuntimeError as error:
            raise RemoteError(ErrorCode.SHUTTING_DOWN, "The server is shutting down.") from error
        held.copies += 1
        held.copying_bytes += size_bytes
        return deferred

    def _collect_sent(self) -> bool:
        all_sent = [held.collect_sent(self._buffers) for held in self._held.values()]
        return all(all_sent)

    def _room_for(self, owner: int, size_bytes: int) -> _Held:
        held = self._held.get(owner)
        if held is None:
            self._collect_sent()
            self._held = {one: what for one, what in self._held.items() if what.size_bytes or what.copies}
            held = self._held[owner] = _Held()
        held.collect_sent(self._buffers)
        if held.size_bytes + size_bytes > limits.MAX_PAYLOAD_BYTES_PER_WORKER:
            raise RemoteError(ErrorCode.TOO_MANY, "Too much payload of this worker is on its way; take some first.")
        if sum(what.size_bytes for what in self._held.values()) + size_bytes > limits.MAX_PAYLOAD_BYTES:
            raise RemoteError(ErrorCode.TOO_MANY, "Too much payload of all workers is on its way; try again later.")
        return held

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _socket_worker(self, message: Write | Read) -> tuple[Instance, Worker]:
        if message.boot_token != self._boot_token:
            raise RemoteError(ErrorCode.ENDED, "What this names belongs to another life of the server.")
        instance, worker = self._registry.worker(message.instance_id, message.worker_id)
        if worker.registration.transfer_mode != TransferMode.SOCKET:
            raise RemoteError(ErrorCode.BAD_REQUEST, "This worker registered for shared memory, not for the socket.")
        return instance, worker

    def _frame_bytes(self, worker: Worker, group: int) -> int:
        """What travels of a frame: without the padding of its slot."""
        _check_range("group", group, len(worker.registration.payload_bytes))
        return FRAME_HEADER_BYTES + worker.registration.payload_bytes[group]


def _check_range(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise RemoteError(ErrorCode.BAD_REQUEST, f"{what} is {value}; it must be from 0 to {count - 1}.")


def _check_part(offset: int, size_bytes: int, frame_bytes: int) -> None:
    if not 1 <= size_bytes <= limits.MAX_PAYLOAD_PART_BYTES:
        raise RemoteError(
            ErrorCode.BAD_REQUEST, f"A part has 1 to {limits.MAX_PAYLOAD_PART_BYTES} bytes, not {size_bytes}."
        )
    if not 0 <= offset <= frame_bytes - size_bytes:
        raise RemoteError(
            ErrorCode.BAD_REQUEST, f"{size_bytes} bytes at {offset} leave the frame of {frame_bytes} bytes."
        )
