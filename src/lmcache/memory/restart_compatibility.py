"""What lets a server recover the memory of the previous one: the second page of the file, then the slot table
(docs/formats/shared_memory.md)."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from lmcache.core.limits import MIB
from lmcache.core.rounding import round_up
from lmcache.memory.header import HEADER_BYTES

PAGE_OFFSET = HEADER_BYTES
PAGE_BYTES = 4096
TABLE_OFFSET = PAGE_OFFSET + PAGE_BYTES
TABLE_WORD_BYTES = 8
# Words that the server changes in place, each by one aligned store.
COMMITTED_WORD_OFFSET = PAGE_OFFSET + 2048
LAST_OWNER_WORD_OFFSET = PAGE_OFFSET + 2056

MAGIC = b"LMC-L1T\n"
VERSION = 1
FRAME_VERSION = 1  # docs/formats/frame.md
_FIELDS = struct.Struct("<8sIIQQII16s32s")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class RestartCompatibility:
    """What two servers must have in common for the second to recover what the first held.

    `hash_sample` is the chunk hash of a fixed chunk, 32 bytes: it differs wherever the naming of chunks does.
    """

    capacity_bytes: int
    align_bytes: int
    chunk_tokens: int
    hash_algorithm: str
    hash_sample: bytes

    @property
    def first_offset(self) -> int:
        """The offset of the first slot, in the file."""
        table_bytes = self.capacity_bytes // self.align_bytes * TABLE_WORD_BYTES
        return round_up(TABLE_OFFSET + table_bytes, self.align_bytes)

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            FRAME_VERSION,
            self.capacity_bytes,
            self.align_bytes,
            self.chunk_tokens,
            0,
            self.hash_algorithm.encode(),
            self.hash_sample,
        )
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    def difference(self, page: bytes) -> str:
        """Why the objects of a file with such a page cannot be recovered, as part of a sentence; "" if they can."""
        if len(page) < PAGE_BYTES or not page.startswith(MAGIC):
            return "it was not made with --l1-persist"
        fields = page[: _FIELDS.size]
        _, version, frame_version, capacity, align, chunk_tokens, _, algorithm, sample = _FIELDS.unpack(fields)
        if _CHECKSUM.unpack_from(page, _FIELDS.size)[0] != zlib.crc32(fields):
            return "its description is damaged"
        if (version, frame_version) != (VERSION, FRAME_VERSION):
            return f"its format is version {version}.{frame_version}, not {VERSION}.{FRAME_VERSION}"
        if capacity != self.capacity_bytes:
            return f"it is an L1 of {capacity / MIB:g} MiB, not of {self.capacity_bytes / MIB:g}"
        if align != self.align_bytes:
            return f"its objects are aligned to {align} bytes, not to {self.align_bytes}"
        if chunk_tokens != self.chunk_tokens:
            return f"its chunks have {chunk_tokens} tokens, not {self.chunk_tokens}"
        previous_algorithm = algorithm.rstrip(b"\0").decode("ascii", "replace")
        if previous_algorithm != self.hash_algorithm:
            return f"its chunks are named by {previous_algorithm}, not by {self.hash_algorithm}"
        if sample != self.hash_sample:
            return f"{self.hash_algorithm} named its chunks differently (another PYTHONHASHSEED?)"
        return ""
