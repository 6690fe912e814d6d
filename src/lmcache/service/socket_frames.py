"""Frames of workers that cannot map L1: their bytes travel in the messages of this service.

Invariants: a part is copied only into a slot whose reservation stands, and a reservation does not end while a part is
being copied into it. A part that is sent belongs to the frame that its lease names, even if the lease ended during the
copy.
"""

from __future__ import annotations

import struct

from lmcache import _native
from lmcache.core import limits
from lmcache.core.frame import verify_frames
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode, Read, TransferMode, Write, WriteReply
from lmcache.service.context import ServiceContext
from lmcache.service.instances import Instance, InstanceRegistry, Worker
from lmcache.service.message_checks import check_range
from lmcache.service.socket_copies import SocketCopies
from lmcache.transport.deferred import Answer, Bulk, Deferred

_READ_REPLY_HEAD = struct.Struct(">2sI")  # msgpack: an array of one bin
_ARRAY_OF_BIN32 = b"\x91\xc6"


class SocketFrameService:
    """Handlers of write and read."""

    def __init__(self, context: ServiceContext, registry: InstanceRegistry, copies: SocketCopies) -> None:
        self._registry = registry
        self._copies = copies
        self._l1 = context.l1
        self._server_epoch = context.settings.server_epoch
        self._metrics = context.metrics

    # ---- handlers ----------------------------------------------------------------------------------------------------
    def write(self, message: Write) -> Deferred:
        _, worker = self._socket_worker(message)
        reservation = worker.reservations.get(message.reservation)
        if reservation is None:
            raise RemoteError(ErrorCode.ENDED, f"Reservation {message.reservation} has ended.")
        frame_bytes = self._frame_bytes(worker, message.group)
        check_range("chunk", message.chunk, 0, reservation.keys.chunks - 1)
        place = message.group, message.chunk
        slot = reservation.slots[place]
        if slot == _native.NO_SLOT:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"Chunk {message.chunk} got no slot: there is nothing to write.")
        size_bytes = len(message.data)
        received_bytes = reservation.received.get(place, 0)
        if message.offset != received_bytes:
            raise RemoteError(
                ErrorCode.BAD_REQUEST, f"The next part of this frame is at {received_bytes}, not at {message.offset}."
            )
        _check_part(message.offset, size_bytes, frame_bytes)
        address = self._l1.address_of(slot)
        is_last = message.offset + size_bytes == frame_bytes
        key, frame = reservation.keys.key(*place), self._l1.memory.view(slot, frame_bytes)

        def copy() -> Answer:
            _native.frame_write_part(address, message.offset, message.data)
            if is_last:
                (fault,) = verify_frames([key], [frame])
                if fault:
                    return RemoteError(ErrorCode.BAD_REQUEST, f"What arrived is not the frame: wrong {fault}.")
            return WriteReply(message.offset + size_bytes)

        def ended(answer: Answer) -> None:
            if is_last and not isinstance(answer, RemoteError):
                reservation.whole.add(place)
            elif is_last:
                self._metrics.corrupt_frames.labels("socket").inc()
            reservation.copy_ended()

        deferred = self._copies.submit(worker.owner, size_bytes, copy, ended)
        reservation.received[place] = message.offset + size_bytes
        reservation.copies += 1
        return deferred

    def read(self, message: Read) -> Deferred:
        instance, worker = self._socket_worker(message)
        session = instance.leases.get(message.lease)
        prefix = session.prefix if session is not None else None
        if prefix is None or not prefix.slots.chunks:
            raise RemoteError(ErrorCode.ENDED, f"Lease {message.lease} has ended.")
        frame_bytes = self._frame_bytes(worker, message.group)
        check_range("chunk", message.chunk, 0, prefix.chunks - 1)
        row = prefix.row(worker.profile.kv_rank, message.group, len(worker.profile.layouts))
        if row is None:
            raise RemoteError(ErrorCode.LAYOUT_CONFLICT, "The lease does not cover the rank of this worker.")
        _check_part(message.offset, message.size_bytes, frame_bytes)
        slot = prefix.slots[row, message.chunk]
        if slot == _native.NO_SLOT:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"Chunk {message.chunk} of this group lies before its tail.")
        address = self._l1.address_of(slot)
        key = prefix.keys.key(row, message.chunk)

        def copy() -> Answer:
            payload = self._copies.buffer(_READ_REPLY_HEAD.size + message.size_bytes)
            _READ_REPLY_HEAD.pack_into(payload, 0, _ARRAY_OF_BIN32, message.size_bytes)
            part = memoryview(payload)[_READ_REPLY_HEAD.size :]
            fault = _native.frame_read_part(
                address, frame_bytes, message.offset, part, key.namespace.digest, key.chunk_hash
            )
            if fault:
                return RemoteError(ErrorCode.ENDED, f"The slot does not hold this frame (any more): wrong {fault}.")
            return Bulk(payload)

        return self._copies.submit(worker.owner, message.size_bytes, copy)

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _socket_worker(self, message: Write | Read) -> tuple[Instance, Worker]:
        if message.server_epoch != self._server_epoch:
            raise RemoteError(ErrorCode.ENDED, "What this names belongs to another server epoch.")
        instance, worker = self._registry.worker(message.instance_id, message.worker_id)
        if worker.profile.transfer_mode != TransferMode.SOCKET:
            raise RemoteError(ErrorCode.BAD_REQUEST, "This worker registered for shared memory, not for the socket.")
        return instance, worker

    def _frame_bytes(self, worker: Worker, group: int) -> int:
        """What travels of a frame: without the padding of its slot."""
        check_range("group", group, 0, len(worker.profile.payload_bytes) - 1)
        return FRAME_HEADER_BYTES + worker.profile.payload_bytes[group]


def _check_part(offset: int, size_bytes: int, frame_bytes: int) -> None:
    if not 1 <= size_bytes <= limits.MAX_PAYLOAD_PART_BYTES:
        raise RemoteError(
            ErrorCode.BAD_REQUEST, f"A part has 1 to {limits.MAX_PAYLOAD_PART_BYTES} bytes, not {size_bytes}."
        )
    if not 0 <= offset <= frame_bytes - size_bytes:
        raise RemoteError(
            ErrorCode.BAD_REQUEST, f"{size_bytes} bytes at {offset} leave the frame of {frame_bytes} bytes."
        )
