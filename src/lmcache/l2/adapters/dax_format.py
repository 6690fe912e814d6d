"""What lies on a DAX device (docs/formats/dax.md): a superblock, a directory of slots, the slots. Entries of the
directory are made and read natively (native/include/lmcache/dax_directory.h)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmcache.core.limits import FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES
from lmcache.core.rounding import round_up

MAGIC = b"LMCDAX\x00\x01"
SUPERBLOCK_BYTES = 4096
DEVICE_ID_BYTES = 16
ENTRY_BYTES = 128
USED_OFFSET = 80  # of the time of the last use in an entry: the one field that changes while the entry is valid
USED_BYTES = 8

_SUPERBLOCK = struct.Struct("<8s16sQQ")  # magic, device id, slot stride, slots; then the checksum
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class Geometry:
    """`stride`: bytes from slot to slot, which is what a frame may have."""

    stride: int
    slots: int

    @classmethod
    def of(cls, size_bytes: int, slot_bytes: int) -> Geometry:
        """Gives the device as many slots as fit, each for a frame whose payload has `slot_bytes`."""
        stride = round_up(slot_bytes, FRAME_ALIGN_BYTES) + FRAME_HEADER_BYTES
        usable_bytes = size_bytes - SUPERBLOCK_BYTES - (FRAME_ALIGN_BYTES - 1)
        return cls(stride, max(0, usable_bytes // (stride + ENTRY_BYTES)))

    @cached_property
    def first_slot(self) -> int:
        directory_bytes = self.slots * ENTRY_BYTES
        return SUPERBLOCK_BYTES + round_up(directory_bytes, FRAME_ALIGN_BYTES)

    def slot_place(self, slot: int) -> int:
        return self.first_slot + slot * self.stride

    def slot_places(self, slots: Sequence[int]) -> list[int]:
        first, stride = self.first_slot, self.stride
        return [first + slot * stride for slot in slots]

    def used_places(self, slots: Sequence[int]) -> list[int]:
        return [SUPERBLOCK_BYTES + USED_OFFSET + slot * ENTRY_BYTES for slot in slots]

    def entry_place(self, slot: int) -> int:
        return SUPERBLOCK_BYTES + slot * ENTRY_BYTES


def superblock(device_id: bytes, geometry: Geometry) -> bytes:
    fields = _SUPERBLOCK.pack(MAGIC, device_id, geometry.stride, geometry.slots)
    return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(SUPERBLOCK_BYTES, b"\x00")


def read_superblock(block: bytes) -> tuple[bytes, Geometry] | None:
    """The device id and geometry; None when these bytes are not a superblock."""
    fields = block[: _SUPERBLOCK.size]
    magic, device_id, stride, slots = _SUPERBLOCK.unpack(fields)
    (checksum,) = _CHECKSUM.unpack_from(block, _SUPERBLOCK.size)
    if magic != MAGIC or checksum != zlib.crc32(fields):
        return None
    return device_id, Geometry(stride, slots)
