"""Runs one adapter: opens and closes it, knows what it is known to hold, and what the storage loop asks of it.

Everything here belongs to one asyncio loop. Faults of the backend become outcomes; only what an operator asks for
raises. Deadlines, retries, limits and capacity are layers between this and the adapter: l2/layers/stack.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import MAX_SERDE_NAME_CHARACTERS, Namespace, ObjectKey, accepted_lossy_serde, stored_serde
from lmcache.core.outcome import LoadOutcome, MissReason, StoreOutcome
from lmcache.core.salt_limits import SaltLimits
from lmcache.errors import AdapterError, ConfigError, DeadlineError
from lmcache.l2.accounting import Ledger
from lmcache.l2.adapter import NO_FOLDERS, EndsLoads, FollowsHints, ObjectColumns, PublishesFigures, RegistersMemory
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.l2.adapter_types import ConfiguredAdapter
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.deletion import DELETE_SLICE_OBJECTS
from lmcache.l2.layers.operation import Batch, Operation, SharedRelease, Start
from lmcache.l2.layers.stack import LayerStack
from lmcache.telemetry.logs import level_of
from lmcache.telemetry.metrics import L2Metrics

log = logging.getLogger("lmcache.l2")


class ProbeAnswer(NamedTuple):
    """Which objects exist. `fault`: why the backend did not say so, and the answer is what is known here alone."""

    exist: list[bool]
    fault: MissReason | None = None


class Runner:
    def __init__(
        self,
        configured: ConfiguredAdapter,
        metrics: L2Metrics,
        clock: Clock,
        salt_limits: SaltLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`salt_limits` is what IsolatedLRU goes by; `rng` spreads retries."""
        self.name = configured.config.name
        self.adapter = configured.adapter
        self.ledger = Ledger(configured.config.eviction_policy, self.adapter.overhead_bytes, salt_limits)
        self.context = AdapterContext(
            configured.config, self.adapter, self.ledger, metrics, clock, rng or random.Random(), self.publish
        )
        self.layers = LayerStack(self.context, configured.serde, self._load_batch)
        self._serde = self.layers.serde
        self._other_serdes: set[str] = set()  # that wrote objects which were found
        self._inventory_complete = asyncio.Event()
        self._draining = False
        self._probe_seconds = metrics.l2_probe.labels(self.name)

    @property
    def config(self) -> AdapterConfig:
        return self.context.config

    # ---- open, drain, close ------------------------------------------------------------------------------------------
    def lend_memory(self, address: int, size_bytes: int) -> None:
        """Calls `RegistersMemory.lend_memory`, if the adapter is one."""
        if isinstance(self.adapter, RegistersMemory):
            self.adapter.lend_memory(address, size_bytes)

    async def open(self) -> None:
        """ConfigError or ResourceError: the backend cannot be used."""
        if self._serde:
            self._serde.open()
        try:
            await asyncio.wait_for(self.adapter.open(self), self.config.timeout_seconds)
        except asyncio.TimeoutError:
            raise self.config.timeout_error() from None
        self._take_capacity()
        capacity = self.ledger.capacity
        if self.config.eviction and capacity.limit_bytes is None and capacity.limit_objects is None:
            await self.adapter.close()
            raise ConfigError(
                f'{self.config.where}: "eviction" needs "max_capacity_gb" above 0; this adapter has no limit itself.'
            )

    def _take_capacity(self) -> None:
        """The adapter's, bounded by what is configured. Before the first object is reported, which may be before `open`
        goes on."""
        capacity, configured_bytes = self.adapter.capacity, self.config.limit_bytes
        if configured_bytes is not None:
            capacity = replace(capacity, limit_bytes=min(configured_bytes, capacity.limit_bytes or configured_bytes))
        self.ledger.capacity = capacity

    async def drain(self, seconds: float) -> bool:
        """Refuses new stores and loads and waits for those under way; of an adapter that can end them, they end. False
        when some did not end in time: their buffers are still in use."""
        self._draining = True
        self.layers.close_reads()
        if isinstance(self.adapter, EndsLoads):
            self.adapter.end_loads()
        if self._serde:
            self._serde.is_draining = True
        if running := self._running:
            await asyncio.wait(running, timeout=max(0.0, seconds))
        return not self._running

    @property
    def _running(self) -> set[asyncio.Future[Any]]:
        running: set[asyncio.Future[Any]] = {*self.layers.loads.deadline.running, *self.layers.stores.deadline.running}
        return running | self._serde.running if self._serde else running

    async def close(self, seconds: float) -> bool:
        """After `drain`. Objects that are not to persist are deleted, as many as go in half of that time. False when
        the adapter did not end in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if not self.config.persist_enabled:
            await self._delete_at_end(seconds / 2)
        task = loop.create_task(self._close())
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - loop.time()))
        if done and (fault := task.exception()) is not None:
            log.log(level_of(fault), "%s: closing failed", self.name, exc_info=fault)
        return bool(done)

    async def _close(self) -> None:
        await self.adapter.close()
        if self._serde:
            await self._serde.close()

    async def _delete_at_end(self, seconds: float) -> None:
        objects = len(self.ledger)
        deleting = asyncio.get_running_loop().create_task(self.layers.deletion.delete_all())
        done, _ = await asyncio.wait({deleting}, timeout=max(0.0, seconds))
        if not done:
            deleting.cancel()  # between two slices; one that is under way ends with the adapter
        left = len(self.ledger)
        if left:
            log.warning(
                "%s: %d of %d objects were not deleted within %.1f s, although persist_enabled is false; "
                "the next server with this backend finds them",
                *(self.name, left, objects, seconds),
            )

    # ---- the inventory that the adapter fills ------------------------------------------------------------------------
    def found(self, objects: Sequence[tuple[ObjectKey, int]] | ObjectColumns, *, newer: bool = False) -> None:
        self._take_capacity()
        self.ledger.found(objects, newer=newer)
        self._forget_surplus()
        self._note_serdes(objects.namespaces if isinstance(objects, ObjectColumns) else {key[0] for key, _ in objects})

    def _forget_surplus(self) -> None:
        """A backend without a capacity may drop objects by itself, such as by a rule of its bucket, and not every one
        tells: they would be remembered for ever. What is forgotten is asked for when it is needed."""
        capacity = self.ledger.capacity
        if capacity.limit_bytes is None and capacity.limit_objects is None:
            self.ledger.forget(len(self.ledger) - limits.MAX_L2_KNOWN_OBJECTS)

    def _note_serdes(self, namespaces: Iterable[Namespace]) -> None:
        if len(self._other_serdes) >= limits.MAX_SERDES_NAMED:
            return
        own = self.serde_name
        found = {stored_serde(namespace) for namespace in namespaces} - {own} - self._other_serdes
        others = sorted(found)[: limits.MAX_SERDES_NAMED - len(self._other_serdes)]
        self._other_serdes.update(others)
        for other in others:
            log.info(
                '%s: has objects that were stored with the serde %s, and the serde here is "%s": they are not read, '
                "and leave as eviction finds them unused",
                # Others can write there what they like.
                *(self.name, json.dumps(other[:MAX_SERDE_NAME_CHARACTERS]), own),
            )

    def begin_scan(self) -> int:
        return self.ledger.begin_scan()

    def seen(self, digest: bytes, hashes: bytes) -> None:
        self.ledger.seen(digest, hashes)

    def known(
        self, *, unseen_by: int | None = None, passed_over: Mapping[bytes, int] = NO_FOLDERS
    ) -> Iterator[list[ObjectKey]]:
        return self.ledger.pages(unseen_by=unseen_by, passed_over=passed_over)

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        self.ledger.lost(keys)

    def complete(self) -> None:
        self._inventory_complete.set()
        if not self.is_read_only:
            log.info("%s: holds %d objects, %d bytes", self.name, len(self.ledger), self.ledger.held_bytes)
        self.publish()

    async def wait_for_inventory(self, seconds: float | None = None) -> bool:
        """Until the adapter has reported what it holds; False when that took longer than `seconds`, by default its
        deadline."""
        if self._inventory_complete.is_set():
            return True
        try:
            await asyncio.wait_for(self._inventory_complete.wait(), seconds or self.config.timeout_seconds)
        except asyncio.TimeoutError:
            return False
        return True

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], release: Callable[[], None]
    ) -> list[StoreOutcome]:
        """Stores what is not there yet. `release` is called once, when the buffers are no longer needed."""
        lent = SharedRelease(release)
        try:
            return await self._store(Batch(self.stored_keys(keys), buffers), self.context.operation(lent))
        finally:
            lent.done()
            self._forget_surplus()

    def serves(self, namespace: Namespace) -> bool:
        """Whether its objects may be here: a lossy serde is for the namespaces that accept it by name, and those are
        for no other adapter. So what it made of an object never stands for the object itself, on no tier."""
        return accepted_lossy_serde(namespace.layout) == (self._serde.chain.lossy if self._serde else "")

    def _serves(self, keys: Sequence[ObjectKey]) -> list[bool]:
        served = {namespace: self.serves(namespace) for namespace in {key[0] for key in keys}}
        return [served[key.namespace] for key in keys]

    async def _store(self, batch: Batch, operation: Operation) -> list[StoreOutcome]:
        is_bounded = self.ledger.capacity.limit_bytes is not None
        if self._draining or (is_bounded and not await self.wait_for_inventory()):
            return [StoreOutcome.FAILED] * len(batch)
        if self.ledger.are_leaving(batch.keys) and not await self._wait_for_deletes(batch.keys, operation.deadline):
            return [StoreOutcome.FAILED] * len(batch)
        known = self.ledger.known(batch.keys)
        outcomes = [
            StoreOutcome.ALREADY_THERE if is_served else StoreOutcome.FAILED for is_served in self._serves(batch.keys)
        ]
        new = [
            index
            for index, (is_known, outcome) in enumerate(zip(known, outcomes, strict=True))
            if not is_known and outcome is StoreOutcome.ALREADY_THERE
        ]
        if True in known:
            self.ledger.touch([key for key, is_known in zip(batch.keys, known, strict=True) if is_known])
        if new:
            top = self._serde or self.layers.capacity
            for index, outcome in zip(new, await top.store(batch.pick(new), operation), strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _wait_for_deletes(self, keys: Sequence[ObjectKey], deadline: float) -> bool:
        """What is being deleted is stored anew when it is gone. False when that took too long."""
        while self.ledger.are_leaving(keys):
            if not await self.layers.eviction.some_ended(deadline):
                return False
        return True

    async def load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], release: Callable[[], None]
    ) -> list[LoadOutcome]:
        """Fills the buffers. `release` is called once, when nothing writes into them any more. Until then the objects
        are not evicted."""
        keys = self.stored_keys(keys)
        lent = SharedRelease(release)
        lent.on_release(partial(self.ledger.let_go, self.ledger.hold(keys)))
        try:
            if self._draining:
                return [LoadOutcome.FAILED] * len(keys)
            outcomes = [LoadOutcome.MISSING] * len(keys)
            served = list(compress(range(len(keys)), self._serves(keys)))  # others were in L1 when they were looked for
            if served:
                batch = Batch(keys, buffers).pick(served)
                load = self._serde.load if self._serde else self._load_batch
                loaded = await load(batch, self.context.operation(lent))
                self._note_loaded(batch.keys, loaded)
                for index, outcome in zip(served, loaded, strict=True):
                    outcomes[index] = outcome
            return outcomes
        finally:
            lent.done()

    def stored_keys(self, keys: Sequence[ObjectKey]) -> Sequence[ObjectKey]:
        """The keys by which the adapter knows these objects."""
        return self._serde.stored_keys(keys) if self._serde else keys

    async def _load_batch(self, batch: Batch, operation: Operation) -> list[LoadOutcome]:
        """What the adapter has, without the serde."""
        operation.trial = partial(self._load_aside, batch.keys[:1], [buffer.nbytes for buffer in batch.buffers[:1]])
        return await self.layers.loads.retries.run_batch(self.adapter.load, batch, LoadOutcome.FAILED, operation)

    def _note_loaded(self, keys: Sequence[ObjectKey], outcomes: Sequence[LoadOutcome]) -> None:
        if outcomes.count(LoadOutcome.LOADED) == len(keys):
            self.ledger.touch(keys)
            return
        self.ledger.touch([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.LOADED])
        self.lost([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.MISSING])
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]
        if corrupt:
            self._note_corrupt(corrupt, "not the whole frame of its key")

    async def _load_aside(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> None:
        """Loads into memory that nobody else has: it may be late."""
        outcomes = await self.adapter.load(keys, [memoryview(mmap.mmap(-1, size)) for size in sizes_bytes])
        if LoadOutcome.FAILED in outcomes:
            raise AdapterError("the trial failed")

    async def probe(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Asks like `ask`, where it makes no difference whether the backend answered."""
        return (await self.ask(keys)).exist

    async def ask(self, keys: Sequence[ObjectKey], hint: Hint | None = None) -> ProbeAnswer:
        """What is known is believed; about the rest the backend is asked, as another server may have stored it. `hint`
        is for adapters that follow one."""
        keys = self.stored_keys(keys)
        serves = self._serves(keys)
        if all(serves):
            return await self._ask(keys, hint)
        served = await self._ask(list(compress(keys, serves)), hint)  # of engines with KV of both kinds
        exist = iter(served.exist)
        return ProbeAnswer([is_served and next(exist) for is_served in serves], served.fault)

    async def _ask(self, keys: Sequence[ObjectKey], hint: Hint | None) -> ProbeAnswer:
        known = self.ledger.known(keys)
        unknown = [key for key, is_known in zip(keys, known, strict=True) if not is_known]
        if not unknown or self._draining:
            return ProbeAnswer(known)
        ask: Start[list[int | None]] = partial(self.adapter.probe, unknown)
        layer = self.layers.probes
        if hint is not None and isinstance(self.adapter, FollowsHints):
            ask = partial(self.adapter.probe_hinted, unknown, hint)
            layer = self.layers.waits if hint.wait_seconds > 0 else layer
        operation = self.context.operation()
        operation.trial = ask
        was_suspended = self.layers.loads.breaker.is_suspended
        started = self.context.clock.monotonic()
        try:
            sizes = await layer.run(ask, operation)
        except DeadlineError:
            return ProbeAnswer(known, MissReason.L2_DEADLINE)
        except AdapterError:
            return ProbeAnswer(known, MissReason.L2_SUSPENDED if was_suspended else MissReason.L2_FAILED)
        finally:
            self._probe_seconds.observe(self.context.clock.monotonic() - started)
        if self.is_read_only:
            return ProbeAnswer([size is not None for size in sizes])
        self.ledger.found([(key, size) for key, size in zip(unknown, sizes, strict=True) if size is not None])
        exist = self.ledger.known(keys)
        self._forget_surplus()
        return ProbeAnswer(exist)

    def knows(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which of them the backend has, as far as is known here."""
        return self.ledger.known(self.stored_keys(keys))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """By request: which of them are gone now, also those that never were there. What somebody reads, or holds by a
        pin, stays."""
        stored = self.stored_keys(keys)
        free = [key for key, is_held in zip(stored, self.ledger.held(stored), strict=True) if not is_held]
        gone = set(compress(free, await self.layers.deletion.delete(free))) if free else set()
        self.publish()
        return [key in gone for key in stored]

    async def delete_known(self, spared: Sequence[ObjectKey]) -> tuple[int, int]:
        """What is known to be here but for `spared`: (objects, bytes)."""
        kept = set(self.stored_keys(spared))
        objects, used_bytes = len(self.ledger), self.ledger.used_bytes
        for keys in self.ledger.pages(DELETE_SLICE_OBJECTS):
            if doomed := [key for key in keys if key not in kept]:
                await self.layers.deletion.delete(doomed)
            await asyncio.sleep(0)
        self.publish()
        return max(0, objects - len(self.ledger)), max(0, used_bytes - self.ledger.used_bytes)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """They were used. Unknown ones are ignored."""
        self.ledger.touch(self.stored_keys(keys))

    async def corrupted(self, keys: Sequence[ObjectKey], reason: str) -> None:
        """Frames that did not verify after they were loaded: counted, logged, quarantined. Also while stores are
        suspended: the adapter must hear of them, or it would be asked for them again and again."""
        keys = self.stored_keys(keys)
        delete = partial(self.adapter.delete, keys, corrupt=True)
        try:
            await self.layers.stores.breaker.run(delete, self.context.operation(forced=True))
        except AdapterError as error:
            log.debug("%s: corrupt objects could not be moved aside: %s", self.name, error)
        self._note_corrupt(keys, reason)

    def _note_corrupt(self, keys: Sequence[ObjectKey], reason: str) -> None:
        self.lost(keys)
        self.context.metrics.corrupt_frames.labels("l2").inc(len(keys))
        log.warning(
            "%s: %d corrupt objects moved aside, the first: %s (%s)",
            *(self.name, len(keys), keys[0].chunk_hash.hex(), reason),
        )

    async def clear(self) -> tuple[int, int]:
        """Deletes everything, objects of other servers in the same backend too: (objects, bytes). AdapterError."""
        scan = self.ledger.begin_scan()
        stores = self.layers.stores.breaker
        cleared = await stores.run(self.adapter.clear, self.context.operation(forced=True))
        stores.resume()
        for keys in self.ledger.pages(unseen_by=scan):
            self.ledger.lost(keys)
            await asyncio.sleep(0)
        await self._forget_cleared()
        self.layers.capacity.note_room()
        self.publish()
        return cleared

    async def _forget_cleared(self) -> None:
        """Forgets what was stored or found while the backend was cleared and is not there: a scan may have found
        objects before they were deleted."""
        for keys in self.ledger.pages():
            if not keys:
                continue
            operation = self.context.operation(forced=True)
            try:
                sizes = await self.layers.loads.breaker.run(partial(self.adapter.probe, keys), operation)
            except AdapterError:
                return
            self.ledger.lost([key for key, size in zip(keys, sizes, strict=True) if size is None])

    @property
    def serde_name(self) -> str:
        """The name of what encodes objects here; "" for nothing."""
        return self._serde.chain.name if self._serde else ""

    # ---- what others see ---------------------------------------------------------------------------------------------
    @property
    def verifies(self) -> bool:
        """Whether what it loads has been verified in place. Adapters that do not say so are not believed."""
        return self._serde is not None or bool(getattr(self.adapter, "verifies", False))

    @property
    def is_read_only(self) -> bool:
        """Whether others decide what it has: nothing is stored or deleted there, and nothing remembered of it."""
        return bool(getattr(self.adapter, "is_read_only", False))

    @property
    def most_load_objects(self) -> int:
        """That it takes in one load."""
        return int(getattr(self.adapter, "most_load_objects", limits.MAX_L2_BATCH_OBJECTS))

    @property
    def takes_stores(self) -> bool:
        """Whether stores are neither suspended nor refused for lack of room."""
        return not (self.layers.stores.breaker.is_suspended or self.layers.capacity.is_full)

    @property
    def may_store(self) -> bool:
        """Whether a store that begins now would be tried, as one of many or to see whether stores can go on."""
        return self.layers.stores.breaker.would_admit and self.layers.capacity.would_try

    def check_idle(self) -> None:
        """AssertionError unless no operation is under way and nothing is held for one."""
        stats = self.ledger.stats()
        held = {
            "loads": len(self.layers.loads.deadline.running),
            "stores": len(self.layers.stores.deadline.running),
            "trials": sum(
                len(layer.trials) for layer in (self.layers.loads.breaker, self.layers.probes, self.layers.waits)
            ),
            "encoded": len(self._serde.running) if self._serde else 0,
            "leaving": stats.leaving_objects,
            "read": stats.read_objects,
            "reserved": stats.reserved_bytes,
        }
        assert not any(held.values()), f"{self.name} is not idle: {held}"
        self.ledger.check()

    def status(self) -> dict[str, Any]:
        """Figures for operators. May be called from any thread."""
        loads, stores = self.layers.loads, self.layers.stores
        return {
            "name": self.name,
            "type": self.config.type,
            "serde": self.serde_name,
            "objects": len(self.ledger),
            "used_bytes": self.ledger.held_bytes,
            "capacity_bytes": self.ledger.capacity.limit_bytes,
            "inventory_complete": self._inventory_complete.is_set(),
            "full": self.layers.capacity.is_full,
            "loads_suspended": loads.breaker.is_suspended,
            "stores_suspended": stores.breaker.is_suspended,
            "loads_in_flight": len(loads.deadline.running),
            "stores_in_flight": len(stores.deadline.running),
            "abandoned": loads.deadline.abandoned + stores.deadline.abandoned,
            **self.adapter.status(),
        }

    def publish(self) -> None:
        """Brings metrics that are read up to date. Any thread."""
        metrics, layers = self.context.metrics, self.layers
        metrics.l2_usage_bytes.labels(self.name).set(self.ledger.held_bytes)
        suspended = layers.loads.breaker.is_suspended or layers.stores.breaker.is_suspended
        metrics.l2_breaker_open.labels(self.name).set(suspended)
        for direction, breaker in (("loads", layers.loads.breaker), ("stores", layers.stores.breaker)):
            metrics.l2_breaker_state.labels(self.name, direction).set(breaker.state)
        metrics.l2_is_full.labels(self.name).set(layers.capacity.is_full)
        if isinstance(self.adapter, PublishesFigures):
            self.adapter.publish()
        figures = self.adapter.status()
        if "buffered_fallbacks" in figures:
            metrics.l2_buffered_fallbacks.labels(self.name).set(figures["buffered_fallbacks"])
