"""Runs one adapter: what it is asked, in which order and until when, what it holds, eviction, draining.

Everything here belongs to one asyncio loop. Faults of the backend become outcomes; only what an operator asks for
raises.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, CapacityError, ConfigError
from lmcache.eviction.base import EvictionPolicy
from lmcache.eviction.limits import SaltLimits
from lmcache.eviction.registry import build_policy
from lmcache.l2.accounting import Ledger, Room
from lmcache.l2.admission import Admission
from lmcache.l2.breaker import Breaker
from lmcache.l2.operations import Hold, Lane
from lmcache.l2.registry import ConfiguredAdapter
from lmcache.l2.retries import repeat
from lmcache.telemetry.logs import level_of
from lmcache.telemetry.metrics import Metrics

T = TypeVar("T")

log = logging.getLogger("lmcache.l2")

DELETE_SLICE = 1024
_THERE = (StoreOutcome.STORED, StoreOutcome.ALREADY_THERE)


def _nothing() -> None:
    pass


def _salt_of(key: ObjectKey) -> str:
    return key.namespace.cache_salt


class Runner:
    def __init__(
        self, configured: ConfiguredAdapter, metrics: Metrics, clock: Clock, salt_limits: SaltLimits | None = None
    ) -> None:
        """`salt_limits` is what IsolatedLRU goes by."""
        self.config = configured.config
        self.name = self.config.name
        self._adapter = configured.adapter
        self._metrics = metrics
        self._clock = clock
        self._loads = Lane("loads", self.name, limits.L2_MAX_READS_IN_FLIGHT, self._breaker(), metrics.timeouts)
        self._stores = Lane("stores", self.name, limits.L2_MAX_WRITES_IN_FLIGHT, self._breaker(), metrics.timeouts)
        eviction = self.config.eviction
        policy: EvictionPolicy[ObjectKey] = build_policy(
            eviction.eviction_policy if eviction else "noop", _salt_of, salt_limits or SaltLimits()
        )
        self.ledger = Ledger(policy, self._adapter.overhead_bytes)
        self._admission = Admission(self.name, self.ledger, self.evict, metrics, clock)
        self._inventory_complete = asyncio.Event()
        self._evicting = asyncio.Lock()
        self._draining = False
        self._trials: set[asyncio.Task[None]] = set()

    # ---- life --------------------------------------------------------------------------------------------------------
    async def open(self) -> None:
        """ConfigError or ResourceError: the backend cannot be used."""
        try:
            await asyncio.wait_for(self._adapter.open(self), self.config.timeout_seconds)
        except asyncio.TimeoutError:
            raise self.config.silent() from None
        self._take_capacity()
        if self.config.eviction and self.ledger.capacity.limit_bytes is None:
            await self._adapter.close()
            raise ConfigError(
                f'{self.config.where}: "eviction" needs "max_capacity_gb" above 0; this adapter has no limit itself.'
            )

    def _take_capacity(self) -> None:
        """The adapter's, bounded by what is configured. Before the first object is told, which may be before `open`
        goes on."""
        capacity, configured_bytes = self._adapter.capacity, self.config.capacity_bytes
        if configured_bytes is not None:
            capacity = replace(capacity, limit_bytes=min(configured_bytes, capacity.limit_bytes or configured_bytes))
        self.ledger.capacity = capacity

    async def drain(self, seconds: float) -> bool:
        """Refuses new stores and loads and waits for those under way. False when some did not end in time: their
        buffers are still in use."""
        self._draining = True
        running = self._loads.running | self._stores.running
        if running:
            await asyncio.wait(running, timeout=max(0.0, seconds))
        return not (self._loads.running or self._stores.running)

    async def close(self, seconds: float) -> bool:
        """After `drain`. Objects that are not to persist are deleted, as many as go in half of that time. False when
        the adapter did not end in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if not self.config.persist:
            await self._delete_at_end(seconds / 2)
        task = loop.create_task(self._adapter.close())
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - loop.time()))
        if done and (fault := task.exception()) is not None:
            log.log(level_of(fault), "%s: closing failed", self.name, exc_info=fault)
        return bool(done)

    async def _delete_at_end(self, seconds: float) -> None:
        keys = self.ledger.keys()
        deleting = asyncio.get_running_loop().create_task(self._delete(keys))
        done, _ = await asyncio.wait({deleting}, timeout=max(0.0, seconds))
        if not done:
            deleting.cancel()  # between two slices; one that is under way ends with the adapter
        left = len(self.ledger)
        if left:
            log.warning(
                "%s: %d of %d objects were not deleted within %.1f s, although persist_enabled is false; "
                "the next server with this backend finds them",
                *(self.name, left, len(keys), seconds),
            )

    # ---- the inventory that the adapter fills ------------------------------------------------------------------------
    def found(self, objects: Sequence[tuple[ObjectKey, int]]) -> None:
        self._take_capacity()
        self.ledger.add_older(objects)

    def known(self) -> list[ObjectKey]:
        return self.ledger.keys()

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.ledger.remove(key)

    def complete(self) -> None:
        self._inventory_complete.set()
        log.info("%s: holds %d objects, %d bytes", self.name, len(self.ledger), self.ledger.held_bytes)
        self._show_usage()

    async def wait_for_inventory(self) -> None:
        """Until the adapter has told what it holds, or its deadline has passed."""
        try:
            await asyncio.wait_for(self._inventory_complete.wait(), self.config.timeout_seconds)
        except asyncio.TimeoutError:
            pass

    # ---- operations --------------------------------------------------------------------------------------------------
    async def store(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], release: Callable[[], None]
    ) -> list[StoreOutcome]:
        """Stores what is not there yet. `release` is called once, when the buffers are no longer needed."""
        room = Room(self.ledger)

        def ended() -> None:
            room.give_back()
            release()

        hold = Hold(ended)
        outcomes = [StoreOutcome.FAILED] * len(keys)
        try:
            if not self._draining:
                await self._store(keys, buffers, outcomes, room, hold)
        finally:
            hold.done()
            self._show_usage()
        return outcomes

    async def load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], release: Callable[[], None]
    ) -> list[LoadOutcome]:
        """Fills the buffers. `release` is called once, when nothing writes into them any more. Until then the objects
        are not evicted."""

        def ended() -> None:
            self.ledger.let_go(ended)
            release()

        self.ledger.hold(ended, keys)
        hold = Hold(ended)
        outcomes = [LoadOutcome.FAILED] * len(keys)
        try:
            if not self._draining:
                await self._load(keys, buffers, outcomes, hold)
        finally:
            hold.done()
        return outcomes

    @property
    def verifies(self) -> bool:
        """Whether what it loads has been verified in place. Adapters that do not say so are not believed."""
        return bool(getattr(self._adapter, "verifies", False))

    @property
    def takes_stores(self) -> bool:
        """Whether stores are neither suspended nor refused for lack of room."""
        return not (self._stores.breaker.is_open or self._admission.is_full)

    @property
    def may_store(self) -> bool:
        """Whether a store that begins now would be tried, as one of many or to see whether stores can go on."""
        return self._stores.breaker.would_admit and self._admission.would_try

    def holds(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """What is known to be there."""
        return self.ledger.known(keys)

    async def probe(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """What is known is believed; about the rest the backend is asked, as another server may have stored it."""
        there = self.ledger.known(keys)
        unknown = [key for key, known in zip(keys, there, strict=True) if not known]
        if not unknown or self._draining:
            return there
        if self._loads.breaker.is_open:
            self._try_loads(partial(self._adapter.probe, unknown))
            return there
        nothing: list[int | None] = [None] * len(unknown)
        sizes = await self._call(self._loads, partial(self._adapter.probe, unknown), nothing)
        self.ledger.add_older([(key, size) for key, size in zip(unknown, sizes, strict=True) if size is not None])
        return [key in self.ledger for key in keys]

    def used(self, keys: Sequence[ObjectKey]) -> None:
        """A prompt was used, of which the backend may hold some: keys in prefix order."""
        self.ledger.touch(keys)

    async def corrupted(self, keys: Sequence[ObjectKey], reason: str) -> None:
        """Frames that did not verify after they were loaded: counted, said, moved aside. Also while stores are
        suspended: the adapter must hear of them, or it would be asked for them again and again."""
        delete = partial(self._adapter.delete, keys, corrupt=True)
        try:
            await self._stores.run(delete, Hold(_nothing), self._deadline(), asked_for=True)
        except AdapterError as error:
            log.debug("%s: corrupt objects could not be moved aside: %s", self.name, error)
        self._note_corrupt(keys, reason)

    async def clear(self) -> tuple[int, int]:
        """Deletes everything, objects of other servers in the same backend too: (objects, bytes). AdapterError."""
        known = self.ledger.keys()
        cleared = await self._stores.run(self._adapter.clear, Hold(_nothing), self._deadline(), asked_for=True)
        self._stores.ok()
        self.lost(known)
        self._admission.note_room()
        self._show_usage()
        return cleared

    async def evict(self, wanted_bytes: int) -> tuple[int, int]:
        """Frees at least that many bytes if the policy and the backend let it: (objects, bytes)."""
        async with self._evicting:
            victims = self.ledger.victims(wanted_bytes)
            objects, freed_bytes = await self._delete(victims)
        self._metrics.l2_evicted_objects.labels(self.name).inc(objects)
        self._show_usage()
        return objects, freed_bytes

    async def evict_above_watermark(self) -> tuple[int, int]:
        eviction = self.config.eviction
        if eviction is None or self.ledger.fraction <= eviction.trigger_watermark:
            return 0, 0
        return await self.evict(int(eviction.eviction_ratio * self.ledger.used_bytes))

    def check_idle(self) -> None:
        """AssertionError unless no operation is under way and nothing is held for one."""
        held = {
            "loads": len(self._loads.running),
            "stores": len(self._stores.running),
            "trials": len(self._trials),
            "read": self.ledger.read_objects,
            "reserved": self.ledger.reserved_bytes,
        }
        assert not any(held.values()), f"{self.name} is not idle: {held}"
        self.ledger.check()

    def status(self) -> dict[str, Any]:
        """Figures for operators. May be called from any thread."""
        return {
            "name": self.name,
            "type": self.config.type,
            "objects": len(self.ledger),
            "used_bytes": self.ledger.held_bytes,
            "capacity_bytes": self.ledger.capacity.limit_bytes,
            "inventory_complete": self._inventory_complete.is_set(),
            "full": self._admission.is_full,
            "loads_suspended": self._loads.breaker.is_open,
            "stores_suspended": self._stores.breaker.is_open,
            "loads_in_flight": len(self._loads.running),
            "stores_in_flight": len(self._stores.running),
            "abandoned": self._loads.abandoned + self._stores.abandoned,
            **self._adapter.status(),
        }

    # ---- stores ------------------------------------------------------------------------------------------------------
    async def _store(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        outcomes: list[StoreOutcome],
        room: Room,
        hold: Hold,
    ) -> None:
        deadline = self._deadline()
        if self.ledger.capacity.limit_bytes is not None and not self._inventory_complete.is_set():
            remaining = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._inventory_complete.wait(), remaining)
            except asyncio.TimeoutError:
                return
        known = self.ledger.known(keys)
        todo = [index for index, is_known in enumerate(known) if not is_known]
        if len(todo) < len(keys):
            self.ledger.touch([key for key, is_known in zip(keys, known, strict=True) if is_known])
            for index, is_known in enumerate(known):
                if is_known:
                    outcomes[index] = StoreOutcome.ALREADY_THERE
        todo = self._admission.of_possible_size(buffers, outcomes, todo)
        if not todo:
            return
        if not self._admission.may_try():
            self._admission.refuse(outcomes, todo)
            return
        charges = {index: self.ledger.capacity.charge(buffers[index].nbytes) for index in todo}
        admitted = await self._admission.make_room(keys, todo, charges, room)
        refused = todo[len(admitted) :]
        await self._write(keys, buffers, outcomes, admitted, room, hold, deadline)
        if self.config.eviction and any(outcomes[index] is StoreOutcome.FULL for index in admitted):
            # The medium is smaller than the capacity that was configured: make room there, too.
            wanted_bytes = sum(charges[index] for index in admitted)
            await self.evict(max(wanted_bytes, int(self.config.eviction.eviction_ratio * self.ledger.used_bytes)))
            again = [index for index in admitted if outcomes[index] is StoreOutcome.FULL]
            await self._write(keys, buffers, outcomes, again, room, hold, deadline)
        done = [index for index in admitted if outcomes[index] in _THERE]
        full = refused + [index for index in admitted if outcomes[index] is StoreOutcome.FULL]
        if full:
            self._admission.refuse(outcomes, full)
            self._admission.note_full("max_capacity_gb" if refused else "no space left where it stores")
        elif done:
            self._admission.note_room()

    async def _write(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        outcomes: list[StoreOutcome],
        todo: list[int],
        room: Room,
        hold: Hold,
        deadline: float,
    ) -> None:
        async def store(some_keys: Sequence[ObjectKey], some_buffers: Sequence[memoryview]) -> list[StoreOutcome]:
            """Counts what is there when the write ends, also when nobody waits for it any more."""
            results = await self._adapter.store(some_keys, some_buffers)
            there = [index for index, result in enumerate(results) if result in _THERE]
            if there:
                stored = some_keys if len(there) == len(some_keys) else [some_keys[index] for index in there]
                room.stored(stored, [sizes[key] for key in stored])
            return results

        sizes = {keys[index]: buffers[index].nbytes for index in todo}  # a buffer may be gone when a late write ends
        try:
            await repeat(self._stores, store, keys, buffers, outcomes, todo, hold, deadline)
        except CapacityError:
            for index in todo:
                if outcomes[index] is StoreOutcome.FAILED:
                    outcomes[index] = StoreOutcome.FULL

    # ---- loads -------------------------------------------------------------------------------------------------------
    async def _load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], outcomes: list[LoadOutcome], hold: Hold
    ) -> None:
        if self._loads.breaker.is_open:
            self._try_loads(partial(self._load_aside, keys[0], buffers[0].nbytes))
            return
        await repeat(
            self._loads, self._adapter.load, keys, buffers, outcomes, list(range(len(keys))), hold, self._deadline()
        )
        if outcomes.count(LoadOutcome.LOADED) == len(keys):
            self.ledger.touch(keys)
            return
        self.ledger.touch([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.LOADED])
        self.lost([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.MISSING])
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]
        if corrupt:
            self._note_corrupt(corrupt, "not the whole frame of its key")

    def _try_loads(self, operation: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Whether suspended loads can go on is found out behind the back of who asks: nobody waits for it."""
        if self._loads.breaker.admits():
            task = asyncio.get_running_loop().create_task(self._trial(operation))
            self._trials.add(task)
            task.add_done_callback(self._trials.discard)

    async def _trial(self, operation: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await self._loads.run(operation, Hold(_nothing), self._deadline(), asked_for=True)
        except AdapterError:
            return
        self._loads.ok()
        self._show_usage()

    async def _load_aside(self, key: ObjectKey, size_bytes: int) -> None:
        """Loads an object into memory that nobody else has: it may be late."""
        (outcome,) = await self._adapter.load([key], [memoryview(mmap.mmap(-1, size_bytes))])
        if outcome is LoadOutcome.FAILED:
            raise AdapterError("the trial failed")

    def _note_corrupt(self, keys: Sequence[ObjectKey], reason: str) -> None:
        self.lost(keys)
        self._metrics.corrupt_frames.labels("l2").inc(len(keys))
        log.warning(
            "%s: %d corrupt objects moved aside, the first: %s (%s)",
            self.name,
            len(keys),
            keys[0].chunk_hash.hex(),
            reason,
        )

    async def _call(self, lane: Lane, call: Callable[[], Coroutine[Any, Any, T]], otherwise: T) -> T:
        """An operation without buffers, once; `otherwise` on a fault."""
        try:
            result = await lane.run(call, Hold(_nothing), self._deadline())
        except AdapterError:
            return otherwise
        lane.ok()
        return result

    async def _delete(self, keys: Sequence[ObjectKey]) -> tuple[int, int]:
        objects = freed_bytes = 0
        for start in range(0, len(keys), DELETE_SLICE):
            part = keys[start : start + DELETE_SLICE]
            gone = await self._call(self._stores, partial(self._adapter.delete, part), [False] * len(part))
            for key, is_gone in zip(part, gone, strict=True):
                if is_gone:
                    objects += 1
                    freed_bytes += self.ledger.remove(key)
        return objects, freed_bytes

    # ---- small things ------------------------------------------------------------------------------------------------
    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.config.timeout_seconds

    def _breaker(self) -> Breaker:
        return Breaker(
            self._clock,
            failures=limits.L2_BREAKER_FAILURES,
            open_seconds=limits.L2_BREAKER_OPEN_SECONDS,
            max_open_seconds=limits.L2_BREAKER_MAX_OPEN_SECONDS,
        )

    def _show_usage(self) -> None:
        self._metrics.l2_usage_bytes.labels(self.name).set(self.ledger.held_bytes)
        suspended = self._loads.breaker.is_open or self._stores.breaker.is_open
        self._metrics.l2_breaker_open.labels(self.name).set(suspended)
        self._metrics.l2_is_full.labels(self.name).set(self._admission.is_full)
        figures = self._adapter.status()
        if "buffered_fallbacks" in figures:
            self._metrics.l2_buffered_fallbacks.labels(self.name).set(figures["buffered_fallbacks"])
