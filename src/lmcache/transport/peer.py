"""The server's end of one connection."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from typing import TYPE_CHECKING

from lmcache.errors import ProtocolError
from lmcache.transport.deferred import Bulk
from lmcache.transport.timers import Timer
from lmcache.transport.zmtp import (
    CURVE_GREETING,
    GREETING,
    MORE,
    RECEIVE_BYTES,
    Message,
    MessageReader,
    frame_head,
)

if TYPE_CHECKING:
    from lmcache.transport.curve import CurveSession
    from lmcache.transport.curve_clients import CurveClient

_MAX_PIECES = 64  # of one system call
_JOINED_BYTES = 32 * 1024  # smaller answers are copied together: as pieces of their own they would take many times that


class Peer:
    """Nothing here waits. OSError: the connection has ended."""

    __slots__ = (
        "_has_more",
        "_joined",
        "_sock",
        "_unsent",
        "closed",
        "deferred",
        "events",
        "fd",
        "handshake_timer",
        "has_turn",
        "held_back",
        "name",
        "reader",
        "unsent_bytes",
    )

    def __init__(self, sock: socket.socket, name: str, message_bytes: int, curve: CurveSession | None = None) -> None:
        self._sock = sock
        self._unsent: deque[tuple[memoryview, Bulk | None]] = deque()
        self._joined = bytearray()  # small answers, behind all of `_unsent`
        self._has_more = False  # may have arrived, than was taken
        self.fd = sock.fileno()
        self.name = name
        self.closed = False
        self.events = select.EPOLLIN  # what it is watched for
        self.has_turn = False  # of the message loop, soon
        self.held_back = False  # messages that may be there, until it has taken answers
        self.handshake_timer: Timer | None = None
        self.reader = MessageReader(message_bytes, curve)
        self.deferred = 0  # calls that wait for an answer
        self.unsent_bytes = 0
        self._join(GREETING if curve is None else CURVE_GREETING)

    @property
    def client(self) -> CurveClient | None:
        """Who it has proved to be; None without CURVE, and before the end of the handshake."""
        return self.reader.curve.client if self.reader.curve is not None else None

    def receive(self) -> bool:
        """Takes what has arrived, or some of it. False: the peer has closed the connection."""
        room = self.reader.frame_room
        if room is None:
            data = self._sock.recv(RECEIVE_BYTES)
            self._has_more = len(data) == RECEIVE_BYTES
            if data:
                self.reader.feed(data)
            return bool(data)
        count = self._sock.recv_into(room)
        room.release()
        if count:
            self.reader.frame_received(count)
        return bool(count)

    def next_message(self) -> Message | None:
        """Returns `MessageReader.next`; what the protocol itself answers is queued."""
        message = self.reader.next()
        if message is None and self._has_more and self.reader.is_in_frame:
            # The rest has mostly arrived as well: to wait for it would be one more turn of the message loop.
            self._has_more = False
            with contextlib.suppress(OSError):  # the next turn hears of it
                self.receive()
            message = self.reader.next()
        if self.reader.replies:
            for reply in self.reader.replies:
                self._join(reply)
            self.reader.replies.clear()
        return message

    def queue_answer(self, call_id: bytes, status: bytes, payload: bytes | Bulk) -> None:
        bulk = payload if isinstance(payload, Bulk) else None
        content = payload.payload if isinstance(payload, Bulk) else payload
        if self.reader.curve is not None:
            for frame, flags in ((call_id, MORE), (status, MORE), (content, 0)):
                self._queue_sealed(self.reader.seal(frame, flags))
            if bulk is not None:
                bulk.sent = True  # copied
            return
        head = b"".join(
            (
                frame_head(len(call_id), more=True),
                call_id,
                frame_head(len(status), more=True),
                status,
                frame_head(len(content), more=False),
            )
        )
        self._join(head)
        if len(content) > _JOINED_BYTES:
            self._end_joined()
            self._unsent.append((memoryview(content), bulk))
            self.unsent_bytes += len(content)
            return
        self._join(content)
        if bulk is not None:
            bulk.sent = True

    def _queue_sealed(self, frame: bytearray) -> None:
        if len(frame) <= _JOINED_BYTES:
            self._join(frame)
            return
        self._end_joined()
        self._unsent.append((memoryview(frame), None))
        self.unsent_bytes += len(frame)

    def refuse(self, refused: ProtocolError) -> None:
        """Queues what it is told before its connection ends."""
        self._join(self.reader.refusal(refused))

    def flush(self) -> None:
        """Sends what the network takes."""
        unsent = self._unsent
        while unsent or self._joined:
            if not unsent:
                self._end_joined()
            pieces = [piece for piece, _ in (unsent[index] for index in range(min(len(unsent), _MAX_PIECES)))]
            try:
                count = self._sock.send(pieces[0]) if len(pieces) == 1 else self._sock.sendmsg(pieces)
            except BlockingIOError:
                return
            self.unsent_bytes -= count
            while count:
                piece, bulk = unsent.popleft()
                if count < len(piece):
                    unsent.appendleft((piece[count:], bulk))
                    break
                count -= len(piece)
                if bulk is not None:
                    bulk.sent = True

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        for _, bulk in self._unsent:
            if bulk is not None:
                bulk.sent = True
        self._unsent.clear()
        self._joined = bytearray()
        self.unsent_bytes = 0
        self.reader.close()  # calls that wait for an answer keep this object
        self._sock.close()

    def _join(self, content: bytes | bytearray) -> None:
        self._joined += content
        self.unsent_bytes += len(content)

    def _end_joined(self) -> None:
        if self._joined:
            self._unsent.append((memoryview(self._joined), None))
            self._joined = bytearray()
