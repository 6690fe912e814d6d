"""The contract of an L2 adapter: seven coroutines that move whole frames between memory and one backend.

An adapter moves bytes and nothing else. Deadlines, retries, the circuit breaker, limits on concurrency and capacity are
layers around it (l2/layers/stack.py), accounting and draining the runner's, and so they are the same for every adapter.
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

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from lmcache.core.hint import Hint
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.core.rounding import round_up

NO_FOLDERS: Mapping[bytes, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the backend may hold and what an object costs there."""

    limit_bytes: int | None = None  # None: not bounded by configuration
    unit_bytes: int = 1  # an object is charged its size rounded up to this ...
    object_overhead_bytes: int = 0  # ... plus this (its directory entry, say)
    largest_object_bytes: int | None = None  # a larger one is TOO_LARGE
    limit_objects: int | None = None  # how many the backend holds, whatever their sizes; one more is FULL
    # Of each folder that at least one object is in: one for each namespace, and in it one for each first byte of a
    # chunk hash. 0: the backend has no such folders.
    folder_bytes: int = 0

    def charge(self, size_bytes: int) -> int:
        return round_up(size_bytes, self.unit_bytes) + self.object_overhead_bytes


@dataclass(frozen=True, slots=True)
class ObjectColumns:
    """Objects as columns, for backends that hold millions. Those that `rows` names, youngest first."""

    namespaces: Sequence[Namespace]
    positions: array[int]  # "I": where each object's namespace is in `namespaces`
    hashes: bytes | bytearray  # 32 bytes each
    sizes_bytes: array[int]  # "Q"
    rows: array[int]  # "I"

    def __iter__(self) -> Iterator[tuple[ObjectKey, int]]:
        for row in self.rows:
            chunk_hash = bytes(self.hashes[row * CHUNK_HASH_BYTES : (row + 1) * CHUNK_HASH_BYTES])
            yield ObjectKey(self.namespaces[self.positions[row]], chunk_hash), self.sizes_bytes[row]


class Inventory(Protocol):
    """How an adapter reports what its backend holds beyond what was stored through it."""

    def found(self, objects: Sequence[tuple[ObjectKey, int]] | ObjectColumns, *, newer: bool = False) -> None:
        """Objects and their sizes in bytes, youngest first, each call older than the one before; some thousand in a
        call, so that the loop can do other things between two. Known ones are ignored, but for a size that has changed
        since the search before. `newer`: what other servers stored since an earlier search, youngest first within a
        call, each call newer than the one before."""
        ...

    def begin_scan(self) -> int:
        """Before the backend is searched for objects that were removed behind the back of this server: the number of
        that search, for `known`."""
        ...

    def seen(self, digest: bytes, hashes: bytes) -> None:
        """Does what `found` does where sizes are not known: objects of the namespace with this digest, 32 bytes of
        chunk hash each. Unknown ones are ignored."""
        ...

    def known(
        self, *, unseen_by: int | None = None, passed_over: Mapping[bytes, int] = NO_FOLDERS
    ) -> Iterator[list[ObjectKey]]:
        """Every object that counts as held, in pages of some thousand. `unseen_by` the number of a search: only those
        that were neither found, seen nor stored since it began. `passed_over`: without those of these namespaces, by
        digest, whose chunk hash begins with a byte of which the bit is set. Between two pages the loop may do other
        things."""
        ...

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        """Objects that are gone without having been deleted through this adapter."""
        ...

    def complete(self) -> None:
        """Everything that the backend held at `open` has been reported. Bounded stores wait for this. Call it once,
        also when the search failed or there was nothing to find."""
        ...


