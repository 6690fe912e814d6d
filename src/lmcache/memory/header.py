"""The first page of an L1 memory file (docs/formats/shared_memory.md)."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

HEADER_BYTES = 4096
SERVER_EPOCH_BYTES = 16
MAGIC = b"LMC-L1\r\n"
VERSION = 1

_FIELDS = struct.Struct("<8sIIQ16sQ")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class Header:
    """`size_bytes` is of the whole file. `server_epoch` names one start of a server. `pid` is for operators only."""

    size_bytes: int
    server_epoch: bytes
    pid: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, self.size_bytes, self.server_epoch, self.pid)
        return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Header | None:
        """None unless the page is a header of this version whose checksum holds."""
        if len(page) < HEADER_BYTES:
            return None
        fields = page[: _FIELDS.size]
        magic, version, header_bytes, size_bytes, server_epoch, pid = _FIELDS.unpack(fields)
        (checksum,) = _CHECKSUM.unpack_from(page, _FIELDS.size)
        if (magic, version, header_bytes, checksum) != (MAGIC, VERSION, HEADER_BYTES, zlib.crc32(fields)):
            return None
        return cls(size_bytes, server_epoch, pid)


def is_ours(page: bytes) -> bool:
    """Whether a file that starts so was made by this package, in this version or another."""
    return page.startswith(MAGIC)
