"""What a raw device holds when it is opened: from its table, and from slot headers where the table is damaged."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import msgspec

from lmcache import _native
from lmcache.core.frame import frame_bytes
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_device import RawDevice
from lmcache.l2.adapters.raw_format import Geometry, Superblock
from lmcache.l2.adapters.raw_table import SlotTable
from lmcache.l2.native_device import NativeDevice

READ_BYTES = 1 << 20
HEADERS_AT_ONCE = 256
# Generations of the life before that never reached the table are below this distance.
GENERATION_GAP = 1 << 20


class Located(NamedTuple):
    """Where an object is."""

    slot: int
    size_bytes: int
    generation: int


@dataclass
class Recovered:
    table: SlotTable
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    objects: dict[ObjectKey, Located] = field(default_factory=dict)
    found: list[tuple[int, ObjectKey, Located]] = field(default_factory=list)  # (used at, ...), also what is outdated
    unread: list[int] = field(default_factory=list)  # slots of which only the header can tell
    stale: list[int] = field(default_factory=list)  # slots of which the table on the device says what is not so
    next_generation: int = 0

    def add(self, key: ObjectKey, located: Located, used_at: int) -> None:
        """Of two slots with the same key the younger one counts."""
        before = self.objects.setdefault(key, located)
        if before is not located:
            older, younger = sorted((before, located), key=lambda place: place.generation)
            self.objects[key] = younger
            self.table.free(older.slot)
            self.stale.append(older.slot)
        self.found.append((used_at, key, located))

    def youngest_first(self) -> list[tuple[ObjectKey, int]]:
        self.found.sort(key=itemgetter(0), reverse=True)
        if len(self.found) == len(self.objects):
            return [(key, located.size_bytes) for _, key, located in self.found]
        return [(key, located.size_bytes) for _, key, located in self.found if self.objects[key] is located]


def read_table(device: RawDevice, superblock: Superblock, slots: int, *, forget: bool) -> Recovered:
    """Blocks; for a thread. `forget`: nothing of what is there counts. OSError."""
    geometry = superblock.geometry
    recovered = Recovered(SlotTable(geometry, superblock.device, slots), next_generation=superblock.first_generation)
    for number, page in _pages(device, geometry, geometry.namespace_page_offset(0), geometry.namespace_pages):
        encoded = raw_format.decode_namespace(page, number, superblock.device)
        if encoded is not None and not forget:
            recovered.namespaces[number] = Namespace.decode(encoded)
    pages = _pages(device, geometry, geometry.table_offset, geometry.table_pages(slots))
    for number, page in pages:
        entries = raw_format.decode_table_page(page, number, superblock.device)
        if entries is None:
            first = number * geometry.entries_per_page
            recovered.unread += range(first, min(first + geometry.entries_per_page, slots))
            recovered.stale.append(first)
        else:
            _take_in(recovered, superblock, number, entries, slots, forget=forget)
    if forget:
        recovered.unread.clear()
    recovered.next_generation += GENERATION_GAP
    return recovered


def _take_in(
    recovered: Recovered, superblock: Superblock, number: int, entries: bytes, slots: int, *, forget: bool
) -> None:
    """One page of the table. A hundred thousand entries are to take a fraction of a second."""
    geometry, first_generation = superblock.geometry, superblock.first_generation
    if not forget:
        recovered.table.load_page(number, entries)
    name, new = recovered.namespaces.get, tuple.__new__
    first = number * geometry.entries_per_page
    for slot, (chunk_hash, space, units, generation, used_at) in enumerate(raw_format.unpack_entries(entries), first):
        if not units:
            continue
        recovered.next_generation = max(recovered.next_generation, generation)
        if forget:
            continue
        size_bytes = units * raw_format.UNIT_BYTES
        namespace = name(space)
        if slot >= slots or generation < first_generation:
            recovered.table.free(slot)
        elif namespace is None or size_bytes > geometry.slot_bytes:
            recovered.table.free(slot)
            recovered.unread.append(slot)
        else:
            key = new(ObjectKey, (namespace, chunk_hash))
            recovered.add(key, new(Located, (slot, size_bytes, generation)), used_at)


def _pages(device: RawDevice, geometry: Geometry, offset: int, count: int) -> Iterator[tuple[int, bytes]]:
    """A page that cannot be read comes as b"" and does not decode."""
    at_once = max(1, READ_BYTES // geometry.page_bytes)
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        try:
            block = device.read(offset + first * geometry.page_bytes, number * geometry.page_bytes)
        except OSError:
            block = b""
        for index in range(number):
            page = block[index * geometry.page_bytes : (index + 1) * geometry.page_bytes]
            yield first + index, page.ljust(geometry.page_bytes, b"\xff")


class SlotHeader(NamedTuple):
    key: ObjectKey
    size_bytes: int
    generation: int


async def read_headers(
    device: NativeDevice, superblock: Superblock, slots: Sequence[int]
) -> dict[int, SlotHeader | None]:
    """What the headers of these slots say, None where there is none of this device and slot. Slots that could not be
    read are left out."""
    headers: dict[int, SlotHeader | None] = {}
    memory = mmap.mmap(-1, HEADERS_AT_ONCE * FRAME_HEADER_BYTES)
    view = memoryview(memory)
    for start in range(0, len(slots), HEADERS_AT_ONCE):
        part = slots[start : start + HEADERS_AT_ONCE]
        buffers = [view[i * FRAME_HEADER_BYTES : (i + 1) * FRAME_HEADER_BYTES] for i in range(len(part))]
        moved, errors = await device.read([superblock.geometry.slot_offset(slot) for slot in part], buffers)
        for slot, buffer, size, error in zip(part, buffers, moved, errors, strict=True):
            if error == 0:
                headers[slot] = _parse(buffer, superblock, slot) if size == FRAME_HEADER_BYTES else None
    return headers


def _parse(header: memoryview, superblock: Superblock, slot: int) -> SlotHeader | None:
    try:
        device, found_slot, generation, namespace, chunk_hash, payload_bytes = _native.slot_header_parse(header)
        if (device, found_slot) != (superblock.device, slot) or generation < superblock.first_generation:
            return None
        key = ObjectKey(Namespace.decode(namespace), chunk_hash)
    except (ValueError, msgspec.MsgspecError):
        return None
    return SlotHeader(key, frame_bytes(payload_bytes), generation)
