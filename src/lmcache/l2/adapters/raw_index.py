"""What is where on a raw device: natively in memory (native/include/lmcache/raw_index.h), and written through to the
table on the device.

Invariant: a slot is given out only when the table on the device calls it free. What the table claims was written before
the claim, so after a crash a claimed slot holds what is claimed.
"""

from __future__ import annotations

import errno
import time
from array import array
from collections.abc import Iterable, Sequence

from lmcache import _native
from lmcache.core.key import Namespace, ObjectKey
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_format import UNNAMED, Superblock
from lmcache.l2.adapters.raw_table import OrderedPages
from lmcache.l2.native_device import NativeDevice

WAIT_SECONDS = 1.0  # at most, for slots that deletions give back
ERASED_AT_ONCE = 64

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Spaces:
    """Namespaces as the small integers of the native index. Those of them that have a number are on the device, too.

    Both are given to others once a namespace has no objects: then no page that was given to the table names them, and a
    page that does goes to the device later."""

    def __init__(self, core: _native.RawIndex, namespace_pages: int) -> None:
        self._core = core
        self.names: dict[int, Namespace] = {}  # by id
        self._ids: dict[Namespace, int] = {}
        self._number_of: dict[int, int] = {}  # by id
        self._by_number = array("I", [UNNAMED]) * namespace_pages
        self._free: list[int] = []

    def found(self, number: int, namespace: Namespace) -> None:
        """On the device, at that number."""
        self._by_number[number] = self._number_of_id(namespace, number)

    def seen(self, namespace: Namespace) -> int:
        """In the header of a slot."""
        return self._number_of_id(namespace, UNNAMED)

    def _number_of_id(self, namespace: Namespace, number: int) -> int:
        space = self._ids.get(namespace)
        if space is None:
            space = self._ids[namespace] = self._core.intern(namespace.digest, number)
            self._number_of[space] = number
            self.names[space] = namespace
        return space

    def by_number(self) -> memoryview:
        return memoryview(self._by_number)

    def recovered(self) -> None:
        """All objects are there."""
        self._forget_unused()
        self._free = [number for number, space in enumerate(self._by_number) if space not in self.names]
        self._free.reverse()

    def _forget_unused(self) -> None:
        for space in memoryview(self._core.take_unused_spaces()).cast("I"):
            del self._ids[self.names.pop(space)]
            number = self._number_of.pop(space)
            if number != UNNAMED:
                self._free.append(number)

    def pack(self, keys: Sequence[ObjectKey]) -> tuple[memoryview, bytes]:
        """For the native index. Of keys whose namespace is unknown nothing is there."""
        spaces, last, space = array("I"), None, UNNAMED
        for namespace, _ in keys:
            if namespace is not last:
                last, space = namespace, self._ids.get(namespace, UNNAMED)
            spaces.append(space)
        return memoryview(spaces), b"".join([chunk_hash for _, chunk_hash in keys])

    def enter(self, keys: Iterable[ObjectKey]) -> list[tuple[int, Namespace]]:
        """They are going to be stored: what has to go to the device before, as far as there are numbers left."""
        self._forget_unused()
        new: list[tuple[int, Namespace]] = []
        last = None
        for namespace, _ in keys:
            if namespace is last:
                continue
            last = namespace
            space = self._number_of_id(namespace, UNNAMED)
            if self._number_of[space] == UNNAMED and self._free:
                number = self._number_of[space] = self._free.pop()
                self._core.set_number(space, number)
                new.append((number, namespace))
        return new


