"""Encodes what is stored and decodes what is loaded, on native threads of its own (docs/formats/serde.md).

What is stored is a frame again, under a key of its own: the name of the chain is a part of its namespace. So objects of
another chain, or of none, are other objects: nobody asks for them, and several servers with different chains can share
a backend.

Invariants:
- An adapter reads and writes memory of this layer only, which is used again when the adapter has really ended.
- The caller's memory is touched until its `Operation.lent` has been given back, and never afterwards.
- A loaded object is what a verified frame says that it was before it was encoded, or it is not LOADED.

What cannot be read, for lack of its key, stays for who can. A store of the same object replaces it: else its name would
be taken until eviction, which lookups put off.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key import SERDE_MARK, Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError
from lmcache.l2.completions import Completions
from lmcache.l2.layers.breaker import BreakerLayer
from lmcache.l2.layers.capacity import CapacityLayer
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.memory_pool import MemoryPool
from lmcache.l2.layers.operation import Batch, Operation, SharedRelease
from lmcache.serde.base import Chain
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.l2")

LoadBatch: TypeAlias = Callable[[Batch, Operation], Awaitable[list[LoadOutcome]]]

_NAMESPACES_KEPT = 256
_LOG_SECONDS = 60.0  # between two lines of a kind
_REFRESH_SECONDS = 5.0  # between two looks at settings that may change
_MAGIC_BYTES = 8  # at the beginning of a frame
_CORRUPT, _UNREADABLE = 1, 2  # SerdeFault
_LOAD_OUTCOMES = {0: LoadOutcome.LOADED, _CORRUPT: LoadOutcome.CORRUPT, _UNREADABLE: LoadOutcome.MISSING}


class Lent(NamedTuple):
    """Memory of this layer."""

    memory: mmap.mmap
    parts: list[memoryview]  # one for each object of a batch


class Coded(NamedTuple):
    """What became of each frame of a batch: its bytes, 0 with a fault."""

    sizes_bytes: Sequence[int]
    faults: bytes


def _stored_namespace(serde: str, served: Namespace) -> Namespace:
    return replace(served, layout=f"{served.layout}{SERDE_MARK}{serde}")


def _templates(serde: str, stored: Namespace) -> bytes:
    """Headers of the served and of the stored namespace, one behind the other."""
    served = replace(stored, layout=stored.layout.removesuffix(f"{SERDE_MARK}{serde}"))
    return _native.frame_template(served.encode(), served.digest, 0) + _native.frame_template(
        stored.encode(), stored.digest, 0, serde
    )


def default_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


class SerdeLayer:
    def __init__(
        self, context: AdapterContext, chain: Chain, stores: CapacityLayer, loads: LoadBatch, deletes: BreakerLayer
    ) -> None:
        """`loads` fills a batch from the adapter; `deletes` runs what moves corrupt objects aside."""
        self.running: set[asyncio.Future[None]] = set()  # one for each batch that has memory of this layer
        self.chain = chain
        self.is_draining = False
        self._context = context
        self._stores = stores
        self._loads = loads
        self._deletes = deletes
        self._memory = MemoryPool(limits.L2_SERDE_MEMORY_BYTES)
        self._queue: Completions[Coded] | None = None
        self._native: _native.SerdeQueue | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._refresh_from = 0.0
        self._log_limiter = LogLimiter(_LOG_SECONDS, context.clock)
        self._unreadable: dict[ObjectKey, None] = {}  # the longest known first
        self._stored = lru_cache(_NAMESPACES_KEPT)(partial(_stored_namespace, chain.name))
        self._templates = lru_cache(_NAMESPACES_KEPT)(partial(_templates, chain.name))
        self._largest_bytes = lru_cache(_NAMESPACES_KEPT)(chain.native.max_frame_bytes)
        self._raw_bytes = context.metrics.l2_serde_raw.labels(context.name)
        self._stored_bytes = context.metrics.l2_serde_stored.labels(context.name)

    def open(self) -> None:
        """On the loop that uses it."""
        self._native = _native.SerdeQueue(self.chain.native, self._context.config.serde_threads or default_threads())
        self._queue = Completions(self._native, Coded)

    async def close(self) -> None:
        """Waits for everything that is being encoded or decoded. Idempotent, also before `open`."""
        if self._queue is not None:
            await self._queue.close()

    def stored_keys(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """The keys under which objects are stored."""
        stored = self._stored
        return [ObjectKey(stored(namespace), chunk_hash) for namespace, chunk_hash in keys]

    # ---- batches; keys are those of stored objects -------------------------------------------------------------------
    async def store(self, batch: Batch, operation: Operation) -> list[StoreOutcome]:
        outcomes = [StoreOutcome.FAILED] * len(batch)
        views = await self._lend(batch, operation)
        if views is None:
            return outcomes
        with self._inner(views, operation) as inner:
            coded = await self._run(True, batch.keys, batch.buffers, views.parts, (operation, inner))
            if coded is None or self.is_draining:
                return outcomes
            if failed := len(batch) - coded.faults.count(0):
                self._warn("%d of %d objects could not be encoded and are not stored", failed, len(batch))
            in_the_way = await self._remove_unreadable(batch.keys)
            whole = [
                index
                for index, (key, fault) in enumerate(zip(batch.keys, coded.faults, strict=True))
                if not fault and key not in in_the_way
            ]
            encoded = Batch(
                [batch.keys[index] for index in whole],
                [views.parts[index][: coded.sizes_bytes[index]] for index in whole],
            )
            self._raw_bytes.inc(sum(batch.buffers[index].nbytes for index in whole))
            self._stored_bytes.inc(sum(view.nbytes for view in encoded.buffers))
            if whole:
                for index, outcome in zip(whole, await self._stores.store(encoded, inner), strict=True):
                    outcomes[index] = outcome
        return outcomes

    async def load(self, batch: Batch, operation: Operation) -> list[LoadOutcome]:
        views = await self._lend(batch, operation)
        if views is None:
            return [LoadOutcome.FAILED] * len(batch)
        for view in views.parts:
            view[:_MAGIC_BYTES] = bytes(_MAGIC_BYTES)  # what lay there before is nobody's frame
        with self._inner(views, operation) as inner:
            ledger = self._context.ledger
            inner.lent.on_release(partial(ledger.let_go, ledger.hold(batch.keys)))
            outcomes = await self._loads(Batch(batch.keys, views.parts), inner)
            loaded = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.LOADED]
            if loaded:
                part = batch.pick(loaded)
                sources = [views.parts[index] for index in loaded]
                coded = await self._run(False, part.keys, sources, part.buffers, (operation, inner))
                faults = coded.faults if coded is not None else bytes([0xFF]) * len(loaded)
                for index, fault in zip(loaded, faults, strict=True):
                    outcomes[index] = _LOAD_OUTCOMES.get(fault, LoadOutcome.FAILED)
                await self._settle(part.keys, faults)
        return outcomes

    async def _settle(self, keys: Sequence[ObjectKey], faults: bytes) -> None:
        """Counts and remembers what cannot be read, and has the adapter move aside what is corrupt."""
        if unreadable := [key for key, fault in zip(keys, faults, strict=True) if fault == _UNREADABLE]:
            self._context.metrics.l2_serde_unreadable.labels(self._context.name).inc(len(unreadable))
            self._unreadable.update(dict.fromkeys(unreadable))
            while len(self._unreadable) > limits.MAX_L2_UNREADABLE_OBJECTS:
                del self._unreadable[next(iter(self._unreadable))]
        corrupt = [key for key, fault in zip(keys, faults, strict=True) if fault == _CORRUPT]
        if corrupt:
            delete = partial(self._context.adapter.delete, corrupt, corrupt=True)
            try:
                await self._deletes.run(delete, self._context.operation(forced=True))
            except AdapterError:
                pass  # they stay there, and are found corrupt again

    async def _remove_unreadable(self, keys: Sequence[ObjectKey]) -> set[ObjectKey]:
        """Deletes what these are to replace. Returns what is still there: most adapters keep what they have."""
        unreadable = [key for key in keys if key in self._unreadable]
        if not unreadable:
            return set()
        try:
            delete = partial(self._context.adapter.delete, unreadable)
            gone = await self._deletes.run(delete, self._context.operation())
        except AdapterError:
            return set(unreadable)
        for key, is_gone in zip(unreadable, gone, strict=True):
            if is_gone:
                self._unreadable.pop(key, None)
        return {key for key in unreadable if key in self._unreadable}

    # ---- memory and threads ------------------------------------------------------------------------------------------
    async def _lend(self, batch: Batch, operation: Operation) -> Lent | None:
        """None when the deadline came first, there is no memory, or a serde from outside does not say how much it
        needs."""
        try:
            sizes_bytes = [self._largest_bytes(buffer.nbytes) for buffer in batch.buffers]
        except RuntimeError:
            return None
        memory = await self._memory.take(sum(sizes_bytes), operation.deadline)
        if memory is None:
            self._warn("there were no %d bytes of memory for encoded objects within the deadline", sum(sizes_bytes))
            return None
        ends = list(accumulate(sizes_bytes))
        view = memoryview(memory)
        return Lent(memory, [view[end - size : end] for end, size in zip(ends, sizes_bytes, strict=True)])

    @contextmanager
    def _inner(self, lent: Lent, outer: Operation) -> Iterator[Operation]:
        """An operation with memory of this layer, which ends when every user of that has ended."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.add(ended)

        def end() -> None:
            self._memory.give_back(lent.memory)
            self.running.discard(ended)
            ended.set_result(None)

        inner = Operation(outer.deadline, SharedRelease(end), outer.forced)
        try:
            yield inner
        finally:
            inner.lent.done()

    def _refresh(self) -> None:
        """Has a thread look for changed settings. This batch does not wait for it."""
        loop = asyncio.get_running_loop()
        is_busy = self._refreshing is not None and not self._refreshing.done()
        if self.chain.may_change and not is_busy and loop.time() >= self._refresh_from:
            self._refresh_from = loop.time() + _REFRESH_SECONDS
            self._refreshing = loop.run_in_executor(None, self.chain.refresh)

    async def _run(
        self,
        encodes: bool,
        keys: Sequence[ObjectKey],
        sources: Sequence[memoryview],
        destinations: Sequence[memoryview],
        users: Sequence[Operation],
    ) -> Coded | None:
        """None when the deadline came first: it goes on, and what was lent to `users` stays lent until it ends."""
        assert self._native is not None and self._queue is not None, "not open"
        self._refresh()
        namespaces = list(dict.fromkeys(key.namespace for key in keys))
        positions = {namespace: index for index, namespace in enumerate(namespaces)}
        number = self._native.submit(
            encodes,
            list(sources),
            list(destinations),
            b"".join(key.chunk_hash for key in keys),
            b"".join(self._templates(namespace) for namespace in namespaces),
            array("I", [positions[key.namespace] for key in keys]),
        )
        coding = self._queue.wait(number, (sources, destinations))
        for user in users:
            user.lent.add_user()
            coding.add_done_callback(lambda _, lent=user.lent: lent.done())  # type: ignore[misc]
        deadline = users[0].deadline
        done, _ = await asyncio.wait({coding}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not done:
            self._context.metrics.timeouts.inc()
            self._warn("%d objects were not %s within the deadline", len(keys), "encoded" if encodes else "decoded")
        return coding.result() if done else None

    def _warn(self, sentence: str, *values: object) -> None:
        """A line of each kind once a minute at most."""
        if self._log_limiter.due(sentence):
            log.warning("%s: %s (serde %s)", self._context.name, sentence % values, self.chain.name)
