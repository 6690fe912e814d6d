"""The client's end of CurveZMQ, step by step, so that a test can do each of them wrong."""

from __future__ import annotations

import struct

from nacl import bindings

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(47)
METADATA = b"\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"


def keypair() -> tuple[bytes, bytes]:
    """(public, secret)"""
    return bindings.crypto_box_keypair()


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    if len(content) > 255:
        return b"\6" + struct.pack(">Q", len(content)) + content
    return bytes([4, len(content)]) + content


class CurveClientEnd:
    def __init__(self, server_public: bytes, keys: tuple[bytes, bytes], *, vouch_secret: bytes = b"") -> None:
        self.server_public = server_public
        self.public, self.secret = keys
        self.vouch_secret = vouch_secret or self.secret
        self.short_public, self.short_secret = keypair()
        self.nonce = 0
        self.key = b""

    def next_nonce(self) -> bytes:
        self.nonce += 1
        return struct.pack(">Q", self.nonce)

    def hello(self) -> bytes:
        nonce = self.next_nonce()
        key = bindings.crypto_box_beforenm(self.server_public, self.short_secret)
        box = bindings.crypto_box_easy_afternm(bytes(64), b"CurveZMQHELLO---" + nonce, key)
        return command(b"HELLO", b"\1\0" + bytes(72) + self.short_public + nonce + box)

    def initiate(self, welcome: bytes, metadata: bytes = METADATA) -> bytes:
        """`welcome`: the whole command of the server."""
        assert welcome[2:10] == b"\7WELCOME"
        body = welcome[10:]
        key = bindings.crypto_box_beforenm(self.server_public, self.short_secret)
        opened = bindings.crypto_box_open_easy_afternm(body[16:], b"WELCOME-" + body[:16], key)
        server_short, cookie = opened[:32], opened[32:]
        self.key = bindings.crypto_box_beforenm(server_short, self.short_secret)
        vouch_key = bindings.crypto_box_beforenm(server_short, self.vouch_secret)
        vouch_nonce = bytes(range(16))
        vouch = bindings.crypto_box_easy_afternm(
            self.short_public + self.server_public, b"VOUCH---" + vouch_nonce, vouch_key
        )
        nonce = self.next_nonce()
        box = bindings.crypto_box_easy_afternm(
            self.public + vouch_nonce + vouch + metadata, b"CurveZMQINITIATE" + nonce, self.key
        )
        return command(b"INITIATE", cookie + nonce + box)

    def message(self, content: bytes, flags: int = 0, nonce: bytes = b"") -> bytes:
        nonce = nonce or self.next_nonce()
        box = bindings.crypto_box_easy_afternm(bytes([flags]) + content, b"CurveZMQMESSAGEC" + nonce, self.key)
        frame = b"\7MESSAGE" + nonce + box
        if len(frame) > 255:
            return b"\2" + struct.pack(">Q", len(frame)) + frame
        return bytes([0, len(frame)]) + frame

    def call(self, *frames: bytes) -> bytes:
        return b"".join(self.message(frame, int(number + 1 < len(frames))) for number, frame in enumerate(frames))
