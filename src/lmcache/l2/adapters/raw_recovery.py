"""Recovers the index of a raw device from its table, and from slot headers where the table is damaged."""

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
# More than the generations of the previous run that never reached the table.
GENERATION_GAP = 1 << 20


@dataclass
class Recovered:
    core: _native.RawIndex
    spaces: Spaces
    youngest_first: memoryview  # slots, u32


def read_table(
    device: RawDevice, superblock: Superblock, slots: int, frame_limit_bytes: int, *, forget: bool
) -> Recovered:
    """Blocks; for a thread. `forget`: recover no objects. OSError. `finish` must follow."""
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
                spaces.recover(first + index, Namespace.decode(encoded))
    pages = geometry.table_pages(slots)
    for first in range(0, pages, at_once):
        block = _read_pages(device, geometry.table_page_offset(first), min(at_once, pages - first), page_bytes)
        core.load_pages(first, block, spaces.by_number(), forget)
    _erase_unused_pages(device, geometry, pages)
    return Recovered(core, spaces, memoryview(b"").cast("I"))


def _erase_unused_pages(device: RawDevice, geometry: Geometry, pages: int) -> None:
    """Erases pages of the table for slots that a smaller configuration no longer has. The namespaces and generations
    that they name are unknown here; if the device had more slots again, they would name those of others. Goes
    backwards, so that the next start continues where this one is interrupted: pages are first written in ascending
    order."""
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
    """After `scan`. Blocks; for a thread."""
    recovered.core.finish_recovery(GENERATION_GAP)
    recovered.youngest_first = recovered.core.youngest_first()
    recovered.spaces.finish_recovery()


def _read_pages(device: RawDevice, offset: int, count: int, page_bytes: int) -> bytes:
    """A page that cannot be read is returned as one that does not verify."""
    try:
        block = device.read(offset, count * page_bytes)
    except OSError:
        block = b""
    return block.ljust(count * page_bytes, b"\xff")


async def scan(device: NativeDevice, superblock: Superblock, recovered: Recovered, slots: memoryview) -> None:
    """Adds the objects that the headers of slots (u32) describe, as far as they can be read."""
    memory = mmap.mmap(-1, HEADERS_AT_ONCE * FRAME_HEADER_BYTES)
    view = memoryview(memory)
    for start in range(0, len(slots), HEADERS_AT_ONCE):
        part = slots[start : start + HEADERS_AT_ONCE]
        submitted = recovered.core.read_headers(device.io, part, _native.buffer_address(view))
        moved, errors = await device.wait(submitted, view)
        for index, (slot, size, error) in enumerate(zip(part, moved, errors, strict=True)):
            if error == 0 and size == FRAME_HEADER_BYTES:
                at = index * FRAME_HEADER_BYTES
                _add(recovered, superblock, slot, view[at : at + FRAME_HEADER_BYTES])


def _add(recovered: Recovered, superblock: Superblock, slot: int, header: memoryview) -> None:
    try:
        found = _native.slot_header_parse(header)
        namespace = Namespace.decode(found.namespace)
    except (ValueError, msgspec.MsgspecError):
        return
    if (found.device, found.slot) == (superblock.device, slot):
        space = recovered.spaces.intern(namespace)
        recovered.core.add(slot, space, found.chunk_hash, frame_bytes(found.payload_bytes), found.generation)
