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

import msgspec
from msgspec import Meta

from lmcache import _native
from lmcache.clock import wall_ns
from lmcache.core.frame import parse_header
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES, GIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.l2.adapter import Capacity, Inventory
from lmcache.l2.adapter_config import LOOKUPS_READ_NOTHING, AdapterConfig, Gigabytes, NonEmpty, Threads
from lmcache.l2.adapters import dax_device
from lmcache.l2.adapters import dax_format as layout
from lmcache.l2.adapters.dax_device import MappedDevice, refuse_foreign
from lmcache.l2.adapters.slot_object import SlotKeeper, SlotObject, object_name
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.completions import words
from lmcache.l2.native_mapping import NativeMapping
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

ENTRIES_AT_ONCE = 65_536
INVENTORY_SLICE = 4096


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
        self._name = config.name
        self._environment = environment
        self._config = config
        self._path = config.device_path
        self.capacity = Capacity()
        self._objects: dict[bytes, SlotObject] = {}
        self._free: list[int] = []
        self._lost_slots = 0
        self._recovered = asyncio.Event()
        self.recovery: asyncio.Task[None] | None = None  # reads the directory, then touches the pages
        self._device: MappedDevice | None = None

    def overhead_bytes(self) -> int:
        return 0

    def status(self) -> dict[str, int]:
        return {
            "slots": self._geometry.slots if self._device else 0,
            "free_slots": len(self._free),
            "lost_slots": self._lost_slots,
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
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        await self._recovered.wait()
        outcomes = [StoreOutcome.FAILED] * len(keys)
        names = [object_name(key) for key in keys]
        taken: list[tuple[int, int]] = []  # (index, slot)
        for index, (name, buffer) in enumerate(zip(names, buffers, strict=True)):
            if name in self._objects:
                outcomes[index] = StoreOutcome.ALREADY_THERE
            elif buffer.nbytes > self._geometry.stride:
                outcomes[index] = StoreOutcome.TOO_LARGE
            elif self._free:
                taken.append((index, self._free.pop()))
            else:
                outcomes[index] = StoreOutcome.FULL
        if not taken:
            return outcomes
        slots = [slot for _, slot in taken]
        sizes = [buffers[index].nbytes for index, _ in taken]
        entries = _native.make_dax_entries(
            self._id, words(slots), b"".join([names[index] for index, _ in taken]), words(sizes), self._now_ns()
        )
        written = await self._writes.write(
            self._geometry.slot_places(slots),
            [buffers[index] for index, _ in taken],
            [self._geometry.entry_place(slot) for slot in slots],
            entries,
            layout.ENTRY_BYTES,
        )
        twice: list[int] = []
        for copied, (index, slot) in zip(written, taken, strict=True):
            if not copied:
                continue
            name = names[index]
            if name in self._objects:  # stored by a concurrent call
                outcomes[index] = StoreOutcome.ALREADY_THERE
                twice.append(slot)
            else:
                outcomes[index] = StoreOutcome.STORED
                self._objects[name] = SlotObject(slot, buffers[index].nbytes)
        failed = [slot for copied, (_, slot) in zip(written, taken, strict=True) if not copied]
        if failed:
            self._lose_slot(failed[0])
        await self._erase(twice + failed[1:])
        self._free += twice + failed[1:]
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome.MISSING] * len(keys)
        reading: list[SlotObject] = []
        indices: list[int] = []
        targets: list[memoryview] = []
        corrupt: list[ObjectKey] = []
        objects = self._objects
        for index, (namespace, chunk_hash) in enumerate(keys):
            held = objects.get(namespace.digest + chunk_hash)
            if held is None:
                continue
            buffer, frame_bytes = buffers[index], held.frame_bytes
            if frame_bytes != buffer.nbytes:
                if frame_bytes > buffer.nbytes:
                    outcomes[index] = LoadOutcome.CORRUPT
                    corrupt.append(keys[index])
                    continue
                buffer = buffer[:frame_bytes]
            held.readers += 1
            indices.append(index)
            reading.append(held)
            targets.append(buffer)
        slots = [held.slot for held in reading]
        try:
            results = await self._reads.read(self._geometry.slot_places(slots), targets)
        finally:
            for held in reading:
                self._done_reading(held)
        if results.count(1) == len(keys):
            self._mark_used(slots)
            return [LoadOutcome.LOADED] * len(keys)
        for copied, index, held in zip(results, indices, reading, strict=True):
            outcomes[index] = LoadOutcome.LOADED if copied else LoadOutcome.CORRUPT
            if not copied and self._objects.get(object_name(keys[index])) is held:
                del self._objects[object_name(keys[index])]  # its slot stays out of use
                self._lose_slot(held.slot)
        self._mark_used([slot for copied, slot in zip(results, slots, strict=True) if copied])
        if corrupt:
            await self.delete(corrupt, corrupt=True)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        objects = self._objects
        found = [objects.get(key.namespace.digest + key.chunk_hash) for key in keys]
        return [held.frame_bytes if held is not None else None for held in found]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        await self._remove([object_name(key) for key in keys])
        return [True] * len(keys)

    async def clear(self) -> tuple[int, int]:
        await self._recovered.wait()
        removed = await self._remove(list(self._objects))
        return len(removed), sum(held.frame_bytes for held in removed)

    # ---- slots -------------------------------------------------------------------------------------------------------
    async def _erase(self, slots: Sequence[int]) -> None:
        if slots:
            places = [self._geometry.entry_place(slot) for slot in slots]
            await self._writes.write_records(places, bytes(len(slots) * layout.ENTRY_BYTES), layout.ENTRY_BYTES)

    def _mark_used(self, slots: Sequence[int]) -> None:
        """In prefix order, without waiting. A late write marks a free slot or another object, which is harmless."""
        now = self._now_ns()
        if slots:
            self._writes.write_records(
                self._geometry.used_places(slots),
                array("Q", range(now, now - 1000 * len(slots), -1000)).tobytes(),
                layout.USED_BYTES,
            )

    def _now_ns(self) -> int:
        return wall_ns(self._environment.clock)

    def _lose_slot(self, slot: int) -> None:
        self._lost_slots += 1
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
        unreadable: set[int] = set()
        for first in range(0, self._geometry.slots, ENTRIES_AT_ONCE):
            part = entries[first * layout.ENTRY_BYTES : (first + ENTRIES_AT_ONCE) * layout.ENTRY_BYTES]
            (copied,) = await self._reads.read([self._geometry.entry_place(first)], [part])
            if not copied:
                part[:] = bytes(len(part))
                unreadable.update(range(first, first + len(part) // layout.ENTRY_BYTES))
        self._lost_slots += len(unreadable)
        directory = await in_thread("l2-recover", _native.read_dax_directory, self._id, entries, self._geometry.stride)
        slots, names, sizes = directory.slots, directory.names, directory.frame_bytes
        namespaces = await self._identify(slots, names)

        def index() -> tuple[dict[bytes, SlotObject], list[tuple[ObjectKey, int]], list[int]]:
            objects: dict[bytes, SlotObject] = {}
            known: list[tuple[ObjectKey, int]] = []
            useless: list[int] = []
            for at, slot, frame_bytes in zip(range(0, len(names), 64), slots, sizes, strict=True):
                name = names[at : at + 64]
                namespace = namespaces.get(name[:32])
                if namespace is None or name in objects:
                    useless.append(slot)
                else:
                    objects[name] = SlotObject(slot, frame_bytes)
                    known.append((ObjectKey(namespace, name[32:]), frame_bytes))
            return objects, known, useless

        self._objects, known, useless = await in_thread("l2-recover", index)
        await self._erase(useless)
        free = [slot for slot in directory.free if slot not in unreadable]
        self._free = (useless + free)[::-1]
        for start in range(0, len(known), INVENTORY_SLICE):
            inventory.found(known[start : start + INVENTORY_SLICE])
            await asyncio.sleep(0)

    async def _identify(self, slots: memoryview, names: bytes) -> dict[bytes, Namespace]:
        """Reads the namespaces, of which the directory has the digests, from the headers of frames. All frames of one
        are tried: after a power failure the youngest may have no header."""
        namespaces: dict[bytes, Namespace] = {}
        for at, slot in zip(range(0, len(names), 64), slots, strict=True):
            digest = names[at : at + 32]
            if digest not in namespaces:
                namespace = await self._namespace_in(slot)
                if namespace is not None and namespace.digest == digest:
                    namespaces[digest] = namespace
        return namespaces

    async def _namespace_in(self, slot: int) -> Namespace | None:
        header = memoryview(bytearray(FRAME_HEADER_BYTES))
        await self._reads.read([self._geometry.slot_place(slot)], [header])
        try:
            return Namespace.decode(parse_header(header).namespace)
        except (ValueError, msgspec.MsgspecError):
            return None


def check(config: DaxConfig) -> list[str]:
    """As `AdapterType.check`. The content of a DAX device is only checked when it is mapped."""
    dax_device.check(config.where, config.device_path, config.size_bytes)
    return []
