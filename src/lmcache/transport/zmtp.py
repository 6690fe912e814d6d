"""ZMTP 3.1 as a server needs it (docs/formats/wire.md): bytes of one connection in, whole messages out.

libzmq's own socket cannot be used here: it collects the frames of a message in its memory until the last one has come,
however many there are. This reader holds one message at most, and of a large frame only what has arrived.
"""

from __future__ import annotations

import mmap
import struct

from lmcache.core.limits import MIB
from lmcache.errors import ProtocolError
from lmcache.transport.wire import CALL_FRAMES

GREETING_BYTES = 64
RECEIVE_BYTES = 64 * 1024  # at a time; larger frames arrive where they will lie
MAX_FRAMES = 64  # of a message that is then dropped; beyond, the connection ends
_MAX_COMMAND_BYTES = 512
_FROM_HEAP_BYTES = (
    MIB + 64 * 1024
)  # larger frames lie in memory of their own, of which nothing is taken before it is used

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES = 10
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")
_long_size = struct.Struct(">Q")

Payload = bytes | memoryview
Message = list[Payload]
NO_MESSAGE: Message = []  # a command was read instead; it counts as one, so that many do not make a turn long
_OBEYED: Payload = memoryview(b"")


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + _NULL + bytes(32)
READY = _command(b"READY", b"\x0bSocket-Type\0\0\0\6ROUTER")
_CLIENT_SOCKETS = (b"DEALER", b"REQ", b"ROUTER")


def frame_head(size_bytes: int, *, more: bool) -> bytes:
    if size_bytes < 256:
        return bytes([more, size_bytes])
    return bytes([_LONG | more]) + _long_size.pack(size_bytes)


class MessageReader:
    """Not thread-safe. ProtocolError from `next`: nothing more can be read from this connection."""

    def __init__(self, message_bytes: int) -> None:
        self.established = False
        self.replies: list[bytes] = []  # to be sent: what the handshake and heartbeats ask for
        self._message_bytes = message_bytes
        self._data = b""  # arrived, from `_at` on not yet looked at
        self._at = 0
        self._greeted = False
        self._frames: Message = []
        self._frame_count = 0
        self._size_bytes = 0  # of the message so far
        self._body: bytearray | mmap.mmap | None = None  # of a frame that is larger than what was received at once
        self._filled = 0
        self._more = False

    # ---- receiving ---------------------------------------------------------------------------------------------------
    @property
    def body_room(self) -> memoryview | None:
        """Where the next bytes belong; None when they are to be given to `feed`."""
        return memoryview(self._body)[self._filled :] if self._body is not None else None

    def body_received(self, count: int) -> None:
        """So many bytes were written to `body_room`, which is given up."""
        self._filled += count

    def feed(self, data: bytes) -> None:
        """What has arrived."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def close(self) -> None:
        """Nothing more is received: lets go what has arrived."""
        self._data, self._at, self._body, self._frames = b"", 0, None, []

    @property
    def unfinished_bytes(self) -> int:
        """Memory that waits for the rest of a message, after `next` has returned None."""
        body = self._body
        missing = 0 if body is None or isinstance(body, bytearray) else len(body) - self._filled
        return self._size_bytes - missing + len(self._data)

    # ---- messages ----------------------------------------------------------------------------------------------------
    def next(self) -> Message | None:
        """The frames of a whole message, [] for one that is no call, NO_MESSAGE itself after a command, or None when
        more has to arrive."""
        if not self._greeted and not self._read_greeting():
            return None
        while True:
            if self._body is not None:
                if self._filled < len(self._body):
                    return None
                frame: Payload = memoryview(self._body)
                self._body = None
            else:
                taken = self._take_frame()
                if taken is None:
                    self._data, self._at = self._data[self._at :], 0
                    return None
                if taken is _OBEYED:
                    return NO_MESSAGE
                frame = taken
                if self._body is not None:
                    continue
            if self._frame_count < CALL_FRAMES:
                self._frames.append(frame)
            self._frame_count += 1
            if self._frame_count > MAX_FRAMES:
                raise ProtocolError(f"a message of more than {MAX_FRAMES} frames")
            if not self._more:
                frames = self._frames if self._frame_count == CALL_FRAMES else []
                self._frames, self._frame_count, self._size_bytes = [], 0, 0
                return frames

    def _take_frame(self) -> Payload | None:
        """The next frame if all of it is there, _OBEYED after a command. Of a large one the rest goes to `_body`."""
        data, at = self._data, self._at
        left = len(data) - at
        if left < 2:
            return None
        flags, size, head = data[at], data[at + 1], 2
        if flags & _LONG:
            if left < 9:
                return None
            size, head = _long_size.unpack_from(data, at + 1)[0], 9
        if flags > 7 or (flags & _COMMAND and (flags & _MORE or size > _MAX_COMMAND_BYTES)):
            raise ProtocolError("what arrives is no frame of ZMTP")
        if not flags & _COMMAND and self._size_bytes + size > self._message_bytes:
            raise ProtocolError(f"a message of more than {self._message_bytes} bytes")
        if size > left - head:
            if size <= RECEIVE_BYTES:
                return None
            self._begin_body(data[at + head :], size)
            self._more = bool(flags & _MORE)
            self._data, self._at = b"", 0
            return b""
        self._at = at + head + size
        content = data[at + head : self._at]
        if flags & _COMMAND:
            self._obey(content)
            return _OBEYED
        if not self.established:
            raise ProtocolError("a message before the handshake")
        self._size_bytes += size
        self._more = bool(flags & _MORE)
        return content

    def _begin_body(self, beginning: bytes, size: int) -> None:
        if not self.established:
            raise ProtocolError("a message before the handshake")
        try:
            self._body = bytearray(size) if size <= _FROM_HEAP_BYTES else mmap.mmap(-1, size)
        except (OSError, MemoryError):
            raise ProtocolError(f"there is no memory for a frame of {size} bytes") from None
        self._body[: len(beginning)] = beginning
        self._filled = len(beginning)
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
        if greeting[_MECHANISM] != _NULL:
            raise ProtocolError(f"the client asks for the mechanism {greeting[_MECHANISM].rstrip(bytes(1))!r}")
        self._greeted = True
        self._at = GREETING_BYTES
        return True

    def _obey(self, command: bytes) -> None:
        name_end = 1 + command[0] if command else 0
        name, body = command[1:name_end], command[name_end:]
        if not self.established:
            if name != b"READY" or _property(body, b"socket-type") not in _CLIENT_SOCKETS:
                raise ProtocolError("the handshake is not that of a client")
            self.established = True
            self.replies.append(READY)
        elif name == b"PING" and len(body) >= 2:
            self.replies.append(_command(b"PONG", body[2:18]))


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
