"""Slots of one size in memory-mapped storage: DAX devices, or files on hugetlbfs or tmpfs (docs/formats/dax.md).

The index is in memory; the device has a directory beside the slots from which it is rebuilt. An entry is written after
its frame and erased before its slot is used again, so that it never names bytes of another object.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES, GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.l2.adapter import Capacity, Inventory
from lmcache.l2.adapter_config import LOOKUPS_READ_NOTHING, AdapterConfig, Gigabytes, NonEmpty, Threads
from lmcache.l2.adapters import dax_device
from lmcache.l2.adapters import dax_format as layout
from lmcache.l2.adapters.dax_device import MappedDevice, refuse_foreign
from lmcache.l2.adapters.slot_keeper import SlotKeeper
from lmcache.l2.background import in_thread, spawn, until_done
from lmcache.l2.native_mapping import NativeMapping
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

ENTRIES_AT_ONCE = 65_536


class DaxConfig(AdapterConfig, frozen=True, kw_only=True):
    """Slots of one size in mapped storage (a DAX device, or a file on tmpfs or hugetlbfs), for one server alone."""

    bounds_itself = True

    device_path: Annotated[str, NonEmpty, Meta(description="DAX device, or file on tmpfs or hugetlbfs")]
    max_dax_size_gb: Annotated[Gigabytes, Meta(description="how much of it is mapped; 1 GB is 2^30 bytes")]
    slot_bytes: Annotated[int, Meta(ge=1, le=4 * GIB, description="the largest payload that a slot takes")]
    num_store_workers: Annotated[Threads, Meta(description="threads that write")] = 1
    num_lookup_workers: Annotated[Threads, Meta(description=f"no effect: {LOOKUPS_READ_NOTHING}")] = 1
    num_load_workers: Annotated[
        Threads, Meta(description="threads that read", extra={"default": "4, or one a processor where there are fewer"})
    ] = min(4, os.cpu_count() or 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if layout.Geometry.of(self.size_bytes, self.slot_bytes).slots < 1:
            raise ValueError(
                f'"max_dax_size_gb" of {self.max_dax_size_gb:g} has no room for a slot of '
                f'"slot_bytes" {self.slot_bytes}; raise the one or lower the other.'
            )

    @property
    def size_bytes(self) -> int:
        return int(self.max_dax_size_gb * GIB)

    @property
    def device(self) -> str:
        return self.device_path

    def idle_keys(self) -> dict[str, str]:
        return {"num_lookup_workers": LOOKUPS_READ_NOTHING}


class DaxAdapter(SlotKeeper):
    def __init__(self, config: DaxConfig, environment: Environment = SYSTEM) -> None:
        super().__init__(config.name, environment)
        self._config = config
        self._path = config.device_path
        self.capacity = Capacity()
        self.recovery: asyncio.Task[None] | None = None  # reads the directory, then touches the pages
        self._device: MappedDevice | None = None

    def overhead_bytes(self) -> int:
        return 0

    def status(self) -> dict[str, int]:
        return {
            "slots": self._geometry.slots if self._device else 0,
            "free_slots": len(self._free),
            "lost_slots": len(self._lost),
        }

    async def open(self, inventory: Inventory) -> None:
        device = await in_thread("l2-open", MappedDevice, self._config.where, self._path, self._config.size_bytes)
        self._device = device
        self._writes = self._mapping(device, self._config.num_store_workers)
        self._reads = self._mapping(device, self._config.num_load_workers)
        try:
            await self._find_superblock(device)
        except BaseException:
            await self.close()
            raise
        stride = self._geometry.stride
        self.capacity = Capacity(self._geometry.slots * stride, stride, largest_object_bytes=stride)
        self.recovery = spawn(self._recover(inventory), f"{self._name}-recover")

    def _mapping(self, device: MappedDevice, threads: int) -> NativeMapping:
        return NativeMapping(device.address, device.size_bytes, threads=threads, flush=device.persistent)

    async def _find_superblock(self, device: MappedDevice) -> None:
        """Uses the cache on the device if it has the same geometry, else starts a new one."""
        block = memoryview(bytearray(layout.SUPERBLOCK_BYTES))
        await self._reads.read([0], [block])
        refuse_foreign(self._config.where, self._path, bytes(block))
        self._geometry = layout.Geometry.of(device.size_bytes, self._config.slot_bytes)
        found = layout.read_superblock(bytes(block))
        if found is not None and found[1] == self._geometry:
            self._id = found[0]
            return
        if found is not None:
            log.warning(
                "%s: %s was made with other sizes (%d slots of %d bytes); what it holds cannot be used and is given up",
                self._name,
                self._path,
                found[1].slots,
                found[1].stride,
            )
        # A new id makes every older entry invalid.
        self._id = self._environment.random_bytes(layout.DEVICE_ID_BYTES)
        await self._writes.write_records([0], layout.superblock(self._id, self._geometry), layout.SUPERBLOCK_BYTES)

    async def _prefault(self) -> None:
        begin = 0
        try:
            while (device := self._device) is not None and begin < device.size_bytes:
                begin = await in_thread("l2-prefault", device.prefault, begin)
        except OSError as error:
            log.info("%s: pages of %s are mapped as they are used: %s", self._name, self._path, error)

    async def close(self) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        if self.recovery is not None:
            await self.recovery
        await self._writes.close()
        await self._reads.close()
        await in_thread("l2-close", device.close)

    # ---- objects -----------------------------------------------------------------------------------------------------
    def _largest_frame_bytes(self) -> int:
        return self._geometry.stride

    async def _write(
        self, names: Sequence[bytes], slots: Sequence[int], frames: Sequence[memoryview]
    ) -> list[StoreOutcome]:
        places = [self._geometry.entry_place(slot) for slot in slots]
        entries = self._entries(self._id, names, slots, frames)
        copied = await until_done(
            self._writes.write(self._geometry.slot_places(slots), frames, places, entries, layout.ENTRY_BYTES)
        )
        failed = [slot for slot, is_copied in zip(slots, copied, strict=True) if not is_copied]
        if failed:
            self._lose_slot(failed[0])
            await self._erase(failed[1:])
        return [StoreOutcome.STORED if is_copied else StoreOutcome.FAILED for is_copied in copied]

    async def _read(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], targets: Sequence[memoryview]
    ) -> list[LoadOutcome]:
        results = await until_done(self._reads.read(self._geometry.slot_places(slots), targets))
        if results.count(1) == len(slots):
            self._mark_used(slots)
            return [LoadOutcome.LOADED] * len(slots)
        for slot, is_copied in zip(slots, results, strict=True):
            if not is_copied:
                self._lose_slot(slot)
        self._mark_used([slot for slot, is_copied in zip(slots, results, strict=True) if is_copied])
        return [LoadOutcome.LOADED if is_copied else LoadOutcome.CORRUPT for is_copied in results]

    async def _read_header(self, slot: int) -> memoryview:
        header = memoryview(bytearray(FRAME_HEADER_BYTES))
        await self._reads.read([self._geometry.slot_place(slot)], [header])
        return header

    # ---- slots -------------------------------------------------------------------------------------------------------
    async def _erase(self, slots: Sequence[int]) -> None:
        if slots:
            places = [self._geometry.entry_place(slot) for slot in slots]
            nothing = bytes(len(slots) * layout.ENTRY_BYTES)
            await until_done(self._writes.write_records(places, nothing, layout.ENTRY_BYTES))

    def _mark_used(self, slots: Sequence[int]) -> None:
        """In prefix order, without waiting. A late write marks a free slot or another object, which is harmless."""
        now_ns = self._now_ns()
        if slots:
            self._writes.write_records(
                self._geometry.used_places(slots),
                array("Q", range(now_ns, now_ns - 1000 * len(slots), -1000)).tobytes(),
                layout.USED_BYTES,
            )

    def _lose_slot(self, slot: int) -> None:
        if slot in self._lost:
            return
        self._lost.add(slot)
        log.warning("%s: the medium fails in slot %d of %s; it is not used any more", self._name, slot, self._path)

    # ---- recovery ----------------------------------------------------------------------------------------------------
    async def _recover(self, inventory: Inventory) -> None:
        try:
            await self._read_directory(inventory)
        except Exception as error:  # the root of a task: the cache goes on with what it found
            log.log(level_of(error), "%s: the directory of %s could not be read", self._name, self._path, exc_info=True)
        self._recovered.set()
        inventory.complete()
        await self._prefault()

    async def _read_directory(self, inventory: Inventory) -> None:
        entries = memoryview(bytearray(self._geometry.slots * layout.ENTRY_BYTES))
        for first in range(0, self._geometry.slots, ENTRIES_AT_ONCE):
            part = entries[first * layout.ENTRY_BYTES : (first + ENTRIES_AT_ONCE) * layout.ENTRY_BYTES]
            (copied,) = await self._reads.read([self._geometry.entry_place(first)], [part])
            if not copied:
                part[:] = bytes(len(part))
                self._lost.update(range(first, first + len(part) // layout.ENTRY_BYTES))
        await self._recover_objects(self._id, entries, inventory)


def check(config: DaxConfig) -> list[str]:
    """The `AdapterType.check` of this type. The content of a DAX device is only checked when it is mapped."""
    dax_device.check(config.where, config.device_path, config.size_bytes)
    return []
