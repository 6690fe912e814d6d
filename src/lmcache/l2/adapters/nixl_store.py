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
from itertools import compress

from lmcache.core.folders import refuse_unwritable
from lmcache.core.frame import frame_bytes, may_be_frame_of
from lmcache.core.key import ObjectKey
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
from lmcache.l2.adapters.slot_keeper import SlotKeeper
from lmcache.l2.background import in_thread, spawn
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

LARGEST_FRAME_BYTES = frame_bytes(MAX_OBJECT_BYTES)

# By what the pool answers; every other errno is FAILED.
_STORED_BY_ERROR = {0: StoreOutcome.STORED, errno.ENOSPC: StoreOutcome.FULL, errno.EDQUOT: StoreOutcome.FULL}
_LOADED_BY_ERROR = {0: LoadOutcome.LOADED, errno.EBADMSG: LoadOutcome.CORRUPT, errno.ENOENT: LoadOutcome.MISSING}


class NixlStoreAdapter(SlotKeeper):
    verifies = False

    def __init__(self, config: NixlStoreConfig, environment: Environment = SYSTEM, pool: Pool | None = None) -> None:
        """`pool`: in place of the one that the configuration names."""
        super().__init__(config.name, environment)
        self.capacity = Capacity(config.limit_bytes, FRAME_ALIGN_BYTES, limit_objects=config.pool_size)
        self._config = config
        kind: type[FilePool] | type[ObjectPool] = ObjectPool if config.backend in OBJECT_BACKENDS else FilePool
        self._pool: Pool = pool or kind(config, environment)
        self._region: Range | None = None
        self._lanes: list[Lanes] = []  # the first for stores and what is beside the slots, the last for loads
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
    def _largest_frame_bytes(self) -> int:
        return LARGEST_FRAME_BYTES

    async def _write(
        self, names: Sequence[bytes], slots: Sequence[int], frames: Sequence[memoryview]
    ) -> list[StoreOutcome]:
        errors = await self._lanes[0].run(partial(self._write_frames, names, slots, frames))
        for slot, error in zip(slots, errors, strict=True):
            if error:
                self._log_once(("write", error), f"cannot write slot {slot}: {errno.errorcode.get(error, error)}")
        return [_STORED_BY_ERROR.get(error, StoreOutcome.FAILED) for error in errors]

    def _write_frames(
        self, names: Sequence[bytes], slots: Sequence[int], frames: Sequence[memoryview], agent: Agent
    ) -> list[int]:
        """0 or an errno each. On a thread of the lanes."""
        errors = self._pool.write(agent, slots, frames)
        written = [not error for error in errors]
        slots = list(compress(slots, written))
        entries = self._entries(self._pool.id, list(compress(names, written)), slots, list(compress(frames, written)))
        try:
            self._pool.record(agent, slots, entries)
        except OSError as error:
            return [error.errno or errno.EIO] * len(errors)
        return errors

    async def _read(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], targets: Sequence[memoryview]
    ) -> list[LoadOutcome]:
        errors = await self._lanes[-1].run(partial(self._read_frames, keys, slots, targets))
        for slot, error in zip(slots, errors, strict=True):
            if error not in _LOADED_BY_ERROR:
                self._log_once(("read", error), f"cannot read slot {slot}: {errno.errorcode.get(error, error)}")
        return [_LOADED_BY_ERROR.get(error, LoadOutcome.FAILED) for error in errors]

    def _read_frames(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], targets: Sequence[memoryview], agent: Agent
    ) -> list[int]:
        """0 or an errno each; EBADMSG: no frame of its key. On a thread of the lanes."""
        targets = [target.cast("B") for target in targets]
        errors = self._pool.read(agent, slots, targets)
        for place, (key, target) in enumerate(zip(keys, targets, strict=True)):
            if not errors[place] and not may_be_frame_of(key, target):
                errors[place] = errno.EBADMSG
        read = [slot for slot, error in zip(slots, errors, strict=True) if not error]
        self._pool.mark_used(agent, read, self._now_ns())
        return errors

    async def _read_header(self, slot: int) -> bytes:
        return await self._lanes[0].run(lambda agent: self._pool.read_header(agent, slot))

    async def clear(self) -> tuple[int, int]:
        cleared = await super().clear()
        await self._erase(list(self._unread & set(self._free)))
        self._unread.clear()
        await self._give_back()
        return cleared

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
            await self._recover_objects(self._pool.id, entries, inventory)
        except Exception as error:  # the root of a task: the pool goes on with what was found
            log.log(level_of(error), "%s: the directory of the pool could not be read", self._name, exc_info=True)
            used = {held.slot for held in self._objects.values()}
            self._free = [slot for slot in reversed(range(self._pool.slots)) if slot not in used]
        self._recovered.set()
        inventory.complete()


def check(config: NixlStoreConfig) -> list[str]:
    """The `AdapterType.check` of this type."""
    refuse_missing_plugin(config.where, config.backend)
    if config.backend in OBJECT_BACKENDS:
        return []
    refuse_too_few_descriptors(config, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    try:
        refuse_unwritable(config.folder)
    except OSError as error:
        raise unusable_folder(config, error) from None
    return []
