"""How a test of the adapter contract runs: an adapter on its own loop, opened before the test and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from lmcache.core.key import CHUNK_HASH_BYTES, ObjectKey
from lmcache.l2.adapter import NO_FOLDERS, Adapter, ObjectColumns

T = TypeVar("T")

# told: the inventory tells what is there, last used first. listed: it tells, in an order of its own, where the backend
# keeps no times of use. found: it does not, but a lookup finds it. gone: nothing is left.
AfterRestart = Literal["told", "listed", "found", "gone"]

OPEN_SECONDS = 30.0
TEST_SECONDS = 120.0


class RecordingInventory:
    """Remembers what the adapter tells."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, int] = {}
        self.order: list[ObjectKey] = []
        self._scan = 0
        self._seen_by: dict[ObjectKey, int] = {}
        self.completed = asyncio.Event()

    def found(self, objects: Sequence[tuple[ObjectKey, int]] | ObjectColumns, *, newer: bool = False) -> None:
        unknown = [key for key, _ in objects if key not in self.objects]
        self.order = [*unknown, *self.order] if newer else [*self.order, *unknown]
        for key, size_bytes in objects:
            self.objects[key] = size_bytes
            self._seen_by[key] = self._scan

    def begin_scan(self) -> int:
        self._scan += 1
        return self._scan

    def seen(self, digest: bytes, hashes: bytes) -> None:
        present = {hashes[start : start + CHUNK_HASH_BYTES] for start in range(0, len(hashes), CHUNK_HASH_BYTES)}
        for key in self.objects:
            if key.namespace.digest == digest and key.chunk_hash in present:
                self._seen_by[key] = self._scan

    def known(
        self, *, unseen_by: int | None = None, passed_over: Mapping[bytes, int] = NO_FOLDERS
    ) -> Iterator[list[ObjectKey]]:
        yield [
            key
            for key in self.objects
            if (unseen_by is None or self._seen_by[key] < unseen_by)
            and not passed_over.get(key.namespace.digest, 0) >> key.chunk_hash[0] & 1
        ]

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def complete(self) -> None:
        assert not self.completed.is_set(), "complete() is called once"
        self.completed.set()


class ContractRun:
    """What the adapter under test promises beyond the contract, and how it is built."""

    after_restart: AfterRestart = "gone"
    keeps_prefix_order = True  # a batch becomes visible in the order of its keys
    can_delete = True

    def build(self, folder: Path) -> Adapter:
        """An adapter that is not open yet. `folder` is new in every test; the same folder means the same backend."""
        raise TypeError(f"{type(self).__name__} must say how to build its adapter: def build(self, folder)")

    def break_backend(self, folder: Path) -> bool:
        """Makes the backend fail under an open adapter. False: there is no way to."""
        return False

    def run(self, folder: Path, test: Callable[[Adapter, RecordingInventory], Awaitable[T]]) -> T:
        """Opens the adapter, runs the test and closes it, each with a deadline, so that a hang is a failure."""

        async def whole() -> T:
            adapter, inventory = self.build(folder), RecordingInventory()
            try:
                await asyncio.wait_for(adapter.open(inventory), OPEN_SECONDS)
                await asyncio.wait_for(inventory.completed.wait(), OPEN_SECONDS)
                return await asyncio.wait_for(test(adapter, inventory), TEST_SECONDS)
            finally:
                await asyncio.wait_for(adapter.close(), OPEN_SECONDS)

        return asyncio.run(whole())
