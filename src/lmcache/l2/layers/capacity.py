"""Stores nothing that the backend can never hold, and no more than there is room for."""

from __future__ import annotations

import logging
from functools import partial

from lmcache.core.outcome import HELD, StoreOutcome
from lmcache.l2.accounting import CapacityReservation
from lmcache.l2.layers.charged_store import store_charged
from lmcache.l2.layers.context import AdapterContext
from lmcache.l2.layers.eviction import AdapterEviction
from lmcache.l2.layers.operation import Batch, Operation
from lmcache.l2.layers.retries import RetryLayer
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.l2")


class CapacityLayer:
    """While the backend is full, a store is tried now and then."""

    def __init__(self, context: AdapterContext, eviction: AdapterEviction, inner: RetryLayer) -> None:
        self._context = context
        self._ledger = context.ledger
        self._eviction = eviction
        self._inner = inner
        self._full = context.circuit_breaker(failures=1)
        self._log_limiter = LogLimiter()

    @property
    def is_full(self) -> bool:
        return self._full.is_open

    @property
    def would_try(self) -> bool:
        """Whether a store that begins now would be tried."""
        return self._full.would_admit

    async def store(self, batch: Batch, operation: Operation) -> list[StoreOutcome]:
        """Stores objects that are not known to be there."""
        largest_bytes = self._ledger.capacity.largest_object_bytes
        largest_stored_bytes = max((buffer.nbytes for buffer in batch.buffers), default=0)
        if largest_bytes is None or largest_stored_bytes <= largest_bytes:
            return await self._store_fitting(batch, operation)
        self._log_too_large(largest_stored_bytes, largest_bytes)
        fitting = [index for index, buffer in enumerate(batch.buffers) if buffer.nbytes <= largest_bytes]
        outcomes = [StoreOutcome.TOO_LARGE] * len(batch)
        if fitting:
            for index, outcome in zip(fitting, await self._store_fitting(batch.pick(fitting), operation), strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _store_fitting(self, batch: Batch, operation: Operation) -> list[StoreOutcome]:
        if not self._full.admits():
            self._count_full(len(batch))
            return [StoreOutcome.FULL] * len(batch)
        reservation = CapacityReservation(self._ledger)
        operation.lent.on_release(reservation.give_back)
        charges_bytes = [self._ledger.capacity.charge(buffer.nbytes) for buffer in batch.buffers]
        admitted = await self._eviction.make_room(batch.keys, charges_bytes, reservation)
        outcomes = await self._write(batch.pick(range(admitted)), reservation, operation)
        if self._context.config.eviction and StoreOutcome.FULL in outcomes:
            # The medium is smaller than the capacity that was configured: make room there, too.
            await self._eviction.evict(max(sum(charges_bytes[:admitted]), self._eviction.share_bytes))
            full = [index for index, outcome in enumerate(outcomes) if outcome is StoreOutcome.FULL]
            for index, outcome in zip(full, await self._write(batch.pick(full), reservation, operation), strict=True):
                if outcome is not StoreOutcome.FAILED:  # else it is still what found no room
                    outcomes[index] = outcome
        outcomes += [StoreOutcome.FULL] * (len(batch) - admitted)
        if full_objects := outcomes.count(StoreOutcome.FULL):
            self._count_full(full_objects)
            self._note_full("max_capacity_gb" if admitted < len(batch) else "no space left where it stores")
        elif any(outcome in HELD for outcome in outcomes):
            self.note_room()
        return outcomes

    async def _write(self, batch: Batch, reservation: CapacityReservation, operation: Operation) -> list[StoreOutcome]:
        transfer = partial(store_charged, self._context.adapter, reservation)
        return await self._inner.run_batch(transfer, batch, StoreOutcome.FAILED, operation)

    def note_room(self) -> None:
        if self._full.succeeded():
            log.info("%s: has room again", self._context.name)

    def _note_full(self, reason: str) -> None:
        if self._full.failed():
            log.warning(
                "%s: full at %d bytes (%s); nothing new is stored until there is room, what is there is served on",
                self._context.name,
                self._ledger.held_bytes,
                reason,
            )

    def _count_full(self, objects: int) -> None:
        self._context.metrics.l2_full.labels(self._context.name).inc(objects)

    def _log_too_large(self, size_bytes: int, largest_bytes: int) -> None:
        if self._log_limiter.due():
            log.warning(
                "%s: objects of %d bytes are not stored: its largest may have %d, header included",
                *(self._context.name, size_bytes, largest_bytes),
            )
