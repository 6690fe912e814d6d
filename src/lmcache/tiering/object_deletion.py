"""Deletes single objects by request. What is being read stays, and so does what is pinned unless that is overridden: a
pin is an operator's, a lease protects bytes under a running copy."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import pack_keys
from lmcache.errors import AdapterError
from lmcache.l1.store import L1Store
from lmcache.l2.layers.deletion import DELETE_SLICE_OBJECTS
from lmcache.l2.runner import Runner
from lmcache.tiering.pins import Pins


class ObjectDeletion:
    """Belongs to the storage loop."""

    def __init__(self, l1: L1Store, runners: Sequence[Runner], pins: Pins) -> None:
        self._core = l1.core
        self._runners = runners
        self._pins = pins

    async def delete(self, keys: Sequence[ObjectKey], tier: str, *, force: bool) -> tuple[int, int, int]:
        """How many keys were deleted, how many stay somewhere in the tier, and how many were not there. AdapterError
        where an adapter does not say what it has: then nobody knows what is left."""
        deleted = kept = missing = 0
        silent: set[str] = set()
        for first in range(0, len(keys), DELETE_SLICE_OBJECTS):
            part = keys[first : first + DELETE_SLICE_OBJECTS]
            were, are = await self._delete(part, tier, force, silent)
            for was_there, is_there in zip(were, are, strict=True):
                deleted += was_there and not is_there
                kept += is_there
                missing += not was_there and not is_there
        if silent:
            raise AdapterError(
                f"{', '.join(sorted(silent))} cannot be asked what is there: {deleted} objects were deleted, others "
                "may be left; delete them again when it answers."
            )
        return deleted, kept, missing

    async def _delete(
        self, keys: Sequence[ObjectKey], tier: str, force: bool, silent: set[str]
    ) -> tuple[list[bool], list[bool]]:
        """Which were there, which are there. Adds the names of adapters that did not say it."""
        if force:
            self._pins.let_go(keys)
        were, are = [False] * len(keys), [False] * len(keys)
        if tier != "l2":
            packed = pack_keys(keys)
            were = list(map(bool, self._core.resident_each(*packed)))
            self._core.remove(*packed)
            are = list(map(bool, self._core.resident_each(*packed)))
        for runner in self._runners if tier != "l1" else ():
            exist, fault = await runner.ask(keys)
            if fault is not None and not all(exist):
                silent.add(runner.name)
            present = [key for key, exists in zip(keys, exist, strict=True) if exists]
            gone = dict(zip(present, await runner.delete(present), strict=True)) if present else {}
            were = [was_there or key in gone for key, was_there in zip(keys, were, strict=True)]
            are = [is_there or not gone.get(key, True) for key, is_there in zip(keys, are, strict=True)]
        return were, are
