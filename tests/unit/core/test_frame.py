from __future__ import annotations

import struct
from pathlib import Path

import pytest
from msgspec.structs import replace

from lmcache import _native
from lmcache.core.frame import (
    FrameHeader,
    frame_bytes,
    header_template,
    may_be_frame_of,
    parse_header,
    verify_frames,
)
from lmcache.core.key import MAX_SERDE_NAME_CHARACTERS, SERDE_MARK, Namespace, ObjectKey, UnnamedNamespace
from lmcache.core.limits import MAX_OBJECT_BYTES
from lmcache.errors import LayoutRefused
from lmcache.testing.frames import FrameMemory, keys, namespace

GOLDEN = Path(__file__).parents[2] / "golden" / "frame_v1.bin"
NAMESPACE = Namespace("golden/model", 2, 1, 0, "0123456789abcdef0123456789abcdef", "tenant")
CHUNK_HASH = bytes(range(100, 132))
PAYLOAD = bytes(range(256)) * 3 + b"a tail of no whole word"


def sealed_frame(
    namespace: Namespace = NAMESPACE, payload: bytes = PAYLOAD, serde: str = "", params: bytes = b""
) -> bytearray:
    frame = bytearray(frame_bytes(len(payload)))
    frame[4096 : 4096 + len(payload)] = payload
    template = header_template(namespace, len(payload), serde, params)
    _native.frame_seal(_native.buffer_address(frame), template, CHUNK_HASH)
    return frame


def verdict(frame: bytes | bytearray, digest: bytes = NAMESPACE.digest, chunk_hash: bytes = CHUNK_HASH) -> str:
    return _native.verify_frames([memoryview(frame)], digest, chunk_hash)[0]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def lane_checksum(payload: bytes) -> bytes:
    """The definition in docs/formats/frame.md, word for word."""
    padded = payload + bytes(-len(payload) % 8)
    words = [padded[at : at + 8] for at in range(0, len(padded), 8)]
    return struct.pack("<4I", *(crc32c(b"".join(words[lane::4])) for lane in range(4)))


def test_frame_is_the_golden_file_byte_for_byte() -> None:
    frame = sealed_frame(serde="zstd", params=b"level=3")
    golden = GOLDEN.read_bytes()
    assert frame == golden
    assert verdict(bytearray(golden)) == ""


def test_offsets_are_the_documented_ones() -> None:
    frame = GOLDEN.read_bytes()
    encoded = NAMESPACE.encode()
    assert frame[:8] == b"LMCFRAME"
    assert struct.unpack_from("<IIQ", frame, 8) == (1, 4096, len(PAYLOAD))
    assert frame[24:40] == lane_checksum(PAYLOAD)
    assert frame[40:72] == CHUNK_HASH
    assert frame[72:104] == NAMESPACE.digest
    assert struct.unpack_from("<II", frame, 104) == (len(encoded), len(b"level=3"))
    assert frame[112:144] == b"zstd".ljust(32, b"\0")
    assert frame[144:256] == bytes(112)
    assert frame[256:2304] == encoded.ljust(2048, b"\0")
    assert frame[2304:4092] == b"level=3".ljust(1788, b"\0")
    assert frame[4092:4096] == struct.pack("<I", crc32c(frame[:4092]))
    assert frame[4096 : 4096 + len(PAYLOAD)] == PAYLOAD
    assert len(frame) == frame_bytes(len(PAYLOAD)) == 8192


def test_parse_gives_back_what_was_sealed() -> None:
    assert parse_header(sealed_frame(serde="fp8", params=b"\x01\x00")) == FrameHeader(
        version=1,
        payload_bytes=len(PAYLOAD),
        namespace=NAMESPACE.encode(),
        namespace_digest=NAMESPACE.digest,
        chunk_hash=CHUNK_HASH,
        serde="fp8",
        serde_params=b"\x01\x00",
        payload_checksum=lane_checksum(PAYLOAD),
    )
    assert Namespace.decode(parse_header(sealed_frame()).namespace) == NAMESPACE


@pytest.mark.parametrize("size", [*range(1, 70), 95, 96, 97, 127, 128, 129, 255, 1000])
def test_payload_checksum_is_the_documented_one(size: int) -> None:
    payload = bytes((7 * at + size) % 256 for at in range(size))
    assert _native.payload_checksum(payload) == lane_checksum(payload)
    target = bytearray(size)
    source = _native.buffer_address(payload)
    assert _native.copy_with_checksum(_native.buffer_address(target), source, size) == lane_checksum(payload)
    assert target == payload


