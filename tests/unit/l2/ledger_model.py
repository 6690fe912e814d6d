"""The rules of the native ledger in plain Python, for sequences of random calls beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lmcache.core.key import ObjectKey

FIRST_SHARE = 0.1  # of the small queue of S3FIFO
OVERHEAD_BYTES = 256
UNIT_BYTES = 64
FOLDER_BYTES = 4096


@dataclass
class Record:
    key: ObjectKey
    charge: int = 0
    use: int = 0
    in_main: bool = False
    readers: int = 0
    scan: int = 0
    state: Literal["resident", "leaving", "detached"] = "detached"

    @property
    def salt(self) -> str:
        return self.key.namespace.cache_salt


@dataclass
class LedgerModel:
    policy: str
    limits: dict[str, int]
    room_bytes: int
    records: dict[ObjectKey, Record] = field(default_factory=dict)
    reserved: Counter[ObjectKey] = field(default_factory=Counter)
    reserved_bytes: int = 0
    newest_use: int = 0
    oldest_use: int = 0
    scan: int = 0

    # ---- figures -----------------------------------------------------------------------------------------------------
    @property
    def known(self) -> dict[ObjectKey, Record]:
        return {key: record for key, record in self.records.items() if record.state != "detached"}

    @property
    def used_bytes(self) -> int:
        return sum(record.charge for record in self.known.values())

    def folders(self, more: Sequence[ObjectKey] = ()) -> int:
        keys = [*self.known, *self.reserved, *more]
        return len({(key.namespace, key.chunk_hash[:1]) for key in keys}) + len({key.namespace for key in keys})

    def lacking(self, keys: Sequence[ObjectKey], charge_bytes: int) -> int:
        total = self.used_bytes + self.reserved_bytes + self.folders(keys) * FOLDER_BYTES + charge_bytes
        return max(0, total - self.room_bytes)

    def unseen_by(self, scan: int) -> set[ObjectKey]:
        """Scans are distinguished modulo 256."""
        return {key for key, record in self.known.items() if (self.scan - record.scan) % 256 > self.scan - scan}

    # ---- objects -----------------------------------------------------------------------------------------------------
    def _next_use(self) -> int:
        self.newest_use += 1
        return self.newest_use

    def stored(self, keys: Sequence[ObjectKey], sizes: Sequence[int]) -> None:
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            record = self.records.setdefault(key, Record(key))
            if record.state == "detached":
                record.in_main = False
            record.state, record.use, record.scan = "resident", self._next_use(), self.scan
            record.charge = -(-size // UNIT_BYTES) * UNIT_BYTES + OVERHEAD_BYTES

    def found(self, keys: Sequence[ObjectKey], sizes: Sequence[int], *, newer: bool) -> None:
        objects = list(zip(keys, sizes, strict=True))
        for key, size in reversed(objects) if newer else objects:
            record = self.records.setdefault(key, Record(key))
            charge = -(-size // UNIT_BYTES) * UNIT_BYTES + OVERHEAD_BYTES
            was_seen, record.scan = (self.scan - record.scan) % 256 == 0, self.scan
            if record.state == "detached":
                self.oldest_use -= not newer
                use = self._next_use() if newer else self.oldest_use
                record.state, record.use, record.in_main = "resident", use, False
                record.charge = charge
            elif record.state == "resident" and not was_seen and record.charge != charge:
                record.charge, record.use = charge, self._next_use()

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        for key in reversed(keys):
            record = self.records.get(key)
            if record is not None and record.state == "resident":
                record.use, record.in_main = self._next_use(), True

    def lost(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            if key in self.records:
                self._drop(self.records[key])

    def _drop(self, record: Record) -> None:
        record.state = "detached"
        if not record.readers:
            del self.records[record.key]

    def hold(self, keys: Sequence[ObjectKey]) -> list[Record]:
        held = [self.known[key] for key in keys if key in self.known]
        for record in held:
            record.readers += 1
        return held

    def let_go(self, held: list[Record]) -> None:
        for record in held:
            record.readers -= 1
            if not record.readers and record.state == "detached":
                del self.records[record.key]

    # ---- eviction ----------------------------------------------------------------------------------------------------
    def may_go_next(self, key: ObjectKey | None) -> bool:
        """Whether the policy may choose that one now; None: nobody. The choice among salts that are equally full is
        open."""
        evictable = sorted(
            (record for record in self.records.values() if record.state == "resident" and not record.readers),
            key=lambda record: record.use,
        )
        if not evictable or self.policy == "noop" or key is None:
            return key is None and (not evictable or self.policy == "noop")
        if self.policy == "LRU":
            return evictable[0].key == key
        if self.policy == "S3FIFO":
            return self._s3fifo_victim(evictable).key == key
        fullness = {salt: self._fullness(salt) for salt in {record.salt for record in evictable}}
        salt = key.namespace.cache_salt
        oldest = next(record for record in evictable if record.salt == salt)
        return fullness[salt] == max(fullness.values()) and oldest.key == key

    def _s3fifo_victim(self, evictable: list[Record]) -> Record:
        small = next((record for record in evictable if not record.in_main), None)
        main = next((record for record in evictable if record.in_main), None)
        if small is None or main is None:
            return evictable[0]
        residents = [record for record in self.records.values() if record.state == "resident"]
        small_bytes = sum(record.charge for record in residents if not record.in_main)
        return small if small_bytes > int(FIRST_SHARE * self.room_bytes) or small.use < main.use else main

    def _fullness(self, salt: str) -> tuple[float, int]:
        residents = [record for record in self.records.values() if record.state == "resident" and record.salt == salt]
        held_bytes = sum(record.charge for record in residents)
        limit_bytes = self.limits.get(salt, 0)
        return (held_bytes / limit_bytes if limit_bytes else float("inf")), held_bytes

    def choose(self, key: ObjectKey) -> int:
        self.records[key].state = "leaving"
        return self.records[key].charge

    def evicted(self, keys: Sequence[ObjectKey], gone: Sequence[bool]) -> None:
        for key, is_gone in zip(keys, gone, strict=True):
            record = self.records.get(key)
            if record is not None and record.state == "leaving":
                record.state = "resident"
                if is_gone:
                    self._drop(record)
