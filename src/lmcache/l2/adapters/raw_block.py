"""Objects in slots of equal size on a raw block device or a pre-sized file (docs/formats/raw_block.md).

One server owns the device. The index is in memory, so lookups do no I/O; every store and deletion updates the table on
the device before it is confirmed.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Hashable, Sequence

from lmcache import _native
from lmcache.core.key import ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.l2.adapter import Capacity, Inventory
from lmcache.l2.adapters.raw_config import RawBlockConfig, open_and_claim, unusable
from lmcache.l2.adapters.raw_index import SlotIndex
from lmcache.l2.adapters.raw_recovery import HEADERS_AT_ONCE, Recovered, finish, read_table, scan
from lmcache.l2.adapters.raw_table import OrderedPages
from lmcache.l2.background import in_thread, spawn
from lmcache.l2.native_device import NativeDevice, usable_queue_depth
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

INVENTORY_SLICE = 4096
SYNC_SECONDS = 1.0
CLOSE_SECONDS = 10.0

# By the codes of native/include/lmcache/raw_index.h.
_STORE_OUTCOMES = (
    StoreOutcome.FAILED,
    StoreOutcome.STORED,
    StoreOutcome.ALREADY_THERE,
    StoreOutcome.TOO_LARGE,
    StoreOutcome.FULL,
)
_LOAD_OUTCOMES = (LoadOutcome.MISSING, LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.FAILED)


class RawBlockAdapter:
    def __init__(self, config: RawBlockConfig, environment: Environment = SYSTEM) -> None:
        self.capacity = Capacity()
        self._environment = environment
        self._config = config
        self._name = config.name
        # What header_bytes reserves beyond the header of a frame is not used.
        self._frame_limit_bytes = config.slot_bytes - (config.header_bytes - FRAME_HEADER_BYTES)
        self._heads: list[mmap.mmap] = []
        self._log_limiter = LogLimiter()
        self._figures = {"scanned_slots": 0, "recovery_ms": 0, "buffered_fallbacks": 0}
        self._last_io = 0.0
        self._unsynced = False
        self._opened = False
        self.index: SlotIndex | None = None  # once recovered
        self._tasks: list[asyncio.Task[None]] = []

    def overhead_bytes(self) -> int:
        return 0

    def status(self) -> dict[str, int]:
        if not self._opened:
            return {}
        return {
            **self._figures,
            "slots": self._slots,
            "free_slots": self.index.core.free_slots if self.index else 0,
            "io_uring": int(self._depth > 0),
            "copied_transfers": self._stores.copied + self._loads.copied,
            "metadata_writes_waiting": len(self._pages),
            "metadata_faults": self._pages.faults,
        }

    # ---- open and close ----------------------------------------------------------------------------------------------
    async def open(self, inventory: Inventory) -> None:
        config = self._config
        try:
            opened = await in_thread("l2-open", open_and_claim, config, self._environment)
        except OSError as error:
            raise unusable(config, error) from None
        self._device, claim, self._slots = opened
        if config.use_odirect and not self._device.direct:
            self._figures["buffered_fallbacks"] = 1
            log.warning(
                "%s: O_DIRECT is not possible on %s; it goes through the page cache", self._name, self._device.path
            )
        self._superblock = claim.superblock
        geometry = claim.superblock.geometry
        self._depth = usable_queue_depth(config.io_engine, config.iouring_queue_depth, self._name)
        slot_bytes = geometry.slot_bytes
        self.capacity = Capacity(self._slots * slot_bytes, slot_bytes, largest_object_bytes=self._frame_limit_bytes)
        # Loads have threads of their own, so that they never queue behind stores.
        self._stores = self._io(config.num_store_workers, self._depth)
        self._loads = self._io(config.num_load_workers, self._depth)
        # So has the table: its pages would queue behind objects, and the next stores behind its pages.
        self._meta = self._io(1, 0)
        self._background = self._io(1, 0)
        self._pages = OrderedPages(self._meta, geometry.page_bytes, self._name)
        self._inventory = inventory
        self._recovered = asyncio.Event()
        self._opened = True
        forget = claim.forgets or not config.load_checkpoint_on_init
        self._tasks = [
            spawn(self._recover(forget), f"{self._name}-recovery"),
            spawn(self._sync_now_and_then(), f"{self._name}-sync"),
        ]
        if config.meta_enable_periodic:
            self._tasks.append(spawn(self._checkpoint_periodically(), f"{self._name}-checkpoint"))

    def _io(self, threads: int, depth: int) -> NativeDevice:
        return NativeDevice(
            self._device.fd,
            threads,
            depth,
            align_bytes=self._config.block_align if self._device.direct else 1,
            copy_always=not self._config.enable_zero_copy,
        )

    async def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.index:
            try:
                await asyncio.wait_for(self.index.erase_stale_headers(self._background), CLOSE_SECONDS)
            except asyncio.TimeoutError:
                log.info("%s: some deleted objects keep their headers until the next start", self._name)
            self.index.write_dirty_pages()
        if not await self._pages.close(CLOSE_SECONDS):
            log.warning("%s: some metadata could not be written; the objects that it names are lost", self._name)
        await self._meta.sync()
        for device in (self._meta, self._background, self._stores, self._loads):
            await device.close()
        await in_thread("l2-close", self._device.close)

    # ---- recovery ----------------------------------------------------------------------------------------------------
    async def _recover(self, forget: bool) -> None:
        started = asyncio.get_running_loop().time()
        try:
            recovered = await in_thread("l2-recovery", self._read_table, forget)
            await self._scan(recovered)
        except Exception as error:  # the root of a task: a cache that cannot be read starts empty
            log.log(level_of(error), "%s: starts empty, the table could not be read", self._name, exc_info=True)
            forget, recovered = True, await in_thread("l2-recovery", self._read_table, True)
        await in_thread("l2-recovery", finish, recovered)
        index = SlotIndex(self._superblock, recovered.core, recovered.spaces, self._pages, self._environment.clock)
        if forget:
            await index.clear()
        index.write_dirty_pages()
        self.index = index
        self._figures["recovery_ms"] = int((asyncio.get_running_loop().time() - started) * 1000)
        self._recovered.set()
        found = recovered.youngest_first
        for start in range(0, len(found), INVENTORY_SLICE):
            self._inventory.found(index.describe(found[start : start + INVENTORY_SLICE]))
            await asyncio.sleep(0)
        self._inventory.complete()
        if self._config.meta_verify_on_load:
            await self._verify(index)
        await index.erase_stale_headers(self._background)

    def _read_table(self, forget: bool) -> Recovered:
        return read_table(self._device, self._superblock, self._slots, self._frame_limit_bytes, forget=forget)

    async def _scan(self, recovered: Recovered) -> None:
        """Reads the headers of the slots that unreadable table pages describe."""
        slots = recovered.core.slots_to_scan()
        self._figures["scanned_slots"] = len(slots)
        if slots:
            log.warning("%s: the table does not tell of %d slots; their headers do", self._name, len(slots))
            await scan(self._loads, self._superblock, recovered, slots)

    async def _verify(self, index: SlotIndex) -> None:
        """Drops objects in the table whose slot header differs. Loads would find them, too, one by one."""
        memory = mmap.mmap(-1, HEADERS_AT_ONCE * FRAME_HEADER_BYTES)
        headers = _native.buffer_address(memoryview(memory))
        slot = 0
        while True:
            slots, generations = index.core.claimed_from(slot, HEADERS_AT_ONCE)
            if not slots:
                return
            results = await self._loads.wait(index.core.read_headers(self._loads.io, slots, headers), memory)
            wrong = index.core.misplaced(slots, generations, headers, *results)
            if wrong:
                keys = [key for key, _ in index.describe(wrong)]
                log.warning("%s: %d objects are not where the table says; they are gone", self._name, len(keys))
                self._inventory.lost(keys)
                await index.remove(keys)
            slot = slots[-1] + 1

    async def _ready(self) -> SlotIndex:
        await self._recovered.wait()
        assert self.index is not None
        return self.index

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        index = await self._ready()
        await index.wait_for_slots(len(keys))
        outcomes: list[StoreOutcome] = []
        heads = self._heads.pop() if self._heads else mmap.mmap(-1, HEADERS_AT_ONCE * FRAME_HEADER_BYTES)
        for start in range(0, len(keys), HEADERS_AT_ONCE):
            part = slice(start, start + HEADERS_AT_ONCE)
            self._note_io()
            memory = _native.buffer_address(memoryview(heads))
            codes, error = await index.store(self._stores, keys[part], buffers[part], memory)
            self._note_io()
            self._unsynced = True
            outcomes += [_STORE_OUTCOMES[code] for code in codes]
            if error:
                self._log_once(error, f"cannot write: {os.strerror(error)} (errno {error})")
        self._heads.append(heads)
        return outcomes

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        index = await self._ready()
        self._note_io()
        codes, error = await index.load(self._loads, keys, buffers)
        self._note_io()
        if error:
            self._log_once(error, f"cannot read: {os.strerror(error)} (errno {error})")
        return [_LOAD_OUTCOMES[code] for code in codes]

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [size or None for size in (await self._ready()).sizes(keys)]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        await (await self._ready()).remove(keys)
        return [True] * len(keys)

    async def clear(self) -> tuple[int, int]:
        return await (await self._ready()).clear()

    # ---- recency and durability --------------------------------------------------------------------------------------
    def _note_io(self) -> None:
        self._last_io = asyncio.get_running_loop().time()

    async def _checkpoint_periodically(self) -> None:
        """Writes times of use when the device has been quiet, or after an interval at the latest."""
        loop = asyncio.get_running_loop()
        interval = self._config.meta_checkpoint_interval_sec
        quiet_seconds = self._config.meta_idle_quiet_ms / 1000
        index = await self._ready()
        while True:
            await asyncio.sleep(interval)
            latest = loop.time() + interval
            idle_seconds = loop.time() - self._last_io
            while idle_seconds < quiet_seconds and loop.time() < latest:
                await asyncio.sleep(quiet_seconds - idle_seconds)
                idle_seconds = loop.time() - self._last_io
            await index.erase_stale_headers(self._background)
            index.write_dirty_pages()

    async def _sync_now_and_then(self) -> None:
        """Flushes every SYNC_SECONDS: what was confirmed before that survives a power failure."""
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            if self._unsynced:
                self._unsynced = False
                error = await self._background.sync()
                if error:
                    self._log_once(("sync", error), f"cannot flush the device: {os.strerror(error)}")

    def _log_once(self, kind: Hashable, sentence: str) -> None:
        if self._log_limiter.due(kind):
            log.warning("%s: %s: %s", self._name, self._config.device_path, sentence)
