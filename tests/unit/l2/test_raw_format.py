"""The bytes of docs/formats/raw_block.md, pinned by tests/golden/raw_block_v1.bin."""

from __future__ import annotations

import asyncio
import mmap
from array import array
from pathlib import Path

from lmcache import _native
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_format import Geometry, Superblock
from lmcache.testing.frames import FrameMemory, keys
from support.raw_devices import META_BYTES, SLOT_BYTES, RawServer

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "raw_block_v1.bin"
PAGE = 4096

DEVICE = bytes(range(16))
NAMESPACE = Namespace("model", 2, 1, 0, "0123456789abcdef0123456789abcdef", "salt")
KEY = ObjectKey(NAMESPACE, bytes(range(100, 132)))
GEOMETRY = Geometry.plan(SLOT_BYTES, PAGE, META_BYTES)
SUPERBLOCK = Superblock(DEVICE, 7, GEOMETRY, 4096, b"LMCIDX01", 1, 1000)
SLOT, GENERATION, USED_AT = 2, 123_456, 1_700_000_000_000_000
SLOTS = 100  # two pages of the table


def native_index(first_generation: int, device: bytes = DEVICE) -> tuple[_native.RawIndex, int]:
    """And the id of the namespace, whose page on the device is the first."""
    index = _native.RawIndex(SLOTS, SLOT_BYTES, SLOT_BYTES, GEOMETRY.slot_offset(0), PAGE, first_generation, device)
    return index, index.intern(NAMESPACE.digest, 1)


def index_of(page: bytes, number: int = 0, device: bytes = DEVICE) -> _native.RawIndex:
    """What a page of the table tells."""
    index, space = native_index(1000, device)
    index.load_pages(number, page, array("I", [raw_format.UNNAMED, space]), False)
    return index


def written(path: Path) -> bytes:
    """Superblock, page 1 of the namespaces, page 0 of the table, and slot 2 of a device, by those that write them."""
    index, space = native_index(GENERATION - SLOT)
    index.finish_recovery(0)
    wanted = [*keys(SLOT, of=NAMESPACE), KEY]
    memory = FrameMemory(len(wanted))
    spaces, hashes = array("I", [space] * len(wanted)), b"".join(key.chunk_hash for key in wanted)
    heads = mmap.mmap(-1, len(wanted) * PAGE)
    with path.open("w+b") as file:
        io = _native.DeviceIO(file.fileno(), 1, 0, 1)
        buffers = [memory.fill(slot, key) for slot, key in enumerate(wanted)]
        batch, _ = index.begin_store(io, spaces, hashes, buffers, _native.buffer_address(heads))
        io.close()
        ((_, _, errors),) = io.drain()
        codes, pages = index.end_store(batch, errors, USED_AT + SLOT)
        assert list(codes) == [1] * len(wanted) and list(pages) == [0]
        file.seek(GEOMETRY.slot_offset(SLOT))
        slot = file.read(SLOT_BYTES)
    others = memoryview(spaces)[:SLOT], hashes[: 32 * SLOT]
    index.release_slots(index.remove(*others))
    with path.open("w+b") as file:
        io = _native.DeviceIO(file.fileno(), 1, 0, 1)
        slots, _ = index.begin_erase(io, 0, SLOT, _native.buffer_address(heads))
        io.close()
        index.end_erase(slots, io.drain()[0][2])
    return b"".join(
        [
            SUPERBLOCK.encode(),
            raw_format.encode_namespace(1, DEVICE, NAMESPACE.encode(), PAGE),
            index.page_image(0),
            slot,
        ]
    )


def test_what_is_written_is_the_golden_file(tmp_path: Path) -> None:
    assert written(tmp_path / "device") == GOLDEN.read_bytes()


def test_the_golden_file_is_read() -> None:
    golden = GOLDEN.read_bytes()
    pages = [golden[start : start + PAGE] for start in range(0, 4 * PAGE, PAGE)]
    assert raw_format.decode_superblock(pages[0]) == SUPERBLOCK
    assert raw_format.decode_namespace(pages[1], 1, DEVICE) == NAMESPACE.encode()
    index = index_of(pages[2])
    assert index.claimed_from(0, SLOTS) == (array("I", [SLOT]), array("Q", [GENERATION]))
    _, hashes, sizes = index.describe(array("I", [SLOT]))
    assert hashes == KEY.chunk_hash and list(sizes) == [SLOT_BYTES]
    assert index.page_image(0) == pages[2]  # the time of use too
    header = _native.slot_header_parse(pages[3])
    assert (header.device, header.slot, header.generation) == (DEVICE, SLOT, GENERATION)
    assert (header.namespace, header.chunk_hash) == (NAMESPACE.encode(), KEY.chunk_hash)


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
    for index in (index_of(table, number=1), index_of(table, device=bytes(16))):
        assert index.objects == 0 and index.slots_to_scan()
    for position in range(0, PAGE, 13):
        damaged = bytearray(table)
        damaged[position] ^= 4
        index = index_of(bytes(damaged))
        assert index.objects == 0 and SLOT in index.slots_to_scan()
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
