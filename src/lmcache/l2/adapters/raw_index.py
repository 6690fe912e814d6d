"""The index of a raw device: native, in memory (native/include/lmcache/raw_index.h), and written through to the table
on the device.

Invariant: a slot is reused only after the table on the device says that it is free. An object is written before the
table claims its slot, so after a crash a claimed slot holds the object that the table names.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Iterable, Sequence

from lmcache import _native
from lmcache.clock import Clock, wall_ns
from lmcache.core.key import Namespace, ObjectKey
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_format import UNNAMED, Superblock
from lmcache.l2.adapters.raw_table import OrderedPages
from lmcache.l2.native_device import NativeDevice

WAIT_SECONDS = 1.0  # at most, for slots of deleted objects whose pages are being written
ERASED_AT_ONCE = 64

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Spaces:
    """Namespaces as the small integers (ids) of the native index. Those that have a page on the device have its number.

    Id and number are reused once a namespace has no objects: no page of the table that was submitted names them then,
    and pages that name them again are written later."""

    def __init__(self, core: _native.RawIndex, namespace_pages: int) -> None:
        self._core = core
        self.names: dict[int, Namespace] = {}  # by id
        self._ids: dict[Namespace, int] = {}
        self._number_of: dict[int, int] = {}  # by id
        self._by_number = array("I", [UNNAMED]) * namespace_pages
        self._free: list[int] = []

    def recover(self, number: int, namespace: Namespace) -> None:
        """Its page on the device has that number."""
        self._by_number[number] = self.intern(namespace, number)

    def intern(self, namespace: Namespace, number: int = UNNAMED) -> int:
        """Its id."""
        space = self._ids.get(namespace)
        if space is None:
            space = self._ids[namespace] = self._core.intern(namespace.digest, number)
            self._number_of[space] = number
            self.names[space] = namespace
        return space

    def by_number(self) -> memoryview:
        return memoryview(self._by_number)

    def finish_recovery(self) -> None:
        """All objects are in the index."""
        self._forget_unused()
        self._free = [number for number, space in enumerate(self._by_number) if space not in self.names]
        self._free.reverse()

    def _forget_unused(self) -> None:
        for space in self._core.take_unused_spaces():
            del self._ids[self.names.pop(space)]
            number = self._number_of.pop(space)
            if number != UNNAMED:
                self._free.append(number)

    def pack(self, keys: Sequence[ObjectKey]) -> tuple[memoryview, bytes]:
        """Ids (u32) and hashes for the native index. No key of an unknown namespace is stored."""
        spaces, last, space = array("I"), None, UNNAMED
        for namespace, _ in keys:
            if namespace is not last:
                last, space = namespace, self._ids.get(namespace, UNNAMED)
            spaces.append(space)
        return memoryview(spaces), b"".join([chunk_hash for _, chunk_hash in keys])

    def intern_for_store(self, keys: Iterable[ObjectKey]) -> list[tuple[int, Namespace]]:
        """Numbers and namespaces whose pages must go to the device before these keys, as far as there are numbers."""
        self._forget_unused()
        new: list[tuple[int, Namespace]] = []
        last = None
        for namespace, _ in keys:
            if namespace is last:
                continue
            last = namespace
            space = self.intern(namespace)
            if self._number_of[space] == UNNAMED and self._free:
                number = self._number_of[space] = self._free.pop()
                self._core.set_number(space, number)
                new.append((number, namespace))
        return new


class SlotIndex:
    """For one loop. `core` and `spaces` come from recovery (raw_recovery.py)."""

    def __init__(
        self, superblock: Superblock, core: _native.RawIndex, spaces: Spaces, pages: OrderedPages, clock: Clock
    ) -> None:
        self.superblock = superblock
        self.core = core
        self.spaces = spaces
        self._geometry = superblock.geometry
        self._pages = pages
        self._clock = clock
        self._zeros = memoryview(bytearray(2 * raw_format.MIN_PAGE_BYTES))
        start = _native.buffer_address(self._zeros)
        self._zeros_at = start + -start % raw_format.MIN_PAGE_BYTES

    def describe(self, slots: memoryview) -> list[tuple[ObjectKey, int]]:
        """Keys and sizes of the objects in slots (u32); slots that hold none any more are left out."""
        spaces, hashes, sizes = self.core.describe(slots)
        names, new = self.spaces.names, tuple.__new__
        return [
            (new(ObjectKey, (names[space], hashes[at : at + 32])), size)
            for space, at, size in zip(spaces, range(0, len(hashes), 32), sizes, strict=True)
            if size
        ]

    def sizes(self, keys: Sequence[ObjectKey]) -> memoryview:
        """u64 bytes of each object, 0 for keys that are not stored."""
        return self.core.sizes_of(*self.spaces.pack(keys))

    # ---- storing -----------------------------------------------------------------------------------------------------
    async def wait_for_slots(self, count: int) -> None:
        """Waits a moment for slots of deleted objects when fewer are free."""
        if count > self.core.free_slots:
            await self._pages.settled(WAIT_SECONDS)

    async def store(
        self, device: NativeDevice, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], heads: int
    ) -> tuple[bytes, int]:
        """Codes of raw_index.h, and the errno of a failure. `heads`: address of 4096 bytes a key. Returns when the
        table on the device names the objects, or could not be written."""
        for number, namespace in self.spaces.intern_for_store(keys):
            page = raw_format.encode_namespace(
                number, self.superblock.device, namespace.encode(), self._geometry.page_bytes
            )
            self._pages.put([(self._geometry.namespace_page_offset(number), page)])
        batch, submitted = self.core.begin_store(device.io, *self.spaces.pack(keys), list(buffers), heads)
        _, errors = await device.wait(submitted, buffers)
        codes, dirty = self.core.end_store(batch, errors, self._now_us())
        # One page after the other: a kill in between leaves a prefix.
        tried = None
        for page_number in dirty:
            tried = self._pages.put([self._page(page_number)])
        if tried is not None:
            await tried
        return codes, next((error for error in errors if error and error not in _NO_ROOM), 0)

    # ---- loading -----------------------------------------------------------------------------------------------------
    async def load(
        self, device: NativeDevice, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]
    ) -> tuple[bytes, int]:
        """Codes of raw_index.h and an errno, if any. Corrupt objects are removed."""
        batch, submitted = self.core.begin_load(device.io, *self.spaces.pack(keys), list(buffers))
        results, errors = await device.wait(submitted, buffers)
        codes, corrupt = self.core.end_load(batch, results, errors, self._now_us())
        if corrupt:
            await self.remove([keys[position] for position in corrupt])
        return codes, max(errors, default=0)

    # ---- deleting ----------------------------------------------------------------------------------------------------
    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Unknown keys are ignored. Returns when the table on the device is written, or could not be."""
        gone = self.core.remove(*self.spaces.pack(keys))
        if gone:
            pages = [self._page(page) for page in self.core.pages_of(gone)]
            await self._pages.put(pages, lambda: self.core.release_slots(gone))

    async def clear(self) -> tuple[int, int]:
        """(objects, bytes). Stores under way end as failed."""
        counted = self.core.objects, self.core.object_bytes
        self.superblock = self.superblock.following(self.core.next_generation)
        slots = self.core.remove_all()
        *first, last = superblock_pages(self.superblock)
        for page in first:
            self._pages.put([page], flush=True)
        await self._pages.put([last], lambda: self.core.release_slots(slots), flush=True)
        return counted

    async def erase_stale_headers(self, device: NativeDevice) -> None:
        """Erases headers of deleted objects, by which they would come back if a page of the table were damaged."""
        first = 0
        while True:
            slots, submitted = self.core.begin_erase(device.io, first, ERASED_AT_ONCE, self._zeros_at)
            if not slots:
                return
            _, errors = await device.wait(submitted, self._zeros)
            self.core.end_erase(slots, errors)
            first = slots[-1] + 1

    def write_dirty_pages(self) -> None:
        """Pages that could wait: recency, erased headers, slots recovered from their headers."""
        pages = self.core.dirty_pages()
        if pages:
            self._pages.put([self._page(page) for page in pages])

    def _now_us(self) -> int:
        return wall_ns(self._clock) // 1000

    def _page(self, number: int) -> tuple[int, bytes]:
        """(offset on the device, content) as of now."""
        return self._geometry.table_page_offset(number), self.core.page_image(number)


def superblock_pages(superblock: Superblock) -> list[tuple[int, bytes]]:
    """Both copies, each to be written and flushed before the next, so that one is whole at any time."""
    encoded = superblock.encode()
    return [(copy * len(encoded), encoded) for copy in reversed(range(raw_format.SUPERBLOCKS))]
