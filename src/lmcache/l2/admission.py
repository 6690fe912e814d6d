"""What a store may write: nothing that no slot can hold, and no more than there is room for."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import StoreOutcome
from lmcache.l2.accounting import Ledger, Room
from lmcache.l2.breaker import Breaker
from lmcache.telemetry.metrics import Metrics

log = logging.getLogger("lmcache.l2")


class Admission:
    """Lists of numbers are indices into a batch. While the backend is full, a store is tried now and then."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        evict: Callable[[int], Awaitable[tuple[int, int]]],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`evict(bytes)` frees as many if it can: (objects, bytes)."""
        self._name = name
        self._ledger = ledger
        self._evict = evict
        self._metrics = metrics
        self._full = Breaker(
            clock,
            failures=1,
            open_seconds=limits.L2_BREAKER_OPEN_SECONDS,
            max_open_seconds=limits.L2_BREAKER_MAX_OPEN_SECONDS,
        )
        self._said_too_large = False

    @property
    def is_full(self) -> bool:
        return self._full.is_open

    def of_possible_size(
        self, buffers: Sequence[memoryview], outcomes: list[StoreOutcome], todo: list[int]
    ) -> list[int]:
        """`todo` without what is too large, which gets its outcome."""
        largest_bytes = self._ledger.capacity.largest_object_bytes
        if largest_bytes is None:
            return todo
        for index in todo:
            if buffers[index].nbytes > largest_bytes:
                outcomes[index] = StoreOutcome.TOO_LARGE
                if not self._said_too_large:
                    self._said_too_large = True
                    log.warning(
                        "%s: objects of %d bytes are not stored: its largest may have %d, header included",
                        self._name,
                        buffers[index].nbytes,
                        largest_bytes,
                    )
        return [index for index in todo if outcomes[index] is not StoreOutcome.TOO_LARGE]

    @property
    def would_try(self) -> bool:
        """What `may_try` would say, without a try."""
        return self._full.would_admit

    def may_try(self) -> bool:
        return self._full.admits()

    async def make_room(
        self, keys: Sequence[ObjectKey], todo: list[int], charges: Mapping[int, int], room: Room
    ) -> list[int]:
        """Evicts what it takes and reserves: the longest prefix of `todo` that fits."""
        ledger, limit_bytes = self._ledger, self._ledger.capacity.limit_bytes
        total = sum(charges[index] for index in todo)
        while limit_bytes is not None and todo and total > limit_bytes:
            total -= charges[todo[-1]]
            todo = todo[:-1]
        wanted = [keys[index] for index in todo]
        lacking = ledger.lacking_bytes(wanted, total)
        while lacking:
            _, freed_bytes = await self._evict(lacking)
            if not freed_bytes:
                break
            lacking = ledger.lacking_bytes(wanted, total)
        if not lacking:
            room.reserve(wanted, total)
            return todo
        admitted = []
        for index in todo:
            if ledger.lacking_bytes([keys[index]], charges[index]):
                break
            room.reserve([keys[index]], charges[index])
            admitted.append(index)
        return admitted

    def refuse(self, outcomes: list[StoreOutcome], indices: Sequence[int]) -> None:
        for index in indices:
            outcomes[index] = StoreOutcome.FULL
        self._metrics.l2_full.labels(self._name).inc(len(indices))

    def note_full(self, why: str) -> None:
        if self._full.failed():
            log.warning(
                "%s: full at %d bytes (%s); nothing new is stored until there is room, what is there is served on",
                self._name,
                self._ledger.held_bytes,
                why,
            )

    def note_room(self) -> None:
        if self._full.succeeded():
            log.info("%s: has room again", self._name)
