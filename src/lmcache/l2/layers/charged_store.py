"""Writes to a backend, and charges the ledger for what is there afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import StoreOutcome
from lmcache.errors import AdapterError, CapacityError
from lmcache.l2.accounting import CapacityReservation
from lmcache.l2.adapter import Adapter


async def store_charged(
    adapter: Adapter, reservation: CapacityReservation, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]
) -> list[StoreOutcome]:
    """Charges `reservation` when the write ends, also when nobody waits for it any more."""
    try:
        outcomes = await adapter.store(keys, buffers)
    except CapacityError:
        return [StoreOutcome.FULL] * len(keys)
    stored = [index for index, outcome in enumerate(outcomes) if outcome is StoreOutcome.STORED]
    if stored:
        reservation.stored([keys[index] for index in stored], [buffers[index].nbytes for index in stored])
    already_there = [index for index, outcome in enumerate(outcomes) if outcome is StoreOutcome.ALREADY_THERE]
    if not already_there:
        return outcomes
    sizes = await _sizes_there(
        adapter, [keys[index] for index in already_there], [buffers[index].nbytes for index in already_there]
    )
    held = {index: size for index, size in zip(already_there, sizes, strict=True) if size is not None}
    if held:
        reservation.stored([keys[index] for index in held], list(held.values()))
    return [
        StoreOutcome.FAILED if outcome is StoreOutcome.ALREADY_THERE and index not in held else outcome
        for index, outcome in enumerate(outcomes)
    ]


async def _sizes_there(adapter: Adapter, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> Sequence[int | None]:
    """What another server stored may have another size than what was to be stored now, as servers differ in what a
    serde makes of an object and in the alignment of frames. None where it is gone meanwhile."""
    try:
        return await adapter.probe(keys)
    except AdapterError:
        return sizes_bytes