@pytest.mark.parametrize("path", ["", "stream", "memcpy"])
def test_plain_copies_copy(path: str) -> None:
    payload = bytes(at % 251 for at in range(10_000))
    for start, size in [(0, 10_000), (1, 4097), (63, 64), (5, 0), (9, 31)]:
        target = bytearray(10_100)
        _native.copy_plain(_native.buffer_address(target) + 3, _native.buffer_address(payload) + start, size, path)
        assert target == bytes(3) + payload[start : start + size] + bytes(10_097 - size)


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, "magic"),
        (8, "version"),
        (9, "version"),
        (24, "header checksum"),
        (2000, "header checksum"),
        (4095, "header checksum"),
        (4096, "payload checksum"),
        (4096 + len(PAYLOAD) - 1, "payload checksum"),
    ],
)
def test_a_flipped_bit_is_found(at: int, reason: str) -> None:
    for bit in range(8):
        frame = sealed_frame()
        frame[at] ^= 1 << bit
        assert verdict(frame) == reason


def test_padding_behind_the_payload_is_not_looked_at() -> None:
    frame = sealed_frame()
    frame[-1] ^= 1
    assert verdict(frame) == ""


def test_a_frame_of_another_key_or_cut_short_is_found() -> None:
    frame = sealed_frame()
    other = Namespace("golden/model", 2, 1, 0, "0123456789abcdef0123456789abcdef", "other tenant")
    assert verdict(frame, digest=other.digest) == "namespace"
    assert verdict(frame, chunk_hash=bytes(32)) == "chunk hash"
    assert verdict(frame[: 4096 + len(PAYLOAD)]) == ""
    assert verdict(frame[: 4096 + len(PAYLOAD) - 1]) == "length"
    assert verdict(frame[:4095]) == "length"
    assert verdict(frame[:0]) == "length"
    assert verdict(bytearray(8192)) == "magic"


def test_each_frame_is_verified() -> None:
    good, bad = sealed_frame(), sealed_frame()
    bad[5000 - 800] ^= 4
    frames = [good, bad, good]
    wanted = [ObjectKey(NAMESPACE, chunk_hash) for chunk_hash in (CHUNK_HASH, CHUNK_HASH, bytes(32))]
    assert verify_frames(wanted, [memoryview(frame) for frame in frames]) == ["", "payload checksum", "chunk hash"]
    with pytest.raises(ValueError, match="a digest and a hash"):
        verify_frames(wanted[:2], [memoryview(frame) for frame in frames])


def _named(model_name_bytes: int) -> Namespace:
    return Namespace("m" * model_name_bytes, 1, 0, 0, "0" * 32)


def _is_accepted(namespace: Namespace) -> bool:
    try:
        header_template(namespace, 4096)
    except LayoutRefused:
        return False
    return True


def test_what_is_refused() -> None:
    for header in (b"", sealed_frame()[:4095], bytes(4096)):
        with pytest.raises(ValueError, match="header"):
            parse_header(header)
    with pytest.raises(ValueError, match="header checksum"):
        damaged = sealed_frame()
        damaged[300] ^= 1
        parse_header(damaged)
    with pytest.raises(LayoutRefused, match="shorter served model name"):
        header_template(Namespace("m" * 2048, 1, 0, 0, "0" * 32), 4096)
    longest = next(size for size in range(2048, 0, -1) if _is_accepted(_named(size)))
    marked = replace(_named(longest), layout=f"{'0' * 32}{SERDE_MARK}{'s' * MAX_SERDE_NAME_CHARACTERS}")
    header_template(marked, 4096, "s" * MAX_SERDE_NAME_CHARACTERS)  # what any tier makes of it fits, too
    for payload_bytes in (0, MAX_OBJECT_BYTES + 1):
        with pytest.raises(LayoutRefused, match="smaller chunk size"):
            header_template(NAMESPACE, payload_bytes)
    with pytest.raises(ValueError, match="serde"):
        header_template(NAMESPACE, 4096, "x" * 33)
    with pytest.raises(ValueError, match="serde"):
        header_template(NAMESPACE, 4096, "with space")
    with pytest.raises(ValueError, match="serde_params"):
        header_template(NAMESPACE, 4096, "zstd", bytes(1789))
    with pytest.raises(ValueError, match="template"):
        _native.frame_seal(_native.buffer_address(bytearray(8192)), bytes(4096), CHUNK_HASH)


def test_frame_bytes_rounds_up() -> None:
    assert frame_bytes(1) == 8192
    assert frame_bytes(4096) == 8192
    assert frame_bytes(4097) == 12288
    assert frame_bytes(4097, 65536) == 65536


def test_a_header_is_told_from_others_without_its_checksum() -> None:
    mine, other = keys(1)[0], keys(1, seed=1)[0]
    memory = FrameMemory(1)
    frame = memory.fill(0, mine)
    assert may_be_frame_of(mine, frame) and not may_be_frame_of(other, frame)
    assert not may_be_frame_of(ObjectKey(namespace("other"), mine.chunk_hash), frame)
    assert not may_be_frame_of(mine, frame[: memory.slot_bytes - 4096])  # no room for the payload
    frame[:4096] = bytes(4096)
    assert not may_be_frame_of(mine, frame)
    assert not may_be_frame_of(ObjectKey(UnnamedNamespace.of(bytes(32)), bytes(32)), frame)
