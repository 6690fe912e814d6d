"""Stored objects that could not be decoded.

What is corrupt is moved aside. What cannot be read, for lack of its key, stays for who can. A store of the same object
replaces it: else its name would be taken until eviction, which lookups put off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lmcache.core import limits
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome
from lmcache.errors import AdapterError
from lmcache.l2.layers.breaker import BreakerLayer
from lmcache.l2.layers.context import AdapterContext

_CORRUPT, _UNREADABLE = 1, 2  # SerdeFault
_LOAD_OUTCOMES = {0: LoadOutcome.LOADED, _CORRUPT: LoadOutcome.CORRUPT, _UNREADABLE: LoadOutcome.MISSING}


def load_outcome(fault: int) -> LoadOutcome:
    """The outcome of an object that was decoded with this fault."""
    return _LOAD_OUTCOMES.get(fault, LoadOutcome.FAILED)


class SerdeFaults:
    def __init__(self, context: AdapterContext, deletes: BreakerLayer) -> None:
        """`deletes` runs what deletes objects or moves them aside."""
        self._context = context
        self._deletes = deletes
        self._unreadable: dict[ObjectKey, None] = {}  # the longest known first

    async def settle(self, keys: Sequence[ObjectKey], faults: bytes) -> None:
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

    async def remove_unreadable(self, keys: Sequence[ObjectKey]) -> set[ObjectKey]:
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
