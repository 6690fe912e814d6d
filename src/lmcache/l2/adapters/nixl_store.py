"""`nixl_store`: a pool of files or objects, moved by NIXL (docs/formats/nixl-pool.md).

The index is in memory; a directory beside the slots, from which it is rebuilt, is brought up to date with every batch.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Hashable, Sequence
from functools import partial

from lmcache import _native
from lmcache.clock import wall_ns
from lmcache.core.folders import refuse_unwritable
from lmcache.core.frame import frame_bytes, may_be_frame_of
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_ALIGN_BYTES, MAX_OBJECT_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.errors import AdapterError
from lmcache.l2.adapter import Capacity, Inventory
from lmcache.l2.adapters.dax_format import ENTRY_BYTES
from lmcache.l2.adapters.nixl_agent import Agent, AgentSettings, Range, refuse_missing_plugin
from lmcache.l2.adapters.nixl_config import OBJECT_BACKENDS, NixlStoreConfig
from lmcache.l2.adapters.nixl_file_pool import FilePool, refuse_too_few_descriptors, unusable_folder
from lmcache.l2.adapters.nixl_lanes import READ_LANES, WRITE_LANES, Lanes
from lmcache.l2.adapters.nixl_object_pool import ObjectPool
from lmcache.l2.adapters.nixl_pool import Pool
from lmcache.l2.adapters.remote_names import identify_namespace
from lmcache.l2.adapters.slot_object import SlotKeeper, SlotObject, object_name
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.completions import words
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

INVENTORY_SLICE = 4096
MAX_FAULTS = 8  # of headers at the start, each of which a plugin may try for seconds
LARGEST_FRAME_BYTES = frame_bytes(MAX_OBJECT_BYTES)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_USELESS = (errno.EBADMSG, errno.ENOENT)  # what nobody needs to ask for again


class NixlStoreAdapter(SlotKeeper):
    verifies = False

    def __init__(self, config: NixlStoreConfig, environment: Environment = SYSTEM, pool: Pool | None = None) -> None:
        """`pool`: in place of the one that the configuration names."""
        self.capacity = Capacity(config.limit_bytes, FRAME_ALIGN_BYTES, limit_objects=config.pool_size)
        self._config = config
        self._name = config.name
        self._environment = environment
        kind: type[FilePool] | type[ObjectPool] = ObjectPool if config.backend in OBJECT_BACKENDS else FilePool
        self._pool: Pool = pool or kind(config, environment)
        self._region: Range | None = None
        self._lanes: list[Lanes] = []  # the first for stores and what is beside the slots, the last for loads
        self._objects: dict[bytes, SlotObject] = {}
        self._free: list[int] = []  # the last one is used first
        self._unread: set[int] = set()  # free slots with entries of objects whose namespace could not be read
        self._recovered = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        self._log_limiter = LogLimiter()

    def overhead_bytes(self) -> int:
        return 0

    def status(self) -> dict[str, int]:
        return {
            "slots": self._pool.slots,
            "free_slots": len(self._free),
            "buffered_fallbacks": self._pool.buffered_fallbacks,
        }

    def lend_memory(self, address: int, size_bytes: int) -> None:
        self._region = Range(address, size_bytes)

    # ---- life --------------------------------------------------------------------------------------------------------
    async def open(self, inventory: Inventory) -> None:
        config, pool = self._config, self._pool
        await in_thread("l2-open", pool.open)
        try:
            settings = AgentSettings(
                config.where,
                config.backend,
                config.plugin_params,
                self._region,
                objects=pool.objects,
                files=pool.files,
                clock=self._environment.clock,
            )
            counts = (WRITE_LANES, READ_LANES) if config.has_many_agents else (1,)
            self._lanes = [Lanes(f"{config.name}-nixl", settings, count) for count in counts]
            for lanes in self._lanes:
                await lanes.open()
            entries = await self._lanes[0].open_with(pool.read_directory)
        except BaseException:
            await self.close()
            raise
        self._recovery = spawn(self._recover(inventory, entries), f"{self._name}-recover")

    async def close(self) -> None:
        if self._recovery is not None:
            await self._recovery
            self._recovery = None
            try:
                await self._lanes[0].run(self._pool.flush)
            except (OSError, AdapterError) as error:
                log.warning("%s: the order of use was not written: %s", self._name, error)
            if not self._config.persist_enabled:
                try:
                    await self._give_back()
                except AdapterError as error:
                    log.warning("%s", error)
        for lanes in self._lanes:
            await lanes.close()
        await in_thread("l2-close", partial(self._pool.close, remove=not self._config.persist_enabled))

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        await self._recovered.wait()
        outcomes = [StoreOutcome.FAILED] * len(keys)
        taken: list[tuple[int, int]] = []  # (position in the batch, slot)
        for at, key in enumerate(keys):
            if object_name(key) in self._objects:
                outcomes[at] = StoreOutcome.ALREADY_THERE
            elif self._free:
                taken.append((at, self._free.pop()))
            else:
                outcomes[at] = StoreOutcome.FULL
        if not taken:
            return outcomes
        try:
            errors = await self._lanes[0].run(partial(self._write, keys, buffers, taken))
        except BaseException:
            self._free += [slot for _, slot in reversed(taken)]
            raise
        unused: list[int] = []
        twice: list[int] = []
        for error, (at, slot) in zip(errors, taken, strict=True):
            name = object_name(keys[at])
            if error:
                self._log_once(("write", error), f"cannot write slot {slot}: {errno.errorcode.get(error, error)}")
                outcomes[at] = StoreOutcome.FULL if error in _NO_ROOM else StoreOutcome.FAILED
                unused.append(slot)
            elif name in self._objects:  # stored by a concurrent call
                outcomes[at] = StoreOutcome.ALREADY_THERE
                twice.append(slot)
            else:
                outcomes[at] = StoreOutcome.STORED
                self._objects[name] = SlotObject(slot, buffers[at].nbytes)
        try:
            await self._erase(twice)
        except AdapterError as error:  # each has the right frame
            log.debug("%s", error)
        self._free += twice + unused
        return outcomes

    def _write(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        taken: Sequence[tuple[int, int]],
        agent: Agent,
    ) -> list[int]:
        """0 or an errno each. On a thread of the lanes."""
        errors = self._pool.write(agent, [slot for _, slot in taken], [buffers[at] for at, _ in taken])
        written = [place for place, error in zip(taken, errors, strict=True) if not error]
        entries = _native.make_dax_entries(
            self._pool.id,
            words([slot for _, slot in written]),
            b"".join([object_name(keys[at]) for at, _ in written]),
            words([buffers[at].nbytes for at, _ in written]),
            wall_ns(self._environment.clock),
        )
        try:
            self._pool.record(agent, [slot for _, slot in written], entries)
        except OSError as error:
            return [error.errno or errno.EIO] * len(taken)
        return errors

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = [LoadOutcome.MISSING] * len(keys)
        reading: list[tuple[int, SlotObject, memoryview]] = []  # position in the batch, object, where it goes
        for at, key in enumerate(keys):
            held = self._objects.get(object_name(key))
            if held is not None:
                held.readers += 1
                reading.append((at, held, buffers[at].cast("B")[: held.frame_bytes]))
        if not reading:
            return outcomes
        try:
            errors = await self._lanes[-1].run(partial(self._read, keys, reading))
        finally:
            for _, held, _ in reading:
                self._done_reading(held)
        for error, (at, held, _) in zip(errors, reading, strict=True):
            if not error:
                outcomes[at] = LoadOutcome.LOADED
            elif error == errno.EBADMSG:
                outcomes[at] = LoadOutcome.CORRUPT
            elif error != errno.ENOENT:
                outcomes[at] = LoadOutcome.FAILED
                self._log_once(("read", error), f"cannot read slot {held.slot}: {errno.errorcode.get(error, error)}")
        if useless := [keys[at] for error, (at, _, _) in zip(errors, reading, strict=True) if error in _USELESS]:
            try:
                await self._remove([object_name(key) for key in useless], are_useless=True)
            except AdapterError as error:
                log.debug("%s", error)
        return outcomes

    def _read(
        self, keys: Sequence[ObjectKey], reading: Sequence[tuple[int, SlotObject, memoryview]], agent: Agent
    ) -> list[int]:
        """0 or an errno each; EBADMSG: no frame of its key. On a thread of the lanes."""
        slots = [held.slot for _, held, _ in reading]
        errors = self._pool.read(agent, slots, [target for _, _, target in reading])
        for place, (at, _, target) in enumerate(reading):
            if not errors[place] and not may_be_frame_of(keys[at], target):
                errors[place] = errno.EBADMSG
        read = [slot for slot, error in zip(slots, errors, strict=True) if not error]
        self._pool.mark_used(agent, read, wall_ns(self._environment.clock))
        return errors

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        found = [self._objects.get(object_name(key)) for key in keys]
        return [held.frame_bytes if held is not None else None for held in found]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        await self._remove([object_name(key) for key in keys])
        return [True] * len(keys)

    async def clear(self) -> tuple[int, int]:
        await self._recovered.wait()
        removed = await self._remove(list(self._objects))
        await self._erase(list(self._unread & set(self._free)))
        self._unread.clear()
        await self._give_back()
        return len(removed), sum(held.frame_bytes for held in removed)

    async def _give_back(self) -> None:
        free = tuple(self._free)
        try:
            await self._lanes[0].run(lambda agent: self._pool.give_back(agent, free))
        except OSError as error:
            raise AdapterError(
                f"{self._name}: objects are deleted, but their bytes may still be in the backend: {error}"
            ) from None

    # ---- slots -------------------------------------------------------------------------------------------------------
    async def _erase(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        nothing = bytes(len(slots) * ENTRY_BYTES)
        try:
            await self._lanes[0].run(lambda agent: self._pool.record(agent, slots, nothing))
        except OSError as error:
            raise AdapterError(f"{self._name}: objects could not be deleted: {error}", retryable=True) from None

    def _log_once(self, kind: Hashable, sentence: str) -> None:
        if self._log_limiter.due(kind):
            log.warning("%s: %s", self._name, sentence)

    # ---- recovery ----------------------------------------------------------------------------------------------------
    async def _recover(self, inventory: Inventory, entries: memoryview) -> None:
        try:
            await self._take_over(inventory, entries)
        except Exception as error:  # the root of a task: the pool goes on with what was found
            log.log(level_of(error), "%s: the directory of the pool could not be read", self._name, exc_info=True)
        used = {held.slot for held in self._objects.values()} | self._unread
        self._free = [*self._unread, *(slot for slot in reversed(range(self._pool.slots)) if slot not in used)]
        self._recovered.set()
        inventory.complete()

    async def _take_over(self, inventory: Inventory, entries: memoryview) -> None:
        directory = await in_thread(
            "l2-recover", _native.read_dax_directory, self._pool.id, entries, LARGEST_FRAME_BYTES
        )
        names, found = directory.names, []
        for at, slot, size_bytes in zip(range(0, len(names), 64), directory.slots, directory.frame_bytes, strict=True):
            found.append((names[at : at + 64], slot, size_bytes))
        namespaces, is_certain = await self._lanes[0].run(partial(self._identify, found))
        known: list[tuple[ObjectKey, int]] = []
        useless: list[int] = []
        for name, slot, size_bytes in found:
            namespace = namespaces.get(name[:32])
            if namespace is None and not is_certain:
                self._unread.add(slot)
            elif namespace is None or name in self._objects:
                useless.append(slot)
            else:
                self._objects[name] = SlotObject(slot, size_bytes)
                known.append((ObjectKey(namespace, name[32:]), size_bytes))
        if self._unread:
            log.warning(
                "%s: the namespaces of %d objects could not be read; a later start finds those that are not written "
                "over until then",
                *(self._name, len(self._unread)),
            )
        for start in range(0, len(known), INVENTORY_SLICE):
            inventory.found(known[start : start + INVENTORY_SLICE])
            await asyncio.sleep(0)
        try:
            await self._erase(useless)
        except AdapterError as error:  # they are written over
            log.debug("%s", error)

    def _identify(self, found: Sequence[tuple[bytes, int, int]], agent: Agent) -> tuple[dict[bytes, Namespace], bool]:
        """Reads the namespaces, of which the directory has the digests, from headers of frames. All frames of one are
        tried: after a power failure the youngest may have no header. With it whether what is not known has no header:
        False where the backend failed. On a thread of the lanes."""
        namespaces: dict[bytes, Namespace] = {}
        faults = 0
        for name, slot, _ in found:
            digest = name[:32]
            if digest in namespaces or faults == MAX_FAULTS:
                continue
            try:
                namespace = identify_namespace(self._pool.read_header(agent, slot), digest)
            except OSError as error:
                faults += error.errno != errno.ENOENT
                continue
            if namespace is not None:
                namespaces[digest] = namespace
        return namespaces, not faults


def check(config: NixlStoreConfig) -> list[str]:
    """As `AdapterType.check`."""
    refuse_missing_plugin(config.where, config.backend)
    if config.backend in OBJECT_BACKENDS:
        return []
    refuse_too_few_descriptors(config, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    try:
        refuse_unwritable(config.folder)
    except OSError as error:
        raise unusable_folder(config, error) from None
    return []
