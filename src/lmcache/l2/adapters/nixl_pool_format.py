"""What is beside the slots of a NIXL pool (docs/formats/nixl-pool.md): pages of a directory. Its entries are those of a
DAX device (docs/formats/dax.md), made and read natively."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from lmcache.core.limits import FRAME_ALIGN_BYTES
from lmcache.core.rounding import div_ceil, round_up
from lmcache.l2.adapters.dax_format import ENTRY_BYTES, USED_OFFSET

MAGIC = b"LMCNIXL\x01"
ID_BYTES = 16
SUPERBLOCK_BYTES = 4096
PAGE_SLOTS = 1024

_SUPERBLOCK = struct.Struct("<8s16sQ")  # magic, pool id, slots of the pool; then the checksum
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class PoolGeometry:
    """A file has one page for all slots, objects have pages of PAGE_SLOTS: a page is written as a whole there."""

    slots: int
    page_slots: int

    @property
    def pages(self) -> int:
        return div_ceil(self.slots, self.page_slots)

    def page_bytes(self, page: int) -> int:
        entries = min(self.page_slots, self.slots - page * self.page_slots)
        return SUPERBLOCK_BYTES + round_up(entries * ENTRY_BYTES, FRAME_ALIGN_BYTES)

    def page_of(self, slot: int) -> int:
        return slot // self.page_slots

    def entry_place(self, slot: int) -> int:
        """In its page."""
        return SUPERBLOCK_BYTES + slot % self.page_slots * ENTRY_BYTES

    def used_place(self, slot: int) -> int:
        return self.entry_place(slot) + USED_OFFSET


def superblock(pool_id: bytes, slots: int) -> bytes:
    fields = _SUPERBLOCK.pack(MAGIC, pool_id, slots)
    return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(SUPERBLOCK_BYTES, b"\x00")


def read_superblock(block: bytes | memoryview) -> tuple[bytes, int] | None:
    """The pool's id and how many slots it had; None when these bytes are not a superblock."""
    if len(block) < SUPERBLOCK_BYTES:
        return None
    fields = bytes(block[: _SUPERBLOCK.size])
    magic, pool_id, slots = _SUPERBLOCK.unpack(fields)
    (checksum,) = _CHECKSUM.unpack_from(block, _SUPERBLOCK.size)
    return (pool_id, slots) if magic == MAGIC and checksum == zlib.crc32(fields) else None
