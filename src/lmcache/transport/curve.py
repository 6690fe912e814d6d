"""CurveZMQ (ZeroMQ RFC 26) as the server of one connection speaks it (docs/formats/wire.md).

The keys of a connection are new with each of them, so nothing that was recorded means anything in another one. Short
nonces count by one from the handshake on: what was repeated, left out or reordered ends the connection.

Boxes are libsodium's crypto_box (X25519, XSalsa20, Poly1305) by PyNaCl. Its bindings copy twice and fill with zeros;
frames are sealed and opened in place by the functions below them, which takes a third of the time.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable

from nacl import bindings
from nacl._sodium import ffi, lib
from nacl.exceptions import CryptoError

from lmcache.errors import ProtocolError
from lmcache.transport.curve_clients import CurveAccess, CurveClient

Payload = bytes | memoryview

_MAC_BYTES = 16
_HEADER = b"\7MESSAGE"
_HEAD_BYTES = len(_HEADER) + 8
OVERHEAD_BYTES = _HEAD_BYTES + _MAC_BYTES + 1  # of a frame
_HELLO_BYTES = 194
_COOKIE_BYTES = 96
_INITIATE_BYTES = _COOKIE_BYTES + 8 + _MAC_BYTES + 32 + 96
_nonce = struct.Struct(">Q")
_REFUSED = b"\x03400"  # as ZAP's status: libzmq tells its application that authentication failed


class ClientRefused(ProtocolError):
    """The client proved nothing that lets it in. `answer`: what it is told before the connection ends."""

    def __init__(self, sentence: str, answer: tuple[bytes, bytes] | None = None) -> None:
        super().__init__(sentence)
        self.answer = answer


class CurveSession:
    """The state of one connection. ProtocolError: it has to end."""

    __slots__ = (
        "_access",
        "_cookie",
        "_key",
        "_own_nonce",
        "_peer_nonce",
        "_random",
        "_short",
        "_step",
        "client",
        "metadata",
    )

    def __init__(self, access: Callable[[], CurveAccess], random_bytes: Callable[[int], bytes]) -> None:
        """`access`: what is in force now."""
        self.client: CurveClient | None = None  # who it is, when the handshake is done
        self.metadata = b""
        self._access = access
        self._random = random_bytes
        self._step = b"HELLO"
        self._cookie = b""
        self._short = b"", b"", b""  # client's public, own secret, server's long-term public
        self._key = b""
        self._peer_nonce = self._own_nonce = 0  # the last ones

    # ---- handshake ---------------------------------------------------------------------------------------------------
    def obey(self, name: bytes, body: bytes) -> tuple[bytes, bytes]:
        """A command of the handshake: the command that answers it."""
        if name != self._step:
            raise ClientRefused("a command of the CURVE handshake is out of order")
        try:
            return self._welcome(body) if name == b"HELLO" else self._ready(body)
        except CryptoError:
            raise ClientRefused(f"the CURVE {name.decode()} was not made with the keys that it must be") from None

    def _welcome(self, body: bytes) -> tuple[bytes, bytes]:
        if len(body) != _HELLO_BYTES or body[:2] != b"\1\0":
            raise ClientRefused("the CURVE HELLO is not one of version 1")
        access = self._access()
        client_short, nonce, box = body[74:106], body[106:114], body[114:]
        key = bindings.crypto_box_beforenm(client_short, access.server_secret)
        bindings.crypto_box_open_easy_afternm(box, b"CurveZMQHELLO---" + nonce, key)
        own_secret = self._random(32)
        self._cookie = self._random(_COOKIE_BYTES)
        self._short = client_short, own_secret, access.server_public
        self._peer_nonce = _nonce.unpack(nonce)[0]
        self._step = b"INITIATE"
        long_nonce = self._random(16)
        content = bindings.crypto_scalarmult_base(own_secret) + self._cookie
        sealed = bindings.crypto_box_easy_afternm(content, b"WELCOME-" + long_nonce, key)
        return b"WELCOME", long_nonce + sealed

    def _ready(self, body: bytes) -> tuple[bytes, bytes]:
        if len(body) < _INITIATE_BYTES or not hmac.compare_digest(body[:_COOKIE_BYTES], self._cookie):
            raise ClientRefused("the CURVE INITIATE does not answer this server's WELCOME")
        client_short, own_secret, server_public = self._short
        nonce = body[_COOKIE_BYTES : _COOKIE_BYTES + 8]
        self._take_nonce(nonce)
        key = bindings.crypto_box_beforenm(client_short, own_secret)
        opened = bindings.crypto_box_open_easy_afternm(body[_COOKIE_BYTES + 8 :], b"CurveZMQINITIATE" + nonce, key)
        public_key, vouch_nonce, vouch = opened[:32], opened[32:48], opened[48:128]
        client = self._access().clients.get(public_key)
        if client is None:
            raise ClientRefused("the key of the client is not in --zmq-curve-client-keys-dir", (b"ERROR", _REFUSED))
        vouch_key = bindings.crypto_box_beforenm(public_key, own_secret)
        vouched = bindings.crypto_box_open_easy_afternm(vouch, b"VOUCH---" + vouch_nonce, vouch_key)
        if not hmac.compare_digest(vouched, client_short + server_public):
            raise ClientRefused("the client does not have the secret key of the public key that it shows")
        self.client, self.metadata, self._key, self._step = client, opened[128:], key, b""
        self._cookie, self._short = b"", (b"", b"", b"")
        own_nonce = self._next_nonce()
        metadata = b"\x0bSocket-Type\0\0\0\6ROUTER"
        return b"READY", own_nonce + bindings.crypto_box_easy_afternm(metadata, b"CurveZMQREADY---" + own_nonce, key)

    # ---- frames ------------------------------------------------------------------------------------------------------
    def open(self, frame: Payload) -> tuple[int, memoryview]:
        """(flags, content) of what is inside a MESSAGE. A frame that is writable is overwritten."""
        if len(frame) < OVERHEAD_BYTES or frame[: len(_HEADER)] != _HEADER:
            raise ProtocolError("what arrives is no MESSAGE of CURVE")
        nonce = bytes(frame[len(_HEADER) : _HEAD_BYTES])
        self._take_nonce(nonce)
        room = frame if isinstance(frame, memoryview) and not frame.readonly else memoryview(bytearray(frame))
        at = ffi.from_buffer("unsigned char[]", room) + _HEAD_BYTES
        size_bytes = len(room) - _HEAD_BYTES
        if lib.crypto_box_open_easy_afternm(at + _MAC_BYTES, at, size_bytes, b"CurveZMQMESSAGEC" + nonce, self._key):
            raise ProtocolError("a MESSAGE of CURVE is not of this connection's client")
        return room[OVERHEAD_BYTES - 1], room[OVERHEAD_BYTES:]

    def seal(self, content: Payload | bytearray, flags: int, head: Callable[[int], bytes]) -> bytearray:
        """The whole frame. `head` gives what precedes one of so many bytes."""
        nonce = self._next_nonce()
        size_bytes = OVERHEAD_BYTES + len(content)
        sealed = bytearray(head(size_bytes)) + _HEADER + nonce
        at = len(sealed)
        sealed += bytes(_MAC_BYTES)
        sealed.append(flags)
        sealed += content
        place = ffi.from_buffer("unsigned char[]", sealed) + at
        lib.crypto_box_easy_afternm(place, place + _MAC_BYTES, 1 + len(content), b"CurveZMQMESSAGES" + nonce, self._key)
        return sealed

    def _next_nonce(self) -> bytes:
        self._own_nonce += 1
        return _nonce.pack(self._own_nonce)

    def _take_nonce(self, nonce: bytes) -> None:
        value = _nonce.unpack(nonce)[0]
        if value != self._peer_nonce + 1:
            raise ProtocolError("a nonce of CURVE is not the next one: something was repeated, left out or reordered")
        self._peer_nonce = value
