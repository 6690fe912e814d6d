"""ZMTP 3.1 as a server needs it (docs/formats/wire.md): bytes of one connection in, whole messages out.

libzmq's own socket cannot be used here: it collects the frames of a message in its memory until the last one has come,
however many there are. This reader holds one message at most, and of a large frame only what has arrived.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from lmcache.core.limits import MIB
from lmcache.errors import ProtocolError
from lmcache.transport.wire import CALL_FRAMES

if TYPE_CHECKING:
    from lmcache.transport.curve import CurveSession

GREETING_BYTES = 64
RECEIVE_BYTES = 64 * 1024  # at a time; larger frames arrive where they will lie
MAX_FRAMES = 64  # of a message that is then dropped; beyond, the connection ends
_MAX_COMMAND_BYTES = 512
_FROM_HEAP_BYTES = (
    MIB + 64 * 1024
)  # larger frames lie in memory of their own, of which nothing is taken before it is used

MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES = 10
_MECHANISM = slice(12, 32)
_NULL, _CURVE = b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0")
_CURVE_COMMAND_BYTES = 1024  # of the handshake: an INITIATE of 257 bytes and metadata
_CURVE_OVERHEAD_BYTES = 33  # of each frame
_SEALED_COMMAND = 2  # the flags inside a MESSAGE are other ones: 1 for more, 2 for a command
_long_size = struct.Struct(">Q")

Payload = bytes | memoryview
Message = list[Payload]
NO_MESSAGE: Message = []  # a command was read instead; it counts as one, so that many do not make a turn long
_OBEYED: Payload = memoryview(b"")


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


_SIGNATURE = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1"
GREETING = _SIGNATURE + _NULL + bytes(32)
CURVE_GREETING = _SIGNATURE + _CURVE + b"\1" + bytes(31)  # as a server
READY = _command(b"READY", b"\x0bSocket-Type\0\0\0\6ROUTER")
_CLIENT_SOCKETS = (b"DEALER", b"REQ", b"ROUTER")


def frame_head(size_bytes: int, *, more: bool) -> bytes:
    if size_bytes < 256:
        return bytes([more, size_bytes])
    return bytes([_LONG | more]) + _long_size.pack(size_bytes)


class MessageReader:
    """Not thread-safe. ProtocolError from `next`: nothing more can be read from this connection."""

    def __init__(self, message_bytes: int, curve: CurveSession | None = None) -> None:
        """`curve`: what proves who the client is and opens its frames; None for the mechanism NULL."""
        self.curve = curve
        self.established = False
        self.replies: list[bytes] = []  # to be sent: what the handshake and heartbeats ask for
        self._message_bytes = message_bytes + (CALL_FRAMES * _CURVE_OVERHEAD_BYTES if curve is not None else 0)
        self._data = b""  # arrived, from `_at` on not yet looked at
        self._at = 0
        self._greeted = False
        self._frames: Message = []
        self._frame_count = 0
        self._size_bytes = 0  # of the message so far
        self._large_frame: bytearray | mmap.mmap | None = None  # larger than what was received at once
        self._filled = 0
        self._more = False
        self._forbidden_flags = ~7
        self._command_bytes = _MAX_COMMAND_BYTES if curve is None else _CURVE_COMMAND_BYTES

    # ---- receiving ---------------------------------------------------------------------------------------------------
    @property
    def is_in_frame(self) -> bool:
        """What arrives next goes to `frame_room`."""
        return self._large_frame is not None

    @property
    def frame_room(self) -> memoryview | None:
        """Where the next bytes belong; None when they are to be given to `feed`."""
        return memoryview(self._large_frame)[self._filled :] if self._large_frame is not None else None

    def frame_received(self, count: int) -> None:
        """So many bytes were written to `frame_room`, which is given up."""
        self._filled += count

    def feed(self, data: bytes) -> None:
        """What has arrived."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def close(self) -> None:
        """Nothing more is received: lets go what has arrived."""
        self._data, self._at, self._large_frame, self._frames = b"", 0, None, []

    @property
    def unfinished_bytes(self) -> int:
        """Memory that waits for the rest of a message, after `next` has returned None."""
        frame = self._large_frame
        missing = 0 if frame is None or isinstance(frame, bytearray) else len(frame) - self._filled
        return self._size_bytes - missing + len(self._data)

    # ---- messages ----------------------------------------------------------------------------------------------------
    def next(self) -> Message | None:
        """The frames of a whole message, [] for one that is no call, NO_MESSAGE itself after a command, or None when
        more has to arrive."""
        if not self._greeted and not self._read_greeting():
            return None
        while True:
            frame = self._next_frame()
            if frame is None:
                return None
            if frame is _OBEYED:
                return NO_MESSAGE
            if self.curve is not None:
                sealed_bytes = len(frame)
                flags, frame = self.curve.open(frame)
                if flags not in (0, MORE, _SEALED_COMMAND) or (
                    flags == _SEALED_COMMAND and len(frame) > _MAX_COMMAND_BYTES
                ):
                    raise ProtocolError("what arrives is no frame of ZMTP")
                if flags == _SEALED_COMMAND:
                    self._size_bytes -= sealed_bytes  # no part of the message
                    self._obey(bytes(frame))
                    return NO_MESSAGE
                self._more = bool(flags)
            if self._frame_count < CALL_FRAMES:
                self._frames.append(frame)
            self._frame_count += 1
            if self._frame_count > MAX_FRAMES:
                raise ProtocolError(f"a message of more than {MAX_FRAMES} frames")
            if not self._more:
                frames = self._frames if self._frame_count == CALL_FRAMES else []
                self._frames, self._frame_count, self._size_bytes = [], 0, 0
                return frames

    def _next_frame(self) -> Payload | None:
        """The next frame if all of it is there, _OBEYED after a command."""
        if self._large_frame is None:
            frame = self._take_frame()
            if frame is None:
                self._data, self._at = self._data[self._at :], 0
            if self._large_frame is None:
                return frame
        if self._filled < len(self._large_frame):
            return None
        large_frame, self._large_frame = self._large_frame, None
        return memoryview(large_frame)

    def _take_frame(self) -> Payload | None:
        """The next frame of what arrived, _OBEYED after a command. Of a large one the rest goes to `_large_frame`."""
        data, at = self._data, self._at
        left = len(data) - at
        if left < 2:
            return None
        flags, size, head = data[at], data[at + 1], 2
        if flags & _LONG:
            if left < 9:
                return None
            size, head = _long_size.unpack_from(data, at + 1)[0], 9
        if flags & self._forbidden_flags or (flags & _COMMAND and (flags & MORE or size > self._command_bytes)):
            raise ProtocolError("what arrives is no frame of ZMTP")
        if not flags & _COMMAND and self._size_bytes + size > self._message_bytes:
            raise ProtocolError(f"a message of more than {self._message_bytes} bytes")
        if size > left - head:
            if size <= RECEIVE_BYTES:
                return None
            self._begin_frame(data[at + head :], size)
            self._more = bool(flags & MORE)
            self._data, self._at = b"", 0
            return b""
        self._at = at + head + size
        frame = data[at + head : self._at]
        if flags & _COMMAND:
            self._obey(frame)
            return _OBEYED
        if not self.established:
            raise ProtocolError("a message before the handshake")
        self._size_bytes += size
        self._more = bool(flags & MORE)
        return frame

    def _begin_frame(self, frame: bytes, size: int) -> None:
        """`frame`: as much of it as has arrived."""
        if not self.established:
            raise ProtocolError("a message before the handshake")
        try:
            self._large_frame = bytearray(size) if size <= _FROM_HEAP_BYTES else mmap.mmap(-1, size)
        except (OSError, MemoryError):
            raise ProtocolError(f"there is no memory for a frame of {size} bytes") from None
        self._large_frame[: len(frame)] = frame
        self._filled = len(frame)
        self._size_bytes += size

    # ---- handshake ---------------------------------------------------------------------------------------------------
    def _read_greeting(self) -> bool:
        """Whether all of it is there."""
        greeting = self._data[:GREETING_BYTES]
        if greeting[:1] not in (b"", b"\xff") or (len(greeting) >= _SIGNATURE_BYTES and not greeting[9] & 1):
            raise ProtocolError("what connects does not speak ZMTP")
        if len(greeting) > _SIGNATURE_BYTES and greeting[_SIGNATURE_BYTES] < 3:
            raise ProtocolError("the client speaks a version of ZMTP before 3")
        if len(greeting) < GREETING_BYTES:
            return False
        if greeting[_MECHANISM] != (_NULL if self.curve is None else _CURVE):
            asked, spoken = greeting[_MECHANISM].rstrip(bytes(1)), "NULL" if self.curve is None else "CURVE"
            raise ProtocolError(f"the client asks for the mechanism {asked!r}; this server speaks {spoken}")
        self._greeted = True
        self._at = GREETING_BYTES
        return True

    def _obey(self, command: bytes) -> None:
        name_end = 1 + command[0] if command else 0
        name, body = command[1:name_end], command[name_end:]
        if not self.established:
            self._shake_hands(name, body)
        elif name == b"PING" and len(body) >= 2:
            pong = _command(b"PONG", body[2:18])
            self.replies.append(pong if self.curve is None else bytes(self.seal(pong[2:], _SEALED_COMMAND)))

    def _shake_hands(self, name: bytes, body: bytes) -> None:
        reply, metadata = READY, body
        if self.curve is not None:
            reply, metadata = _command(*self.curve.obey(name, body)), self.curve.metadata
            if self.curve.client is None:  # half of it is done
                self.replies.append(reply)
                return
            self._forbidden_flags |= MORE | _COMMAND  # of what is outside; within, frames have flags of their own
        elif name != b"READY":
            metadata = b""
        if _property(metadata, b"socket-type") not in _CLIENT_SOCKETS:
            raise ProtocolError("the handshake is not that of a client")
        self.established = True
        self.replies.append(reply)

    def refusal(self, refused: ProtocolError) -> bytes:
        """What the client is told before the connection ends, if anything."""
        answer: tuple[bytes, bytes] | None = getattr(refused, "answer", None)
        return _command(*answer) if answer is not None else b""

    def seal(self, content: Payload | bytearray, flags: int) -> bytearray:
        """A whole frame, as the client opens it. Only after the handshake of CURVE."""
        assert self.curve is not None
        return self.curve.seal(content, flags, lambda size_bytes: frame_head(size_bytes, more=False))


def _property(metadata: bytes, wanted: bytes) -> bytes:
    """[length][name][length, 4 bytes][value] ...; b"" when it is not there or not readable."""
    while metadata:
        name_end = 1 + metadata[0]
        value_at = name_end + 4
        value_end = value_at + int.from_bytes(metadata[name_end:value_at], "big")
        if value_end > len(metadata):
            return b""
        if metadata[1:name_end].lower() == wanted:
            return metadata[value_at:value_end]
        metadata = metadata[value_end:]
    return b""
