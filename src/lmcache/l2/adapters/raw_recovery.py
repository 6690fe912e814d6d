"""What a raw device holds when it is opened: from its table, and from slot headers where the table is damaged."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import msgspec

from lmcache import _native
from lmcache.core.frame import frame_bytes
from lmcache.core.key import Namespace
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_device import RawDevice
from lmcache.l2.adapters.raw_format import Geometry, Superblock
from lmcache.l2.adapters.raw_index import Spaces
from lmcache.l2.native_device import NativeDevice

READ_BYTES = 1 << 20
HEADERS_AT_ONCE = 256
# Generations of the life before that never reached the table are below this distance.
GENERATION_GAP = 1 << 20


@dataclass
class Recovered:
    core: _native.RawIndex
    spaces: Spaces
    youngest_first: memoryview  # slots, u32


def read_table(
    device: RawDevice, superblock: Superblock, slots: int, frame_limit_bytes: int, *, forget: bool
) -> Recovered:
    """Blocks; for a thread. `forget`: nothing of what is there counts. OSError. `finish` must follow."""
    geometry = superblock.geometry
    core = _native.RawIndex(
        slots,
        geometry.slot_bytes,
        frame_limit_bytes,
        geometry.slot_offset(0),
        geometry.page_bytes,
        superblock.first_generation,
        superblock.device,
    )
    spaces = Spaces(core, geometry.namespace_pages)
    page_bytes = geometry.page_bytes
    at_once = max(1, READ_BYTES // page_bytes)
    for first in range(0, geometry.namespace_pages, at_once):
        block = _read_pages(
            device, geometry.namespace_page_offset(first), min(at_once, geometry.namespace_pages - first), page_bytes
        )
        for index in range(len(block) // page_bytes):
            page = block[index * page_bytes : (index + 1) * page_bytes]
            encoded = raw_format.decode_namespace(page, first + index, superblock.device)
            if encoded is not None and not forget:
                spaces.found(first + index, Namespace.decode(encoded))
    pages = geometry.table_pages(slots)
    for first in range(0, pages, at_once):
        block = _read_pages(device, geometry.table_page_offset(first), min(at_once, pages - first), page_bytes)
        core.take_pages(first, block, spaces.by_number(), forget)
    _give_up_rest(device, geometry, pages)
    return Recovered(core, spaces, memoryview(b"").cast("I"))


def _give_up_rest(device: RawDevice, geometry: Geometry, pages: int) -> None:
    """What the table tells of slots that are not in use any more. Nobody here knows which namespaces and generations it
    names; were there more slots again, it would name those of others. From the back, so that the next start goes on
    with it where this one is interrupted: pages are first written in ascending order."""
    at_once = max(1, READ_BYTES // geometry.page_bytes)
    end = geometry.table_pages(geometry.max_slots)
    written = []
    for first in range(pages, end, at_once):
        count = min(at_once, end - first)
        block = _read_pages(device, geometry.table_page_offset(first), count, geometry.page_bytes)
        if not block.strip(b"\0"):
            break
        written.append((geometry.table_page_offset(first), len(block)))
    with contextlib.suppress(OSError):  # a medium that takes no pages takes no new names either
        for offset, size_bytes in reversed(written):
            device.write(offset, bytes(size_bytes))
        if written:
            device.sync()


def finish(recovered: Recovered) -> None:
    """After what slot headers told. Blocks; for a thread."""
    recovered.core.finish_recovery(GENERATION_GAP)
    recovered.youngest_first = memoryview(recovered.core.youngest_first()).cast("I")
    recovered.spaces.recovered()


def _read_pages(device: RawDevice, offset: int, count: int, page_bytes: int) -> bytes:
    """A page that cannot be read comes as one that does not verify."""
    try:
        block = device.read(offset, count * page_bytes)
    except OSError:
        block = b""
    return block.ljust(count * page_bytes, b"\xff")


async def scan(device: NativeDevice, superblock: Superblock, recovered: Recovered, unread: memoryview) -> None:
    """What the headers of slots (u32) tell. Those that could not be read tell nothing."""
    memory = mmap.mmap(-1, HEADERS_AT_ONCE * FRAME_HEADER_BYTES)
    view = memoryview(memory)
    for start in range(0, len(unread), HEADERS_AT_ONCE):
        part = unread[start : start + HEADERS_AT_ONCE]
        submitted = recovered.core.read_headers(device.io, part, _native.buffer_address(view))
        moved, errors = await device.ended(submitted, view)
        for index, (slot, size, error) in enumerate(zip(part, moved, errors, strict=True)):
            if error == 0 and size == FRAME_HEADER_BYTES:
                at = index * FRAME_HEADER_BYTES
                _take_in(recovered, superblock, slot, view[at : at + FRAME_HEADER_BYTES])


def _take_in(recovered: Recovered, superblock: Superblock, slot: int, header: memoryview) -> None:
    try:
        device, found, generation, encoded, chunk_hash, payload_bytes = _native.slot_header_parse(header)
        namespace = Namespace.decode(encoded)
    except (ValueError, msgspec.MsgspecError):
        return
    if (device, found) == (superblock.device, slot):
        space = recovered.spaces.seen(namespace)
        recovered.core.add(slot, space, chunk_hash, frame_bytes(payload_bytes), generation)
