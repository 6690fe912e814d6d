"""Superblock, geometry and namespace pages of a raw device (docs/formats/raw_block.md): pure values and their bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from lmcache import _native
from lmcache.core.key import MAX_NAMESPACE_BYTES
from lmcache.core.rounding import div_ceil

SUPERBLOCK_MAGIC = b"LMCRAW01"
NAMESPACE_MAGIC = b"LMCNSPC1"
VERSION = 1
MIN_PAGE_BYTES = 4096
SUPERBLOCKS = 2
MAX_NAMESPACE_PAGES = 1024
CHECKSUM_BYTES = 16
DEVICE_ID_BYTES = 16
ENTRY_BYTES = 56  # of a slot in the table, whose pages the native index reads and writes
UNNAMED = 0xFFFF_FFFF  # namespace number of an entry whose namespace is in the slot header only

_SUPERBLOCK = struct.Struct("<8sII16sQQQQQ8sIIQQ")
_PAGE_HEADER = struct.Struct("<8sQ16s16s16x")  # magic, number, device, checksum
PAGE_HEADER_BYTES = _PAGE_HEADER.size
_CHECKSUM_AT = 32


@dataclass(frozen=True)
class Geometry:
    """Where things are, in bytes from the start of the device."""

    slot_bytes: int
    page_bytes: int
    meta_total_bytes: int
    namespace_pages: int

    @classmethod
    def plan(cls, slot_bytes: int, block_align: int, meta_total_bytes: int) -> Geometry:
        page_bytes = max(MIN_PAGE_BYTES, block_align)
        pages = meta_total_bytes // page_bytes
        return cls(slot_bytes, page_bytes, meta_total_bytes, max(1, min(MAX_NAMESPACE_PAGES, pages // 8)))

    @property
    def table_offset(self) -> int:
        return (SUPERBLOCKS + self.namespace_pages) * self.page_bytes

    @property
    def entries_per_page(self) -> int:
        return (self.page_bytes - PAGE_HEADER_BYTES) // ENTRY_BYTES

    @property
    def max_slots(self) -> int:
        """How many slots the table has entries for."""
        return (self.meta_total_bytes - self.table_offset) // self.page_bytes * self.entries_per_page

    def meta_bytes_for(self, slots: int) -> int:
        """The smallest meta_total_bytes whose table has room for that many slots, generously."""
        return (SUPERBLOCKS + MAX_NAMESPACE_PAGES + div_ceil(slots, self.entries_per_page)) * self.page_bytes

    def slots_in(self, device_bytes: int) -> int:
        return max(0, (device_bytes - self.meta_total_bytes) // self.slot_bytes)

    def table_pages(self, slots: int) -> int:
        return div_ceil(slots, self.entries_per_page)

    def slot_offset(self, slot: int) -> int:
        return self.meta_total_bytes + slot * self.slot_bytes

    def table_page_offset(self, page: int) -> int:
        return self.table_offset + page * self.page_bytes

    def namespace_page_offset(self, number: int) -> int:
        return (SUPERBLOCKS + number) * self.page_bytes


@dataclass(frozen=True)
class Superblock:
    device: bytes  # 16, random: the cache's identity, whatever the device is called
    sequence: int  # of two copies the higher one counts
    geometry: Geometry
    header_bytes: int
    meta_magic: bytes  # 8
    meta_version: int
    first_generation: int  # what was written before is no longer there

    def following(self, first_generation: int) -> Superblock:
        return replace(self, sequence=self.sequence + 1, first_generation=first_generation)

    def encode(self) -> bytes:
        """One page."""
        body = _SUPERBLOCK.pack(
            SUPERBLOCK_MAGIC,
            VERSION,
            self.geometry.page_bytes,
            self.device,
            self.sequence,
            self.geometry.slot_bytes,
            self.geometry.meta_total_bytes,
            self.geometry.namespace_pages,
            self.header_bytes,
            self.meta_magic,
            self.meta_version,
            0,
            self.first_generation,
            0,
        )
        block = body.ljust(MIN_PAGE_BYTES - CHECKSUM_BYTES, b"\0")
        return (block + _native.payload_checksum(block)).ljust(self.geometry.page_bytes, b"\0")


class UnknownVersion(Exception):
    """A superblock of ours, of a later version."""


def decode_superblock(block: bytes) -> Superblock | None:
    """None: not one of ours, or damaged. `block`: at least 4096 bytes."""
    if len(block) < MIN_PAGE_BYTES or block[:8] != SUPERBLOCK_MAGIC:
        return None
    body = block[: MIN_PAGE_BYTES - CHECKSUM_BYTES]
    if _native.payload_checksum(body) != block[MIN_PAGE_BYTES - CHECKSUM_BYTES : MIN_PAGE_BYTES]:
        return None
    (_, version, page, device, sequence, slot, meta, namespaces, header, magic, meta_version, _, first, _) = (
        _SUPERBLOCK.unpack_from(body)
    )
    if version != VERSION:
        raise UnknownVersion(str(version))
    return Superblock(device, sequence, Geometry(slot, page, meta, namespaces), header, magic, meta_version, first)


def encode_namespace(number: int, device: bytes, namespace: bytes, page_bytes: int) -> bytes:
    """`namespace`: Namespace.encode(). One page."""
    body = struct.pack("<I", len(namespace)) + namespace
    return _sealed(NAMESPACE_MAGIC, number, device, body.ljust(page_bytes - PAGE_HEADER_BYTES, b"\0"))


def decode_namespace(page: bytes, number: int, device: bytes) -> bytes | None:
    body = _opened(NAMESPACE_MAGIC, page, number, device)
    if body is None:
        return None
    (size,) = struct.unpack_from("<I", body)
    return body[4 : 4 + size] if size <= MAX_NAMESPACE_BYTES else None


def _sealed(magic: bytes, number: int, device: bytes, body: bytes) -> bytes:
    blank = _PAGE_HEADER.pack(magic, number, device, bytes(CHECKSUM_BYTES))
    checksum = _native.payload_checksum(blank + body)
    return _PAGE_HEADER.pack(magic, number, device, checksum) + body


def _opened(magic: bytes, page: bytes, number: int, device: bytes) -> bytes | None:
    found_magic, found_number, found_device, checksum = _PAGE_HEADER.unpack_from(page)
    if (found_magic, found_number, found_device) != (magic, number, device):
        return None
    blank = page[:_CHECKSUM_AT] + bytes(CHECKSUM_BYTES) + page[_CHECKSUM_AT + CHECKSUM_BYTES :]
    return page[PAGE_HEADER_BYTES:] if _native.payload_checksum(blank) == checksum else None
