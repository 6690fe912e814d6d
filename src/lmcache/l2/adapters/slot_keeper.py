"""What adapters that keep objects in slots of equal size do alike: the index of objects, free slots, and the directory
beside the slots from which a start rebuilds both."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence

from lmcache import _native
from lmcache.clock import wall_ns
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import Environment
from lmcache.errors import AdapterError
from lmcache.l2.adapter import Inventory
from lmcache.l2.adapters.remote_names import identify_namespace
from lmcache.l2.background import in_thread
from lmcache.l2.completions import words

log = logging.getLogger("lmcache.l2")

INVENTORY_SLICE = 4096
MAX_FAULTS = 8  # of headers at the start, each of which a backend may try for seconds
_NAME_BYTES = 64
_DIGEST_BYTES = 32
_LOADED = LoadOutcome.LOADED
_USELESS = (LoadOutcome.CORRUPT, LoadOutcome.MISSING)  # what nobody needs to ask for again


class SlotObject:
    """Its slot is free again when it is gone and has no readers."""

    __slots__ = ("frame_bytes", "is_gone", "readers", "slot")

    def __init__(self, slot: int, frame_bytes: int) -> None:
        self.slot = slot
        self.frame_bytes = frame_bytes
        self.readers = 0
        self.is_gone = False


def object_name(key: ObjectKey) -> bytes:
    """The digest of its namespace and its chunk hash: what stands in an entry of the directory."""
    return key.namespace.digest + key.chunk_hash


class SlotKeeper:
    """Belongs to one loop. A subclass moves frames and entries, calls `_recover_objects` once and sets `_recovered`.

    Invariant: a slot is used again only when its object is gone, nobody reads it, and its entry was erased or its
    erasure was tried."""

    def __init__(self, name: str, environment: Environment) -> None:
        self._name = name
        self._environment = environment
        self._objects: dict[bytes, SlotObject] = {}  # by `object_name`
        self._free: list[int] = []  # the last one is used first
        self._lost: set[int] = set()  # slots that are not used any more
        self._unread: set[int] = set()  # free slots with entries of objects whose namespace could not be read
        self._recovered = asyncio.Event()

    # ---- what a subclass does ----------------------------------------------------------------------------------------
    def _largest_frame_bytes(self) -> int:
        raise NotImplementedError

    async def _write(
        self, names: Sequence[bytes], slots: Sequence[int], frames: Sequence[memoryview]
    ) -> Sequence[StoreOutcome]:
        """Each frame, then its entry. When it returns, also when it raises, nothing uses the frames or writes any more;
        what is not STORED has no entry."""
        raise NotImplementedError

    async def _read(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], targets: Sequence[memoryview]
    ) -> Sequence[LoadOutcome]:
        """MISSING: the slot is not there any more."""
        raise NotImplementedError

    async def _read_header(self, slot: int) -> bytes | memoryview:
        """Its first 4096 bytes, or fewer. OSError where they cannot be read; ENOENT: there is none."""
        raise NotImplementedError

    async def _erase(self, slots: Sequence[int]) -> None:
        """The entries of these in the directory. AdapterError where they stay."""
        raise NotImplementedError

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        await self._recovered.wait()
        outcomes = [StoreOutcome.FAILED] * len(keys)
        largest = self._largest_frame_bytes()
        indices: list[int] = []
        names: list[bytes] = []
        slots: list[int] = []
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            name = object_name(key)
            if name in self._objects:
                outcomes[index] = StoreOutcome.ALREADY_THERE
            elif buffer.nbytes > largest:
                outcomes[index] = StoreOutcome.TOO_LARGE
            elif self._free:
                indices.append(index)
                names.append(name)
                slots.append(self._free.pop())
            else:
                outcomes[index] = StoreOutcome.FULL
        if not slots:
            return outcomes
        unused = slots
        try:
            written = await self._write(names, slots, [buffers[index] for index in indices])
            unused, twice = [], []
            for index, name, slot, outcome in zip(indices, names, slots, written, strict=True):
                outcomes[index] = outcome
                if outcome is not StoreOutcome.STORED:
                    unused.append(slot)
                elif name in self._objects:  # stored by a concurrent call
                    outcomes[index] = StoreOutcome.ALREADY_THERE
                    unused.append(slot)
                    twice.append(slot)
                else:
                    self._objects[name] = SlotObject(slot, buffers[index].nbytes)
            await self._try_to_erase(twice)
        finally:
            self._give_back_slots(unused)
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome.MISSING] * len(keys)
        indices: list[int] = []
        reading: list[SlotObject] = []
        targets: list[memoryview] = []
        useless: list[tuple[bytes, SlotObject]] = []
        objects = self._objects
        for index, key in enumerate(keys):
            held = objects.get(key.namespace.digest + key.chunk_hash)
            if held is None:
                continue
            buffer, frame_bytes = buffers[index], held.frame_bytes
            if frame_bytes != buffer.nbytes:
                if frame_bytes > buffer.nbytes:
                    outcomes[index] = LoadOutcome.CORRUPT
                    useless.append((object_name(key), held))
                    continue
                buffer = buffer[:frame_bytes]
            held.readers += 1
            indices.append(index)
            reading.append(held)
            targets.append(buffer)
        if reading:
            try:
                read = await self._read([keys[index] for index in indices], [held.slot for held in reading], targets)
            finally:
                for held in reading:
                    self._done_reading(held)
            for index, held, outcome in zip(indices, reading, read, strict=True):
                outcomes[index] = outcome
                if outcome is not _LOADED and outcome in _USELESS:
                    useless.append((object_name(keys[index]), held))
        if useless:
            try:
                gone = [name for name, held in useless if objects.get(name) is held]
                await self._remove(gone, are_useless=True)
            except AdapterError as error:
                log.debug("%s", error)
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
    async def _remove(self, names: Sequence[bytes], *, are_useless: bool = False) -> list[SlotObject]:
        """AdapterError where their entries stay: they are there as before, but for those that nobody can load."""
        removed = {name: held for name in names if (held := self._objects.pop(name, None)) is not None}
        for held in removed.values():
            held.readers += 1  # until its entry is erased
        try:
            # Suffixes first, so that a kill leaves a prefix.
            await self._erase([held.slot for held in reversed(removed.values())])
        except BaseException:
            for name, held in removed.items():
                # Useless: a later start finds that, too, if the slot is not written over until then.
                held.is_gone = are_useless or self._objects.setdefault(name, held) is not held  # stored anew meanwhile
            raise
        else:
            for held in removed.values():
                held.is_gone = True
        finally:
            for held in reversed(removed.values()):  # so that their slots are used again in their order
                self._done_reading(held)
        return list(removed.values())

    def _done_reading(self, held: SlotObject) -> None:
        held.readers -= 1
        if held.is_gone and not held.readers:
            self._give_back_slots((held.slot,))

    def _give_back_slots(self, slots: Sequence[int]) -> None:
        self._free += [slot for slot in reversed(slots) if slot not in self._lost]

    async def _try_to_erase(self, slots: Sequence[int]) -> None:
        """Erases entries of slots that are written over where their entries stay."""
        try:
            await self._erase(slots)
        except AdapterError as error:
            log.debug("%s", error)

    # ---- the directory -----------------------------------------------------------------------------------------------
    def _entries(
        self, identifier: bytes, names: Sequence[bytes], slots: Sequence[int], frames: Sequence[memoryview]
    ) -> bytes:
        """Those of new objects; `identifier`: 16 bytes that are in every entry of this directory."""
        sizes = words([frame.nbytes for frame in frames])
        return _native.make_dax_entries(identifier, words(slots), b"".join(names), sizes, self._now_ns())

    def _now_ns(self) -> int:
        return wall_ns(self._environment.clock)

    async def _recover_objects(self, identifier: bytes, entries: memoryview, inventory: Inventory) -> None:
        """The objects and the free slots that the entries of all slots tell of. Where the backend fails, slots whose
        namespace is not known stay as they are until they are needed."""
        directory = await in_thread(
            "l2-recover", _native.read_dax_directory, identifier, entries, self._largest_frame_bytes()
        )
        slots, names = directory.slots, directory.names
        namespaces, is_certain = await self._identify(slots, names)
        self._objects, known, twice, unnamed = await in_thread(
            "l2-recover", _index, slots, names, directory.frame_bytes, namespaces
        )
        useless = twice + unnamed if is_certain else twice
        if not is_certain:
            self._unread = set(unnamed)
        try:
            await self._try_to_erase(useless)
        finally:
            self._free = [*self._unread, *self._free]  # what could not be read is used last
            self._give_back_slots(sorted([*useless, *directory.free]))
        if self._unread:
            log.warning(
                "%s: the namespaces of %d objects could not be read; a later start finds those that are not written "
                "over until then",
                *(self._name, len(self._unread)),
            )
        for start in range(0, len(known), INVENTORY_SLICE):
            inventory.found(known[start : start + INVENTORY_SLICE])
            await asyncio.sleep(0)

    async def _identify(self, slots: memoryview, names: bytes) -> tuple[dict[bytes, Namespace], bool]:
        """Reads the namespaces, of which the directory has the digests, from headers of frames. All frames of one are
        tried: after a power failure the youngest may have no header. With it whether what is not known has no header:
        False where the backend failed."""
        namespaces: dict[bytes, Namespace] = {}
        faults = 0
        for start, slot in zip(range(0, len(names), _NAME_BYTES), slots, strict=True):
            digest = names[start : start + _DIGEST_BYTES]
            if digest in namespaces or faults == MAX_FAULTS:
                continue
            try:
                namespace = identify_namespace(await self._read_header(slot), digest)
            except OSError as error:
                faults += error.errno != errno.ENOENT
                continue
            if namespace is not None:
                namespaces[digest] = namespace
        return namespaces, not faults


def _index(
    slots: memoryview, names: bytes, sizes: memoryview, namespaces: dict[bytes, Namespace]
) -> tuple[dict[bytes, SlotObject], list[tuple[ObjectKey, int]], list[int], list[int]]:
    """Objects by name, the same as keys and sizes, slots of objects that have another, slots of unknown namespaces."""
    objects: dict[bytes, SlotObject] = {}
    known: list[tuple[ObjectKey, int]] = []
    twice: list[int] = []
    unnamed: list[int] = []
    for start, slot, frame_bytes in zip(range(0, len(names), _NAME_BYTES), slots, sizes, strict=True):
        name = names[start : start + _NAME_BYTES]
        namespace = namespaces.get(name[:_DIGEST_BYTES])
        if namespace is None:
            unnamed.append(slot)
        elif name in objects:
            twice.append(slot)
        else:
            objects[name] = SlotObject(slot, frame_bytes)
            known.append((ObjectKey(namespace, name[_DIGEST_BYTES:]), frame_bytes))
    return objects, known, twice, unnamed
