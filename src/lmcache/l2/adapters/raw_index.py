"""What is where on a raw device: in memory for lookups, written through to the table on the device.

Invariant: every slot is free, being written by one store, claimed by one object, or leaving (its object is deleted and
somebody still reads it, or the table on the device still claims it).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from lmcache.core.key import Namespace, ObjectKey
from lmcache.l2.adapters import raw_format
from lmcache.l2.adapters.raw_format import UNNAMED, Entry, Superblock
from lmcache.l2.adapters.raw_recovery import Located, Recovered
from lmcache.l2.adapters.raw_table import OrderedPages, SlotPool

WAIT_SECONDS = 1.0  # at most, for slots that deletions give back


class SlotIndex:
    """Belongs to one loop."""

    def __init__(self, superblock: Superblock, recovered: Recovered, slots: int, pages: OrderedPages) -> None:
        self.superblock = superblock
        self._geometry = superblock.geometry
        self._objects = recovered.objects
        self._table = recovered.table
        self._pages = pages
        self._next_generation = recovered.next_generation
        taken = {located.slot for located in recovered.objects.values()}
        self._pool = SlotPool(taken, slots)
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()  # free as soon as nobody reads them
        # Pages that are newer here than on the device and may wait: recency, and what a scan found.
        self._touched = {self._geometry.page_of(slot) for slot in recovered.stale}
        self._last_used = 0
        # By identity, as the keys have been made of these very namespaces: there may be many keys.
        used = {id(key.namespace) for key in recovered.objects}
        self._namespaces = {space: number for number, space in recovered.namespaces.items() if id(space) in used}
        numbers = set(self._namespaces.values())
        self._free_namespaces = [n for n in reversed(range(self._geometry.namespace_pages)) if n not in numbers]

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._objects

    @property
    def free_slots(self) -> int:
        return len(self._pool)

    def find(self, keys: Sequence[ObjectKey]) -> list[Located | None]:
        find = self._objects.get
        return [find(key) for key in keys]

    def holds(self, key: ObjectKey, located: Located) -> bool:
        """Whether the object is still where it was found."""
        return self._objects.get(key) is located

    # ---- storing -----------------------------------------------------------------------------------------------------
    async def take(self, count: int) -> list[int]:
        """Slots to write to, ascending, at most that many. Each goes to `enter` or `give_back`."""
        if count > len(self._pool):
            await self._pages.settled(WAIT_SECONDS)
        return self._pool.take(count)

    def give_back(self, slots: Sequence[int], *, suspect: bool = False) -> None:
        """Slots that hold nothing of worth. `suspect`: they could not be written."""
        self._pool.give(slots, suspect=suspect)

    def generations(self, count: int) -> range:
        """Numbers that no slot of this device has been written with."""
        first = self._next_generation
        self._next_generation += count
        return range(first, first + count)

    def is_cleared(self, generation: int) -> bool:
        """Whether everything was cleared after this generation began."""
        return generation < self.superblock.first_generation

    async def enter(self, stored: Sequence[tuple[ObjectKey, Located]]) -> None:
        """Objects, in prefix order and of ascending slots, that are completely written. Returns when the table on the
        device says so, or could not be written."""
        used_at = self._use_time(len(stored))
        dirty: list[int] = []
        for position, (key, located) in enumerate(stored):
            self._objects[key] = located
            number = self._namespace_number(key.namespace)
            entry = Entry(key.chunk_hash, number, located.size_bytes, located.generation, used_at - position)
            self._table.set(located.slot, entry)
            page = self._geometry.page_of(located.slot)
            if not dirty or dirty[-1] != page:
                dirty.append(page)
        # One page after the other: killed in between, what is there is a prefix.
        tried = None
        for page in dirty:
            self._touched.discard(page)
            tried = self._pages.put([self._table.page(page)])
        if tried is not None:
            await tried

    def _namespace_number(self, namespace: Namespace) -> int:
        if namespace not in self._namespaces:
            if not self._free_namespaces:
                return UNNAMED
            number = self._free_namespaces.pop()
            self._namespaces[namespace] = number
            encoded = raw_format.encode_namespace(
                number, self.superblock.device, namespace.encode(), self._geometry.page_bytes
            )
            self._pages.put([(self._geometry.namespace_page_offset(number), encoded)])
        return self._namespaces[namespace]

    # ---- deleting ----------------------------------------------------------------------------------------------------
    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Unknown keys are ignored. Returns when the table on the device says so, or could not be written."""
        gone = [located.slot for key in keys if (located := self._objects.pop(key, None)) is not None]
        if not gone:
            return
        for slot in gone:
            self._table.free(slot)
        pages = sorted({self._geometry.page_of(slot) for slot in gone})
        self._touched.difference_update(pages)
        await self._pages.put([self._table.page(page) for page in pages], lambda: self._leave(gone))

    async def clear(self) -> tuple[int, int]:
        """(objects, bytes). What is being written now does not count either."""
        objects, self._objects = self._objects, {}
        self._table.free_all()
        self._touched.clear()
        self.superblock = self.superblock.following(self._next_generation)
        slots = [located.slot for located in objects.values()]
        *first, last = superblock_pages(self.superblock)
        for page in first:
            self._pages.put([page], flush=True)
        await self._pages.put([last], lambda: self._leave(slots), flush=True)
        return len(objects), sum(located.size_bytes for located in objects.values())

    def _leave(self, slots: Sequence[int]) -> None:
        """The table on the device no longer claims them."""
        read = {slot for slot in slots if slot in self._readers}
        self._leaving |= read
        self._pool.give(slot for slot in slots if slot not in read)

    # ---- reading -----------------------------------------------------------------------------------------------------
    def pin(self, slots: Sequence[int]) -> None:
        """Until `unpin` they are not written again."""
        self._readers.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._readers[slot] -= 1
            if self._readers[slot] == 0:
                del self._readers[slot]
                if slot in self._leaving:
                    self._leaving.remove(slot)
                    self._pool.give([slot])

    def touch(self, slots: Sequence[int]) -> None:
        """They were just used, in prefix order."""
        used_at = self._use_time(len(slots))
        for position, slot in enumerate(slots):
            self._table.touch(slot, used_at - position)
            self._touched.add(self._geometry.page_of(slot))

    def write_touched(self) -> None:
        pages, self._touched = sorted(self._touched), set()
        if pages:
            self._pages.put([self._table.page(page) for page in pages])

    def _use_time(self, count: int) -> int:
        """Microseconds since 1970 of the first of `count` objects; one less for each that follows."""
        self._last_used = max(time.time_ns() // 1000, self._last_used + count)
        return self._last_used


def superblock_pages(superblock: Superblock) -> list[tuple[int, bytes]]:
    """Both copies, each to be written and flushed before the next, so that one is whole at any time."""
    encoded = superblock.encode()
    return [(copy * len(encoded), encoded) for copy in reversed(range(raw_format.SUPERBLOCKS))]