class Adapter(Protocol):
    """One backend of L2, to which whole frames are stored under keys and from which they are loaded. Derive from it to
    inherit what has a body here; an implementation need not derive.

    Shapes and units: a buffer is the whole frame of the key at its position, a multiple of 4 KiB; sizes are bytes. Each
    call answers with one outcome, size or flag a key, in their order.

    Errors: what concerns one object is its outcome. AdapterError for the whole call, `retryable` where trying again
    makes sense; CapacityError when the backend is full; from `open` ConfigError or ResourceError.

    Example:

    >>> import asyncio
    >>> from lmcache.core.key import Namespace, ObjectKey
    >>> from lmcache.core.outcome import LoadOutcome, StoreOutcome
    >>> from lmcache.l2.adapter import Adapter
    >>> class InMemory(Adapter):
    ...     def __init__(self):
    ...         self.frames = {}
    ...     async def store(self, keys, buffers):
    ...         self.frames |= zip(keys, map(bytes, buffers))
    ...         return [StoreOutcome.STORED] * len(keys)
    ...     async def load(self, keys, buffers):
    ...         for key, buffer in zip(keys, buffers):
    ...             buffer[:] = self.frames.get(key, buffer)
    ...         return [LoadOutcome.LOADED if key in self.frames else LoadOutcome.MISSING for key in keys]
    >>> keys = [ObjectKey(Namespace("model", 1, 0, 0, "00" * 16), chunk_hash=bytes(32))]
    >>> adapter, buffer = InMemory(), memoryview(bytearray(4096))
    >>> asyncio.run(adapter.store(keys, [buffer])), asyncio.run(adapter.load(keys, [buffer]))
    ([<StoreOutcome.STORED: 'stored'>], [<LoadOutcome.LOADED: 'loaded'>])
    """

    @property
    def capacity(self) -> Capacity:
        """Constant after open()."""
        return Capacity()

    def overhead_bytes(self) -> int:
        """Bytes that other things than objects and their folders take (quarantine, say)."""
        return 0

    def status(self) -> dict[str, Any]:
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
        checked afterwards, but for adapters of this package with an attribute `verifies = True`. One with
        `is_read_only = True` is asked and loaded from, and nothing else: what it finds belongs to others, who may
        remove it at any moment, so that nothing is stored, deleted or cleared there, and nothing remembered of it. One
        with `most_calls = N` takes N loads and N probes at once, and bounds by itself what goes to each of its places;
        one with `most_load_objects = N` up to N objects in one load, where others get MAX_L2_BATCH_OBJECTS at most.
        CORRUPT: certainly not the frame; it has been quarantined or deleted."""
        ...

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Size in bytes of each object, None where there is none. Asks the backend: another server may have stored."""
        ...

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        """True where the object is gone now, also if it never was. `corrupt`: its frame did not verify; quarantine
        it for inspection where the backend can."""
        ...

    async def clear(self) -> tuple[int, int]:
        """Deletes every object that the backend holds, known or not: (objects, bytes)."""
        ...

    async def close(self) -> None:
        """Ends background work and gives everything back. Called when no operation runs. Idempotent, also before `open`
        and after it failed."""


@runtime_checkable
class RegistersMemory(Protocol):
    """An adapter whose backend memory must be registered with."""

    def lend_memory(self, address: int, size_bytes: int) -> None:
        """Before `open`, by a server: L1, in which nearly all buffers lie. It is mapped as long as the adapter is open;
        parts of it have no memory behind them until they are used. For other buffers, and where nobody calls this, the
        adapter does what it must for each transfer."""
        ...


@runtime_checkable
class FollowsHints(Protocol):
    """An adapter over several places, which a request may know better than to ask all of them."""

    async def probe_hinted(self, keys: Sequence[ObjectKey], hint: Hint | None) -> list[int | None]:
        """Does what `Adapter.probe` does, and waits for as long as the hint says."""
        ...

    def waits_at(self, hint: Hint) -> str | None:
        """The place whose answer waits, as the hint says; None where none does. There are not many of them."""
        ...


@runtime_checkable
class EndsLoads(Protocol):
    """An adapter that depends on others, for whose answers a server that ends does not wait."""

    def end_loads(self) -> None:
        """Loads and probes under way end soon, with what they have; so do later ones. Before `close`, on the loop; does
        not wait. Idempotent."""
        ...


@runtime_checkable
class PublishesFigures(Protocol):
    """An adapter with metrics that are read rather than counted."""

    def publish(self) -> None:
        """Brings them up to date. Any thread."""
        ...