class SlotIndex:
    """Belongs to one loop. `core` and `spaces` as recovery leaves them."""

    def __init__(self, superblock: Superblock, core: _native.RawIndex, spaces: Spaces, pages: OrderedPages) -> None:
        self.superblock = superblock
        self.core = core
        self._spaces = spaces
        self._geometry = superblock.geometry
        self._pages = pages
        self._zeros = memoryview(bytearray(2 * raw_format.MIN_PAGE_BYTES))
        start = _native.buffer_address(self._zeros)
        self._zeros_at = start + -start % raw_format.MIN_PAGE_BYTES

    def describe(self, slots: memoryview) -> list[tuple[ObjectKey, int]]:
        """Keys and sizes of what slots (u32) hold, without those that hold nothing any more."""
        packed_spaces, hashes, packed_sizes = self.core.describe(slots)
        spaces, sizes = memoryview(packed_spaces).cast("I"), memoryview(packed_sizes).cast("Q")
        names, new = self._spaces.names, tuple.__new__
        return [
            (new(ObjectKey, (names[space], hashes[at : at + 32])), size)
            for space, at, size in zip(spaces, range(0, len(hashes), 32), sizes, strict=True)
            if size
        ]

    def sizes(self, keys: Sequence[ObjectKey]) -> memoryview:
        """u64 bytes, 0 where nothing is there."""
        return memoryview(self.core.sizes_of(*self._spaces.pack(keys))).cast("Q")

    # ---- storing -----------------------------------------------------------------------------------------------------
    async def wait_for_slots(self, count: int) -> None:
        """A moment for slots that are on their way back, if there are not that many."""
        if count > self.core.free_slots:
            await self._pages.settled(WAIT_SECONDS)

    async def store(
        self, device: NativeDevice, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], heads: int
    ) -> tuple[bytes, int]:
        """Codes of raw_index.h, and the errno of a failure. `heads`: address of 4096 bytes a key. Returns when the
        table on the device tells of them, or could not be written."""
        for number, namespace in self._spaces.enter(keys):
            page = raw_format.encode_namespace(
                number, self.superblock.device, namespace.encode(), self._geometry.page_bytes
            )
            self._pages.put([(self._geometry.namespace_page_offset(number), page)])
        batch, submitted = self.core.begin_store(device.io, *self._spaces.pack(keys), list(buffers), heads)
        _, errors = await device.ended(submitted, buffers)
        codes, dirty = self.core.end_store(batch, errors, _now())
        # One page after the other: killed in between, what is there is a prefix.
        tried = None
        for page_number in memoryview(dirty).cast("I"):
            tried = self._pages.put([self._page(page_number)])
        if tried is not None:
            await tried
        return codes, next((error for error in errors if error and error not in _NO_ROOM), 0)

    # ---- loading -----------------------------------------------------------------------------------------------------
    async def load(
        self, device: NativeDevice, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]
    ) -> tuple[bytes, int]:
        """Codes of raw_index.h and an errno, if any. What is corrupt is removed."""
        batch, submitted = self.core.begin_load(device.io, *self._spaces.pack(keys), list(buffers))
        results, errors = await device.ended(submitted, buffers)
        codes, corrupt = self.core.end_load(batch, results, errors, _now())
        if corrupt:
            await self.remove([keys[position] for position in memoryview(corrupt).cast("I")])
        return codes, max(errors, default=0)

    # ---- deleting ----------------------------------------------------------------------------------------------------
    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Unknown keys are ignored. Returns when the table on the device says so, or could not be written."""
        gone = self.core.remove(*self._spaces.pack(keys))
        if gone:
            pages = memoryview(self.core.pages_of(gone)).cast("I")
            await self._pages.put([self._page(page) for page in pages], lambda: self.core.leave(gone))

    async def clear(self) -> tuple[int, int]:
        """(objects, bytes). What is being written now does not count either."""
        counted = self.core.objects, self.core.object_bytes
        self.superblock = self.superblock.following(self.core.next_generation)
        slots = self.core.remove_all()
        *first, last = superblock_pages(self.superblock)
        for page in first:
            self._pages.put([page], flush=True)
        await self._pages.put([last], lambda: self.core.leave(slots), flush=True)
        return counted

    async def erase_left(self, device: NativeDevice) -> None:
        """Headers of former objects: where a page of the table is damaged later, they do not come back by them."""
        first = 0
        while True:
            slots, submitted = self.core.begin_erase(device.io, first, ERASED_AT_ONCE, self._zeros_at)
            if not slots:
                return
            _, errors = await device.ended(submitted, self._zeros)
            self.core.end_erase(slots, errors)
            first = memoryview(slots).cast("I")[-1] + 1

    def write_touched(self) -> None:
        """What may wait: recency, erased headers and what a scan found."""
        pages = memoryview(self.core.touched_pages()).cast("I")
        if pages:
            self._pages.put([self._page(page) for page in pages])

    def _page(self, number: int) -> tuple[int, bytes]:
        """(offset on the device, content) as of now."""
        return self._geometry.table_page_offset(number), self.core.page_image(number)


def _now() -> int:
    return time.time_ns() // 1000


def superblock_pages(superblock: Superblock) -> list[tuple[int, bytes]]:
    """Both copies, each to be written and flushed before the next, so that one is whole at any time."""
    encoded = superblock.encode()
    return [(copy * len(encoded), encoded) for copy in reversed(range(raw_format.SUPERBLOCKS))]
