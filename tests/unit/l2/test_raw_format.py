"""The bytes of docs/formats/raw_block.md, pinned by tests/golden/raw_block_v1.bin."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lmcache import _native
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_format import Entry, Geometry, Superblock
from lmcache.l2.completions import words
from lmcache.testing.frames import FrameMemory
from lmcache.testing.raw_devices import META_BYTES, SLOT_BYTES, RawServer

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "raw_block_v1.bin"
PAGE = 4096

DEVICE = bytes(range(16))
NAMESPACE = Namespace("model", 2, 1, 0, "0123456789abcdef0123456789abcdef", "salt")
KEY = ObjectKey(NAMESPACE, bytes(range(100, 132)))
GEOMETRY = Geometry.plan(SLOT_BYTES, PAGE, META_BYTES)
SUPERBLOCK = Superblock(DEVICE, 7, GEOMETRY, 4096, b"LMCIDX01", 1, 1000)
SLOT, GENERATION, USED_AT = 2, 123_456, 1_700_000_000_000_000
ENTRY = Entry(KEY.chunk_hash, 1, SLOT_BYTES, GENERATION, USED_AT)


def written() -> bytes:
    """Superblock, page 1 of the namespaces, page 0 of the table, and slot 2."""
    entries = raw_format.NO_ENTRY * SLOT + raw_format.pack_entry(ENTRY)
    memory = FrameMemory(1)
    frame, head = memory.fill(0, KEY), memoryview(bytearray(PAGE))
    faults = _native.slot_headers_seal(
        _native.buffer_address(head),
        words([memory.address(0)]),
        words([frame.nbytes]),
        NAMESPACE.digest,
        KEY.chunk_hash,
        DEVICE,
        words([SLOT]),
        words([GENERATION]),
    )
    assert faults == [""]
    return b"".join(
        [
            SUPERBLOCK.encode(),
            raw_format.encode_namespace(1, DEVICE, NAMESPACE.encode(), PAGE),
            raw_format.encode_table_page(0, DEVICE, entries, PAGE),
            bytes(head),
            bytes(frame[PAGE:]),
        ]
    )


def test_what_is_written_is_the_golden_file() -> None:
    assert written() == GOLDEN.read_bytes()


def test_the_golden_file_is_read() -> None:
    golden = GOLDEN.read_bytes()
    pages = [golden[start : start + PAGE] for start in range(0, 4 * PAGE, PAGE)]
    assert raw_format.decode_superblock(pages[0]) == SUPERBLOCK
    assert raw_format.decode_namespace(pages[1], 1, DEVICE) == NAMESPACE.encode()
    entries = raw_format.decode_table_page(pages[2], 0, DEVICE)
    assert entries is not None and list(raw_format.unpack_entries(entries))[SLOT] == (
        KEY.chunk_hash,
        1,
        SLOT_BYTES // 4096,
        GENERATION,
        USED_AT,
    )
    assert _native.slot_header_parse(pages[3])[:5] == (DEVICE, SLOT, GENERATION, NAMESPACE.encode(), KEY.chunk_hash)


def test_places_are_those_of_the_document() -> None:
    golden = GOLDEN.read_bytes()
    assert golden[16:32] == DEVICE and golden[40:48] == SLOT_BYTES.to_bytes(8, "little")
    entry = golden[2 * PAGE + 64 + SLOT * 56 :][:56]
    assert entry[:32] == KEY.chunk_hash and entry[32:36] == b"\x01\0\0\0" and entry[36:40] == b"\x04\0\0\0"
    slot = golden[3 * PAGE :]
    assert slot[:8] == b"LMCSLOT1" and slot[144:160] == DEVICE and slot[160:168] == SLOT.to_bytes(8, "little")
    assert slot[168:176] == GENERATION.to_bytes(8, "little")


def test_pages_of_other_places_are_not_accepted() -> None:
    golden = GOLDEN.read_bytes()
    namespace, table = golden[PAGE : 2 * PAGE], golden[2 * PAGE : 3 * PAGE]
    assert raw_format.decode_namespace(namespace, 2, DEVICE) is None
    assert raw_format.decode_table_page(table, 1, DEVICE) is None
    assert raw_format.decode_table_page(table, 0, bytes(16)) is None
    for position in range(0, PAGE, 13):
        damaged = bytearray(table)
        damaged[position] ^= 4
        assert raw_format.decode_table_page(bytes(damaged), 0, DEVICE) is None
    damaged = bytearray(golden[:PAGE])
    damaged[100] ^= 1
    assert raw_format.decode_superblock(bytes(damaged)) is None


def test_a_device_made_of_the_golden_file(tmp_path: Path) -> None:
    golden = GOLDEN.read_bytes()
    image = bytearray(META_BYTES + 8 * SLOT_BYTES)
    for offset, page in (
        (0, golden[:PAGE]),
        (GEOMETRY.namespace_page_offset(1), golden[PAGE : 2 * PAGE]),
        (GEOMETRY.table_page_offset(0), golden[2 * PAGE : 3 * PAGE]),
        (GEOMETRY.slot_offset(SLOT), golden[3 * PAGE :]),
    ):
        image[offset : offset + len(page)] = page
    path = tmp_path / "device"
    path.write_bytes(image)

    async def test() -> None:
        async with RawServer(path) as server:
            assert server.inventory.objects == {KEY: SLOT_BYTES}
            assert await server.load([KEY]) == [LoadOutcome.LOADED]

    asyncio.run(test())
