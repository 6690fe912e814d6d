"""The contract of an L2 adapter: seven coroutines that move whole frames between memory and one backend.

An adapter moves bytes and nothing else. Deadlines, retries, the circuit breaker, limits on concurrency, capacity,
accounting, eviction and draining are the runner's (l2/runner.py), and so they are the same for every adapter.
`lmcache.testing.adapter_contract` checks an implementation; docs/how-to/write-an-adapter.md is a guide to one.

Rules:
- All methods run on one asyncio loop and never block it.
- Buffers belong to the caller. An adapter may touch them until the coroutine returns and never afterwards. A coroutine
  is never cancelled by the runner: one that is late is left alone until it ends.
- A buffer holds one frame (docs/formats/frame.md), 4 KiB aligned, its length a multiple of 4 KiB.
- Keys are distinct within a call and in prefix order. When the process dies in the middle of `store`, what is there
  afterwards should be a prefix of the keys.
- A key is a value: two that are equal name one object, and every part of a namespace counts. Names in it may hold any
  characters; `namespace.digest` and `chunk_hash` (32 bytes each) are the whole key without them.
- Expected things are outcomes. What concerns the whole call (no connection, no permission) is an AdapterError.
- An object that is deleted and stored again has the new bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache.core.key import ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the backend may hold and what an object costs there."""

    limit_bytes: int | None = None  # None: not bounded by configuration
    unit_bytes: int = 1  # an object is charged its size rounded up to this ...
    object_overhead_bytes: int = 0  # ... plus this (its directory entry, say)
    largest_object_bytes: int | None = None  # a larger one is TOO_LARGE
    folder_bytes: int = 0  # of each folder that at least one object is in
    # The folders of an object, or whatever its backend makes for several and drops after the last of them: innermost
    # first, each in the next one.
    folders_of: Callable[[ObjectKey], Sequence[Hashable]] | None = None

    def charge(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes) * self.unit_bytes + self.object_overhead_bytes


class Inventory(Protocol):
    """How an adapter tells what its backend holds apart from what was stored through it."""

    def found(self, objects: Sequence[tuple[ObjectKey, int]]) -> None:
        """Objects and their sizes in bytes, youngest first, each call older than the one before. Known ones are
        ignored."""
        ...

    def known(self) -> list[ObjectKey]:
        """Every object that counts as held."""
        ...

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        """Objects that are gone without having been deleted through this adapter."""
        ...

    def complete(self) -> None:
        """Everything that the backend held at `open` has been told. Bounded stores wait for this. Call it once, also
        when the search failed or there was nothing to find."""
        ...


class Adapter(Protocol):
    """Derive from it to inherit what has a body here; an implementation need not derive."""

    @property
    def capacity(self) -> Capacity:
        """Constant after open()."""
        return Capacity()

    def overhead_bytes(self) -> int:
        """Bytes that other things than objects and their folders take (quarantine, say)."""
        return 0

    def status(self) -> dict[str, int]:
        """Figures of its own for operators; `buffered_fallbacks` is exposed as a metric too."""
        return {}

    async def open(self, inventory: Inventory) -> None:
        """Checks that the backend can be used, else ConfigError or ResourceError with one sentence. Must be quick: what
        takes time (searching for objects) goes on in the background."""
        inventory.complete()

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """An object becomes visible complete or not at all. FULL (or CapacityError, for all of them) means that the
        backend has no room."""
        ...

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Fills each buffer with the frame of its key. LOADED promises bytes, not that they verify: that is
        checked afterwards, but for adapters of this package with an attribute `verifies = True`.
        CORRUPT: certainly not the frame; it has been moved aside or deleted."""
        ...

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Size in bytes of each object, None where there is none. Asks the backend: another server may have stored."""
        ...

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        """True where the object is gone now, also if it never was. `corrupt`: its frame did not verify; move it aside
        for inspection where the backend can."""
        ...

    async def clear(self) -> tuple[int, int]:
        """Deletes every object that the backend holds, known or not: (objects, bytes)."""
        ...

    async def close(self) -> None:
        """Ends background work and gives everything back. Called when no operation runs. Idempotent, also before `open`
        and after it failed."""
