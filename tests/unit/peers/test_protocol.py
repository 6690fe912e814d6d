"""The messages of peers, byte by byte (docs/formats/peers.md)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from lmcache.core import limits
from lmcache.errors import ProtocolError
from lmcache.peers.identity import Identity
from lmcache.peers.protocol import (
    HEADER,
    MAGIC,
    Challenge,
    Describe,
    Described,
    Found,
    Frames,
    Hello,
    Introduction,
    Kind,
    Lookup,
    Message,
    Read,
    Refused,
    Release,
    Renew,
    check_keys,
    decode,
    decode_header,
    encode,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "peers_v1.json"
IDENTITY = Identity(
    bytes(range(16)), "10.0.0.1:9500", 256, "blake3", bytes(range(32)), 1, "/dev/shm/lmcache-5555", 1 << 30, "nixl"
)
NONCE, PROOF, KEY = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
SIZES = (16384).to_bytes(8, "little") + bytes(8)
EXAMPLES: dict[str, tuple[Kind, int, Message]] = {
    "hello": (Kind.HELLO, 0, Hello(1, NONCE, True)),
    "challenge": (Kind.CHALLENGE, 0, Challenge(1, NONCE, PROOF)),
    "proof": (Kind.PROOF, 0, Introduction(IDENTITY.pack(), PROOF)),
    "welcome": (Kind.WELCOME, 0, Introduction(IDENTITY.pack(), PROOF)),
    "lookup": (Kind.LOOKUP, 7, Lookup(KEY * 2, NONCE + PROOF, 250, True)),
    "found": (Kind.FOUND, 7, Found(3, SIZES, SIZES)),
    "read": (Kind.READ, 8, Read(KEY * 2, NONCE + PROOF, 3)),
    "frames": (Kind.FRAMES, 8, Frames(SIZES)),
    "release": (Kind.RELEASE, 9, Release(3)),
    "renew": (Kind.RENEW, 10, Renew(3)),
    "describe": (Kind.DESCRIBE, 11, Describe("nixl")),
    "region": (Kind.REGION, 11, Described(NONCE)),
    "refused": (Kind.REFUSED, 0, Refused("the servers have --chunk-size 128 and 256: give both the same")),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_have_their_bytes(name: str) -> None:
    kind, number, message = EXAMPLES[name]
    encoded = bytes.fromhex(json.loads(GOLDEN.read_text())[name])
    assert encode(kind, number, message) == encoded
    assert decode_header(encoded[: HEADER.size]) == (kind, number, len(encoded) - HEADER.size)
    assert decode(encoded[HEADER.size :], type(message)) == message


def test_an_identity_is_read_as_it_was_packed() -> None:
    assert Identity.unpack(IDENTITY.pack()) == IDENTITY


def test_an_identity_of_an_earlier_version_has_the_defaults_of_later_fields() -> None:
    fields = msgspec.msgpack.decode(IDENTITY.pack())
    earlier = Identity.unpack(msgspec.msgpack.encode(fields[:-1]))
    assert earlier == msgspec.structs.replace(IDENTITY, transfer_engine="")


@pytest.mark.parametrize(
    "broken",
    [
        Identity(b"short", "a", 256, "blake3", bytes(32)),
        Identity(bytes(16), "a", 256, "blake3", bytes(31)),
        Identity(bytes(16), "a" * 1000, 256, "blake3", bytes(32)),
        Identity(bytes(16), "a", 256, "blake3", bytes(32), shm_bytes=-1),
    ],
)
def test_an_identity_that_cannot_be_is_refused(broken: Identity) -> None:
    with pytest.raises(ProtocolError):
        Identity.unpack(broken.pack())


def test_later_versions_may_add_fields() -> None:
    with_more = b"\x93\x01\x02\x03"  # an array of three
    assert decode(with_more, Release) == Release(1)


NESTED = b"\x91" * 100_000 + b"\x00"


def test_a_trailing_element_that_nests_deep_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x92\xc4\x00" + NESTED, Frames)
    with pytest.raises(ProtocolError):
        Identity.unpack(b"\x99" + IDENTITY.pack()[1:] + NESTED)


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(b"LMCQ", 1, 0, 0, 0),
        HEADER.pack(MAGIC, 1, 1, 0, 0),
        HEADER.pack(MAGIC, 200, 0, 0, 0),
        HEADER.pack(MAGIC, 1, 0, 0, limits.MAX_PEER_MESSAGE_BYTES + 1),
    ],
)
def test_headers_that_break_the_protocol(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(header)


@pytest.mark.parametrize("lookup", [Lookup(b"", b""), Lookup(bytes(32), bytes(64)), Lookup(bytes(33), bytes(33))])
def test_keys_that_are_no_pairs(lookup: Lookup) -> None:
    with pytest.raises(ProtocolError):
        check_keys(lookup)
