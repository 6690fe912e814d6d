"""What an adapter holds, in bytes, and in which order it may go: a native ledger under the adapter's capacity
(native/include/lmcache/ledger.h).

Invariant: used + reserved + folders + overhead never exceeds the limit through a store that was admitted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcache._native import Ledger as NativeLedger
from lmcache._native import LedgerHold, LedgerPage, LedgerStats
from lmcache.core.key import CHUNK_HASH_BYTES, ObjectKey, decode_known
from lmcache.core.salt_limits import SaltLimits
from lmcache.l2.adapter import NO_FOLDERS, Capacity, ObjectColumns

PAGE_OBJECTS = 4096


class CapacityReservation:
    """What one store may still write. Given back when the store has really ended, whoever still waits for it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger.native
        self._bytes = 0
        self._keys: list[ObjectKey] = []

    def reserve(self, keys: Sequence[ObjectKey], charge_bytes: int) -> None:
        """For these keys, charged that much, and for their folders."""
        self._ledger.reserve(keys, charge_bytes)
        self._bytes += charge_bytes
        self._keys += keys

    def stored(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> None:
        """Objects of this store that are there now."""
        charged_bytes = min(self._bytes, self._ledger.stored(keys, sizes_bytes))
        self._bytes -= charged_bytes
        self._ledger.give_back((), charged_bytes)

    def give_back(self) -> None:
        keys, self._keys = self._keys, []
        charge_bytes, self._bytes = self._bytes, 0
        self._ledger.give_back(keys, charge_bytes)


@dataclass(frozen=True, slots=True)
class Victims:
    """Objects to evict, the first to go first, and what they are charged."""

    keys: list[ObjectKey]
    size_bytes: int


class Ledger:
    """Keys of a call are in prefix order: the suffix of a prompt is of no use without its prefix, so the last one goes
    first. Belongs to one loop; figures may be read from any thread."""

    def __init__(self, policy: str, overhead_bytes: Callable[[], int], limits: SaltLimits | None = None) -> None:
        """`policy` is the name of one; IsolatedLRU goes by `limits`."""
        self.native = NativeLedger(policy)
        self.capacity = Capacity()
        self._overhead_bytes = overhead_bytes
        self._limits = limits or SaltLimits()
        self._limits_version = -1  # none in force yet
        self._limits_in_force: dict[str, int] = {}
        self._forget_from = 0  # a record

    # ---- figures -----------------------------------------------------------------------------------------------------
    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: Capacity) -> None:
        """What is known already keeps its charge."""
        self._capacity = capacity
        self.native.set_capacity(
            limit_bytes=capacity.limit_bytes,
            unit_bytes=capacity.unit_bytes,
            object_overhead_bytes=capacity.object_overhead_bytes,
            folder_bytes=capacity.folder_bytes,
        )

    def stats(self) -> LedgerStats:
        return self.native.stats()

    def __len__(self) -> int:
        return self.stats().objects

    @property
    def used_bytes(self) -> int:
        """What all objects are charged."""
        return self.stats().used_bytes

    @property
    def held_bytes(self) -> int:
        """Objects and whatever else takes room in the backend."""
        stats = self.stats()
        return stats.used_bytes + stats.folders * self._capacity.folder_bytes + self._overhead_bytes()

    @property
    def fraction(self) -> float:
        """Held part of the limit, of bytes or of objects; 0 where there is none."""
        limit_bytes, limit_objects = self._capacity.limit_bytes, self._capacity.limit_objects
        of_bytes = self.held_bytes / limit_bytes if limit_bytes else 0.0
        return max(of_bytes, len(self) / limit_objects if limit_objects else 0.0)

    def lacking_bytes(self, keys: Sequence[ObjectKey], charge_bytes: int) -> int:
        """How much must go before these keys, charged that much, may be stored; 0 when there is room."""
        return self.native.lacking(keys, charge_bytes, self._overhead_bytes())

    # ---- objects -----------------------------------------------------------------------------------------------------
    def known(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return list(map(bool, self.native.known(keys)))

    def are_leaving(self, keys: Sequence[ObjectKey]) -> bool:
        """Whether some of them are victims whose deletion has not ended."""
        return 2 in self.native.known(keys)

    def found(self, objects: Sequence[tuple[ObjectKey, int]] | ObjectColumns, *, newer: bool = False) -> None:
        """Objects and their sizes, youngest first, older than all that is known, or newer. Known ones are left as they
        are, but where a scan finds one of another size: it is charged that."""
        if isinstance(objects, ObjectColumns):
            self.native.found_rows(
                objects.namespaces,
                memoryview(objects.positions),
                objects.hashes,
                memoryview(objects.sizes_bytes),
                memoryview(objects.rows),
                newer,
            )
        else:
            self.native.found([key for key, _ in objects], [size for _, size in objects], newer)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """They were used. Unknown ones are ignored."""
        self.native.touch(keys)

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        """They are gone without having been evicted. Unknown ones are ignored."""
        self.native.lost(keys)

    def forget(self, objects: int) -> None:
        """About so many, nearly those that have been known the longest: records are used again in the order in which
        this frees them."""
        while objects > 0:
            page = self.native.list(self._forget_from, min(objects, PAGE_OBJECTS), None)
            keys = _keys_of(page)
            if not keys and not self._forget_from and not page.next_start:
                return
            self._forget_from = page.next_start
            self.lost(keys)
            objects -= len(keys)

    def hold(self, keys: Sequence[ObjectKey]) -> LedgerHold:
        """They are being read; those that are known are no victims until `let_go`."""
        return self.native.hold(keys)

    def let_go(self, hold: LedgerHold) -> None:
        self.native.let_go(hold)

    def held(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which of them somebody holds."""
        return list(map(bool, self.native.held(keys)))

    # ---- eviction ----------------------------------------------------------------------------------------------------
    def victims(self, wanted_bytes: int, most: int) -> Victims:
        """Who goes to free so much, at most so many at a time. Until `evicted` or `not_evicted` they are charged, may
        be loaded, and are no victims again."""
        self._put_limits_in_force()
        page = self.native.victims(max(0, wanted_bytes), most)
        return Victims(_keys_of(page), sum(memoryview(page.charges_bytes).cast("Q")))

    def evicted(self, keys: Sequence[ObjectKey]) -> int:
        """Victims that are gone: the bytes that are free now."""
        return self.native.evicted(keys)

    def not_evicted(self, keys: Sequence[ObjectKey]) -> None:
        """Victims that stay, in their previous places."""
        self.native.not_evicted(keys)

    def _put_limits_in_force(self) -> None:
        if (version := self._limits.version) == self._limits_version:
            return
        limits = self._limits.all()
        for salt in self._limits_in_force.keys() - limits.keys():
            self.native.set_limit(salt, 0)
        for salt, limit_bytes in limits.items():
            if self._limits_in_force.get(salt) != limit_bytes:
                self.native.set_limit(salt, limit_bytes)
        self._limits_in_force, self._limits_version = limits, version

    # ---- listings ----------------------------------------------------------------------------------------------------
    def begin_scan(self) -> int:
        """The number of a scan of the backend, which sees what is stored or found from now on."""
        return self.native.begin_scan()

    def seen(self, digest: bytes, hashes: bytes) -> None:
        """The scan that began last has seen these of one namespace, 32 bytes each. Unknown ones are ignored."""
        self.native.see(digest, hashes)

    def pages(
        self,
        page_objects: int = PAGE_OBJECTS,
        *,
        unseen_by: int | None = None,
        passed_over: Mapping[bytes, int] = NO_FOLDERS,
    ) -> Iterator[list[ObjectKey]]:
        """Every known object, or those that a scan has not seen, a page at a time. Between pages anything may happen:
        objects stored meanwhile may be missed. `passed_over`: as of `Inventory.known`."""
        folders = b"".join(digest + bits.to_bytes(32, "little") for digest, bits in passed_over.items())
        start = 0
        while True:
            page = self.native.list(start, page_objects, unseen_by, folders)
            yield _keys_of(page)
            if not (start := page.next_start):
                return

    def check(self) -> None:
        """RuntimeError that names a broken invariant. O(objects)."""
        self.native.check()


def _keys_of(page: LedgerPage) -> list[ObjectKey]:
    namespaces = [decode_known(encoded) for encoded in page.namespaces]
    hashes = page.hashes
    return [
        ObjectKey(namespaces[position], hashes[start : start + CHUNK_HASH_BYTES])
        for position, start in zip(
            memoryview(page.positions).cast("I"), range(0, len(hashes), CHUNK_HASH_BYTES), strict=True
        )
    ]
