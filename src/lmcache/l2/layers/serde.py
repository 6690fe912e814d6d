"""Encodes what is stored and decodes what is loaded (docs/formats/serde.md). What is stored is a frame again, under a
key of its own (`serde_namespaces.py`).

Invariants:
- An adapter reads and writes memory of this layer only, which is used again when the adapter has really ended.
- The caller's memory is touched until its `Operation.lent` has been given back, and never afterwards.
- A loaded object is what a verified frame says that it was before it was encoded, or it is not LOADED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.layers.breaker import BreakerLayer
from lmcache.l2.layers.capacity import CapacityLayer
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.operation import Batch, Operation
from lmcache.l2.layers.serde_faults import SerdeFaults, load_outcome
from lmcache.l2.layers.serde_log import SerdeLog
from lmcache.l2.layers.serde_memory import SerdeMemory
from lmcache.l2.layers.serde_namespaces import StoredNamespaces
from lmcache.l2.layers.serde_queue import SerdeQueue
from lmcache.serde.base import Chain

LoadBatch: TypeAlias = Callable[[Batch, Operation], Awaitable[list[LoadOutcome]]]

_MAGIC_BYTES = 8  # at the beginning of a frame


class SerdeLayer:
    """Keys of batches are those of stored objects."""

    def __init__(
        self, context: AdapterContext, chain: Chain, stores: CapacityLayer, loads: LoadBatch, deletes: BreakerLayer
    ) -> None:
        """`loads` fills a batch from the adapter; `deletes` runs what moves corrupt objects aside."""
        self.chain = chain
        self.is_draining = False
        self._ledger = context.ledger
        self._stores = stores
        self._loads = loads
        self._log = SerdeLog(context, chain.name)
        self._namespaces = StoredNamespaces(chain.name)
        self._memory = SerdeMemory(chain, self._log)
        self._queue = SerdeQueue(context, chain, self._namespaces, self._log)
        self._faults = SerdeFaults(context, deletes)
        self._raw_bytes = context.metrics.l2_serde_raw.labels(context.name)
        self._stored_bytes = context.metrics.l2_serde_stored.labels(context.name)

    def open(self) -> None:
        """On the loop that uses it."""
        self._queue.open()

    async def close(self) -> None:
        """Waits for everything that is being encoded or decoded. Idempotent, also before `open`."""
        await self._queue.close()

    @property
    def running(self) -> set[asyncio.Future[None]]:
        """One for each batch that has memory of this layer."""
        return self._memory.running

    def stored_keys(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """The keys under which objects are stored."""
        return self._namespaces.stored_keys(keys)

    async def store(self, batch: Batch, operation: Operation) -> list[StoreOutcome]:
        outcomes = [StoreOutcome.FAILED] * len(batch)
        lent = await self._memory.lend(batch, operation)
        if lent is None:
            return outcomes
        with self._memory.operation(lent, operation) as inner:
            coded = await self._queue.run(True, batch.keys, batch.buffers, lent.parts, (operation, inner))
            if coded is None or self.is_draining:
                return outcomes
            if failed := len(batch) - coded.faults.count(0):
                self._log.warn("%d of %d objects could not be encoded and are not stored", failed, len(batch))
            in_the_way = await self._faults.remove_unreadable(batch.keys)
            whole = [
                index
                for index, (key, fault) in enumerate(zip(batch.keys, coded.faults, strict=True))
                if not fault and key not in in_the_way
            ]
            encoded = Batch(
                [batch.keys[index] for index in whole],
                [lent.parts[index][: coded.sizes_bytes[index]] for index in whole],
            )
            self._raw_bytes.inc(sum(batch.buffers[index].nbytes for index in whole))
            self._stored_bytes.inc(sum(view.nbytes for view in encoded.buffers))
            if whole:
                for index, outcome in zip(whole, await self._stores.store(encoded, inner), strict=True):
                    outcomes[index] = outcome
        return outcomes

    async def load(self, batch: Batch, operation: Operation) -> list[LoadOutcome]:
        lent = await self._memory.lend(batch, operation)
        if lent is None:
            return [LoadOutcome.FAILED] * len(batch)
        for view in lent.parts:
            view[:_MAGIC_BYTES] = bytes(_MAGIC_BYTES)  # what lay there before is nobody's frame
        with self._memory.operation(lent, operation) as inner:
            inner.lent.on_release(partial(self._ledger.let_go, self._ledger.hold(batch.keys)))
            outcomes = await self._loads(Batch(batch.keys, lent.parts), inner)
            loaded = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.LOADED]
            if loaded:
                part = batch.pick(loaded)
                sources = [lent.parts[index] for index in loaded]
                coded = await self._queue.run(False, part.keys, sources, part.buffers, (operation, inner))
                faults = coded.faults if coded is not None else bytes([0xFF]) * len(loaded)
                for index, fault in zip(loaded, faults, strict=True):
                    outcomes[index] = load_outcome(fault)
                await self._faults.settle(part.keys, faults)
        return outcomes
