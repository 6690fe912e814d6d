"""Messages between peers (docs/formats/peers.md).

A message is a header of 16 bytes and a msgpack array; frames follow the answer to a read, one behind the other. Keys
are pairs, 32 bytes of namespace digest and 32 of chunk hash each. New fields go to the end with a default.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import ProtocolError

PROTOCOL_VERSION = 1
MAGIC = b"LMCP"
HEADER = struct.Struct("<4sHHII")  # magic, kind, zero, number of the request, bytes of the body
NONCE_BYTES = 32
MAX_IDENTITY_BYTES = 4096
MAX_REGION_BYTES = 1 << 18

M = TypeVar("M", bound="Message")

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, Meta(max_length=32)]
PackedIdentity = Annotated[bytes, Meta(max_length=MAX_IDENTITY_BYTES)]
Text = Annotated[str, Meta(max_length=limits.MAX_PEER_TEXT_BYTES)]
Keys = Annotated[bytes, Meta(max_length=CHUNK_HASH_BYTES * limits.MAX_PEER_KEYS)]
ReadKeys = Annotated[bytes, Meta(max_length=CHUNK_HASH_BYTES * limits.MAX_PEER_READ_KEYS)]
Numbers = Annotated[bytes, Meta(max_length=8 * limits.MAX_PEER_KEYS)]  # u64
Lease = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    LOOKUP = 5
    FOUND = 6
    READ = 7
    FRAMES = 8
    RELEASE = 9
    REFUSED = 10
    RENEW = 11
    DESCRIBE = 12
    REGION = 13


class Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Hello(Message, frozen=True, array_like=True):
    """Whoever connects. `nonce` is random; `has_token`: it demands proof of the other side's token, and has one."""

    version: int
    nonce: Nonce
    has_token: bool = False


class Challenge(Message, frozen=True, array_like=True):
    """Answers HELLO. `proof` is b"" without a token."""

    version: int
    nonce: Nonce
    proof: Proof = b""


class Introduction(Message, frozen=True, array_like=True):
    """PROOF and WELCOME: who the sender is (`Identity`, packed), and the proof of it; b"" without a token."""

    identity: PackedIdentity
    proof: Proof = b""


class Lookup(Message, frozen=True, array_like=True):
    """Which of these objects are there, and how large. `lease`: they are to stay until they are read."""

    digests: Keys
    hashes: Keys
    wait_ms: Annotated[int, Meta(ge=0, le=int(1000 * limits.MAX_PEER_WAIT_SECONDS))] = 0
    lease: bool = True


class Found(Message, frozen=True, array_like=True):
    """`sizes`: of each frame, u64; 0 where there is none. `slots`: where it lies in the memory that the identity names,
    u64; they are of use while the lease runs. `lease` 0: nothing is leased."""

    lease: Lease
    sizes: Numbers
    slots: Numbers = b""


class Read(Message, frozen=True, array_like=True):
    """The frames of these objects. `lease` is renewed, if there is one."""

    digests: ReadKeys
    hashes: ReadKeys
    lease: Lease = 0


class Frames(Message, frozen=True, array_like=True):
    """Answers READ: the size of each frame, u64, 0 for one that is not there. The frames follow in that order."""

    sizes: Annotated[bytes, Meta(max_length=8 * limits.MAX_PEER_READ_KEYS)]


class Release(Message, frozen=True, array_like=True):
    """Has no answer."""

    lease: Lease


class Renew(Message, frozen=True, array_like=True):
    """The lease is in use. Has no answer."""

    lease: Lease


class Describe(Message, frozen=True, array_like=True):
    """How the sender's transfer engine, of that name, reaches L1 by itself."""

    engine: Text


class Described(Message, frozen=True, array_like=True):
    """REGION, the answer to DESCRIBE: what the transfer engine of the other side knows. b"": it cannot be reached."""

    region: Annotated[bytes, Meta(max_length=MAX_REGION_BYTES)]


class Refused(Message, frozen=True, array_like=True):
    """Instead of an answer. The connection ends."""

    sentence: Text


def encode(kind: Kind, number: int, message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MAGIC, kind, 0, number, len(body)) + body


def decode_header(header: bytes, most_bytes: int = limits.MAX_PEER_MESSAGE_BYTES) -> tuple[Kind, int, int]:
    """(kind, number of the request, bytes of the body). ProtocolError."""
    magic, kind, zero, number, body_bytes = HEADER.unpack(header)
    if magic != MAGIC or zero:
        raise ProtocolError("it does not speak the protocol of peers")
    if body_bytes > most_bytes:
        raise ProtocolError(f"it sent a message of {body_bytes} bytes, more than {most_bytes}")
    try:
        return Kind(kind), number, body_bytes
    except ValueError:
        raise ProtocolError(f"it sent a message of the unknown kind {kind}") from None


def decode(body: bytes, of: type[M]) -> M:
    """ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=of)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"it sent a {of.__name__} that breaks the protocol ({error})") from None


def check_keys(message: Lookup | Read) -> int:
    """How many keys it has. ProtocolError."""
    count, rest = divmod(len(message.hashes), CHUNK_HASH_BYTES)
    if rest or len(message.digests) != len(message.hashes) or not count:
        raise ProtocolError("it sent keys that are not pairs of 32 bytes each")
    return count
