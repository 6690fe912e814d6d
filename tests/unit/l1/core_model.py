"""A dictionary model of the L1 core. It gets what the core answered and asserts that the core was allowed to.

It knows nothing of the allocator's order: which slots are handed out, and with mixed sizes who is evicted for them, is
the core's choice within rules: no two objects share memory, only unleased residents go, none goes without need, and
nothing is refused that evicting would have made room for. With one size, LRU is exactly least recently used first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache._native import NO_SLOT, L1Core
from unit.l1.results import values

UNIT = 4096
FIRST_OFFSET = 2 * UNIT
Key = tuple[bytes, bytes]  # digest of the namespace, chunk hash


def pack_u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def pack_u64(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def rows_of(packed: bytes, rows: int) -> list[list[int]]:
    """u64 [rows][columns]"""
    values = [value for (value,) in struct.iter_unpack("<Q", packed)]
    columns = len(values) // rows
    return [values[row * columns : (row + 1) * columns] for row in range(rows)]


@dataclass(eq=False)
class Stored:
    """Something that has memory. `state` is staged, resident, detached or quarantined."""

    key: Key
    offset: int
    size_bytes: int
    state: str = "staged"
    is_temporary: bool = False
    readers: int = 0
    last_use: int = 0


@dataclass
class Lease:
    owner: int
    deadline: float
    objects: list[Stored]  # in the order in which they are given back: last chunk first
    is_use: bool = True


@dataclass
class Reservation:
    owner: int
    deadline: float
    slots: list[list[Stored | None]]  # [namespace][chunk]
    is_quarantined: bool = False

    def objects(self) -> list[Stored]:
        return [stored for row in self.slots for stored in row if stored is not None]


@dataclass
class Model:
    core: L1Core
    salts: dict[bytes, str]
    has_one_size: bool
    committed_bytes: int
    is_exact: bool = True  # whether `order` is the order in which objects go (LRU)
    found: dict[Key, Stored] = field(default_factory=dict)  # staged and resident
    memory: set[Stored] = field(default_factory=set)
    uses: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    evicted: int = 0
    failures: int = 0

    # ---- rules -------------------------------------------------------------------------------------------------------
    def resident(self, key: Key) -> Stored | None:
        stored = self.found.get(key)
        return stored if stored is not None and stored.state == "resident" else None

    def prefix(self, namespaces: Sequence[bytes], hashes: Sequence[bytes]) -> int:
        for chunk, chunk_hash in enumerate(hashes):
            if not all(self.resident((namespace, chunk_hash)) for namespace in namespaces):
                return chunk
        return len(hashes)

    def usable_prefix(self, namespaces: Sequence[bytes], hashes: Sequence[bytes], tails: Sequence[int]) -> int:
        """With tails: 0 for a namespace that needs every chunk, else how many at the end."""
        for chunks in range(len(hashes), 0, -1):
            needed = self.needed(namespaces, hashes[:chunks], tails)
            if all(self.resident((namespace, chunk_hash)) for _, namespace, chunk_hash in needed):
                return chunks
        return 0

    @staticmethod
    def needed(
        namespaces: Sequence[bytes], hashes: Sequence[bytes], tails: Sequence[int]
    ) -> list[tuple[int, bytes, bytes]]:
        """(chunk, namespace, hash) of what a prefix of all of `hashes` needs, last chunk first."""
        return [
            (chunk, namespace, hashes[chunk])
            for chunk in reversed(range(len(hashes)))
            for namespace, tail in zip(namespaces, tails, strict=True)
            if not tail or chunk >= len(hashes) - tail
        ]

    @property
    def order(self) -> list[Stored]:
        """Unleased residents, oldest use first."""
        unleased = [stored for stored in self.found.values() if stored.state == "resident" and not stored.readers]
        return sorted(unleased, key=lambda stored: stored.last_use)

    def use(self, stored: Stored) -> None:
        self.uses += 1
        stored.last_use = self.uses

    def let_go(self, stored: Stored, is_use: bool) -> None:
        stored.readers -= 1
        if stored.readers == 0 and (stored.is_temporary or stored.state == "detached"):
            self.drop(stored)
        elif is_use:
            self.use(stored)

    def drop(self, stored: Stored) -> None:
        self.memory.remove(stored)
        if stored.state in ("staged", "resident"):
            del self.found[stored.key]

    def gaps(self, without: Sequence[Stored] = ()) -> list[int]:
        """Sizes of the free ranges, if `without` were gone; fails if objects share memory or one lies outside."""
        end = FIRST_OFFSET
        gaps = []
        for stored in sorted(self.memory.difference(without), key=lambda stored: stored.offset):
            assert stored.offset >= end, f"two objects share memory at {stored.offset}"
            gaps.append(stored.offset - end)
            end = stored.offset + stored.size_bytes
        gaps.append(FIRST_OFFSET + self.committed_bytes - end)
        assert gaps[-1] >= 0, "an object lies beyond the committed memory"
        return gaps

    def listed(self) -> set[Key]:
        """What the core says is resident, page by page."""
        keys: set[Key] = set()
        start = 0
        while True:
            page = self.core.list_objects(start, 7)
            keys.update((listed.namespace_digest, listed.chunk_hash) for listed in page)
            start = page.next_start
            if start == 0:
                return keys

    # ---- writing -----------------------------------------------------------------------------------------------------
    def reserve(
        self,
        owner: int,
        namespaces: Sequence[bytes],
        sizes: Sequence[int],
        hashes: Sequence[bytes],
        deadline: float,
        wanted: Sequence[Sequence[int]],
    ) -> None:
        """`wanted`: [namespace][chunk], 0 where no slot is asked for."""
        flags = bytes(flag for row in wanted for flag in row)
        reservation, packed, without_room = values(
            self.core.reserve(
                owner,
                b"".join(namespaces),
                self.salts[namespaces[0]],
                pack_u64(sizes),
                b"".join(hashes),
                deadline,
                wanted=flags,
            )
        )
        slots = rows_of(packed, len(namespaces))
        with_room = len(hashes) - without_room
        gone = self._evicted_by_reserve(namespaces, sizes, hashes, wanted)
        untouched = list(self.order)
        # In the order of chunks: what was there is used once more, what was not gets its slot.
        rows: list[list[Stored | None]] = [[None] * len(hashes) for _ in namespaces]
        used: list[Stored] = []
        staged: list[Stored] = []
        for chunk in range(with_room):
            for row, namespace in enumerate(namespaces):
                key = (namespace, hashes[chunk])
                if slots[row][chunk] == NO_SLOT:
                    if key not in self.found:
                        assert not wanted[row][chunk], "an absent object got no slot"
                        continue
                    if self.found[key].state == "resident" and self.found[key] not in used:
                        used.append(self.found[key])
                    continue
                assert key not in self.found, "a slot for an object that is there"
                assert wanted[row][chunk], "a slot that nobody wanted"
                stored = Stored(key, slots[row][chunk], -(-sizes[row] // UNIT) * UNIT)
                assert stored.offset % UNIT == 0
                rows[row][chunk] = stored
                staged.append(stored)
                self.memory.add(stored)
                self.found[key] = stored
        assert all(slot == NO_SLOT for row in slots for slot in row[with_room:]), "a slot beyond the room"
        if without_room:
            of_chunk = [row[with_room] for row in wanted]
            used += self._check_refusal(namespaces, sizes, hashes[with_room], of_chunk, used)
            self.failures += without_room
        self.gaps()
        if gone and self.has_one_size and self.is_exact:
            candidates = [stored for stored in [*gone, *untouched] if stored not in used]
            assert gone == candidates[: len(gone)], "evicted something that was used after what stayed"
        for stored in reversed(used):
            self.use(stored)
        assert (reservation != 0) == bool(staged)
        if reservation:
            self.reservations[reservation] = Reservation(owner, deadline, rows)

    def _evicted_by_reserve(
        self,
        namespaces: Sequence[bytes],
        sizes: Sequence[int],
        hashes: Sequence[bytes],
        wanted: Sequence[Sequence[int]],
    ) -> list[Stored]:
        """Forgets what the core evicted, in the order of last use."""
        count = self.core.stats()["evicted_objects"] - self.evicted
        self.evicted += count
        if count == 0:
            return []
        absent = [
            size_bytes
            for namespace, size_bytes, row in zip(namespaces, sizes, wanted, strict=True)
            for chunk_hash in {wanted_hash: None for wanted_hash, flag in zip(hashes, row, strict=True) if flag}
            if (namespace, chunk_hash) not in self.found
        ]
        needed_bytes = sum(-(-size_bytes // UNIT) * UNIT for size_bytes in absent)
        roomy = sum(self.gaps()) if self.has_one_size else max(self.gaps())
        assert roomy < needed_bytes, "evicted although everything would have fitted"
        listed = self.listed()
        gone = [stored for stored in self.order if stored.key not in listed]
        assert len(gone) == count, "evicted something that was in use"
        for stored in gone:
            self.drop(stored)
        return gone

    def _check_refusal(
        self,
        namespaces: Sequence[bytes],
        sizes: Sequence[int],
        chunk_hash: bytes,
        wanted: Sequence[int],
        used: list[Stored],
    ) -> list[Stored]:
        """Asserts that the chunk could not have got room; returns those of its objects that were used on the way."""
        evictable = [stored for stored in self.order if stored not in used]
        also_used: list[Stored] = []
        taken: list[int] = []
        for namespace, size_bytes, flag in zip(namespaces, sizes, wanted, strict=True):
            stored = self.found.get((namespace, chunk_hash))
            if stored is None and not flag:
                continue
            if stored is None:
                taken.append(-(-size_bytes // UNIT) * UNIT)
            elif stored.state == "resident":
                also_used.append(stored)
        assert taken, "a chunk that needs no memory was refused"
        evictable = [stored for stored in evictable if stored not in also_used]
        # One of the chunk's objects was refused. Those before it lie anywhere, and so may have cut the longest run
        # into so many pieces more; if even then each would have fitted, none was refused rightly.
        longest = max(self.gaps(evictable))
        assert any((longest - sum(taken[:i])) // (i + 1) < size for i, size in enumerate(taken)), (
            "refused although there was room"
        )
        return also_used

    def commit(
        self, reservation: int, written: list[list[int]] | None, lease_owner: int, deadline: float, is_temporary: bool
    ) -> None:
        flags = b"" if written is None else bytes(flag for row in written for flag in row)
        count, lease, packed = values(
            self.core.commit(reservation, flags, lease_owner=lease_owner, deadline=deadline, temporary=is_temporary)
        )
        claim = self.reservations.get(reservation)
        if claim is None or claim.is_quarantined:
            assert (count, lease, packed) == (0, 0, [])
            return
        del self.reservations[reservation]
        records = []
        published: list[Stored] = []
        for chunk in range(len(claim.slots[0])):
            for row, slots in enumerate(claim.slots):
                stored = slots[chunk]
                if stored is None:
                    continue
                if written is not None and not written[row][chunk]:
                    self.drop(stored)
                    continue
                stored.state = "resident"
                stored.is_temporary = is_temporary
                stored.readers = 1 if lease_owner else 0
                published.append(stored)
                records.append((row, chunk, stored.offset, stored.size_bytes))
        assert count == len(records)
        assert packed == records
        assert (lease != 0) == bool(lease_owner and published)
        in_order = self._last_chunk_first(claim, published)
        for stored in in_order:
            self.use(stored)
        if lease:
            self.leases[lease] = Lease(lease_owner, deadline, in_order)

    @staticmethod
    def _last_chunk_first(claim: Reservation, published: list[Stored]) -> list[Stored]:
        chunks = len(claim.slots[0])
        ordered = [row[chunk] for chunk in reversed(range(chunks)) for row in claim.slots]
        return [stored for stored in ordered if stored is not None and stored in published]

    def abort(self, reservation: int) -> None:
        assert self.core.abort(reservation) == (reservation in self.reservations)
        if reservation in self.reservations:
            for stored in self.reservations.pop(reservation).objects():
                self.drop(stored)

    # ---- reading -----------------------------------------------------------------------------------------------------
    def probe(self, namespaces: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        assert self.core.probe(b"".join(namespaces), b"".join(hashes)) == self.prefix(namespaces, hashes)

    def touch(self, namespaces: Sequence[bytes], hashes: Sequence[bytes], tails: Sequence[int]) -> None:
        chunks = self.prefix([ns for ns, tail in zip(namespaces, tails, strict=True) if not tail], hashes)
        assert self.core.touch(b"".join(namespaces), b"".join(hashes), tails=pack_u32(tails)) == chunks
        for chunk in reversed(range(chunks)):
            for namespace in reversed(namespaces):
                stored = self.resident((namespace, hashes[chunk]))
                if stored is not None:
                    self.use(stored)

    def acquire(
        self,
        owner: int,
        namespaces: Sequence[bytes],
        hashes: Sequence[bytes],
        deadline: float,
        tails: Sequence[int],
        is_use: bool = True,
    ) -> None:
        chunks = self.usable_prefix(namespaces, hashes, tails)
        lease, count, packed = values(
            self.core.acquire(
                owner,
                b"".join(namespaces),
                b"".join(hashes),
                deadline,
                is_use=is_use,
                tails=pack_u32(tails) if any(tails) else b"",
            )
        )
        assert (count, lease != 0) == (chunks, chunks > 0)
        needed = self.needed(namespaces, hashes[:chunks], tails)
        expected = [[NO_SLOT] * chunks for _ in namespaces]
        for chunk, namespace, chunk_hash in needed:
            expected[list(namespaces).index(namespace)][chunk] = self.found[namespace, chunk_hash].offset
        assert [value for (value,) in struct.iter_unpack("<Q", packed)] == [slot for row in expected for slot in row]
        if lease:
            objects = [self.found[namespace, chunk_hash] for _, namespace, chunk_hash in needed]
            for stored in objects:
                stored.readers += 1
            assert lease not in self.leases
            self.leases[lease] = Lease(owner, deadline, objects, is_use)

    def release(self, lease: int) -> None:
        assert self.core.release(lease) == (lease in self.leases)
        if lease in self.leases:
            self.end_lease(lease)

    def end_lease(self, lease: int) -> None:
        ended = self.leases.pop(lease)
        for stored in ended.objects:
            self.let_go(stored, ended.is_use)

    def acquire_each(self, owner: int, keys: Sequence[Key], deadline: float) -> None:
        stored = [self.resident(key) for key in keys]
        lease, count, packed = values(
            self.core.acquire_each(owner, b"".join(key[0] for key in keys), b"".join(key[1] for key in keys), deadline)
        )
        expected = [NO_SLOT if resident is None else resident.offset for resident in stored]
        assert [value for (value,) in struct.iter_unpack("<Q", packed)] == expected
        objects = [resident for resident in stored if resident is not None]
        assert (count, lease != 0) == (len(objects), bool(objects))
        flags = self.core.resident_each(b"".join(key[0] for key in keys), b"".join(key[1] for key in keys))
        assert flags == bytes(resident is not None for resident in stored)
        if lease:
            for resident in objects:
                resident.readers += 1
            assert lease not in self.leases
            self.leases[lease] = Lease(owner, deadline, objects, False)

    # ---- owners and time ---------------------------------------------------------------------------------------------
    def renew(self, owner: int, deadline: float) -> None:
        claims: list[Any] = [
            claim
            for claim in [*self.leases.values(), *self.reservations.values()]
            if claim.owner == owner  # type: ignore[attr-defined]
        ]
        active = [claim for claim in claims if not getattr(claim, "is_quarantined", False)]
        assert self.core.renew(owner, deadline) == len(active)
        for claim in active:
            claim.deadline = deadline

    def expire(self, now: float) -> None:
        leases = [number for number, lease in sorted(self.leases.items()) if lease.deadline <= now]
        reservations = [
            claim for claim in self.reservations.values() if claim.deadline <= now and not claim.is_quarantined
        ]
        assert values(self.core.expire(now)) == (len(leases), len(reservations))
        for number in leases:
            self.end_lease(number)
        for claim in reservations:
            claim.is_quarantined = True
            for stored in claim.objects():
                del self.found[stored.key]
                stored.state = "quarantined"

    def drop_owner(self, owner: int) -> None:
        leases = [number for number, lease in sorted(self.leases.items()) if lease.owner == owner]
        reservations = [number for number, claim in self.reservations.items() if claim.owner == owner]
        assert values(self.core.drop_owner(owner)) == (len(leases), len(reservations))
        for number in leases:
            self.end_lease(number)
        for number in reservations:
            for stored in self.reservations.pop(number).objects():
                self.drop(stored)

    # ---- upkeep ------------------------------------------------------------------------------------------------------
    def evict(self, target_bytes: int) -> None:
        count, freed_bytes = values(self.core.evict(target_bytes))
        listed = self.listed()
        gone = [stored for stored in self.order if stored.key not in listed]
        assert (count, freed_bytes) == (len(gone), sum(stored.size_bytes for stored in gone))
        assert freed_bytes >= target_bytes or not len(gone) < len(self.order), (
            "stopped although there was more to evict"
        )
        if self.is_exact:
            assert gone == self.order[: len(gone)], "evicted something that was used after what stayed"
        assert freed_bytes < target_bytes + max((stored.size_bytes for stored in gone), default=1), "evicted too much"
        for stored in gone:
            self.drop(stored)
        assert listed == {key for key, stored in self.found.items() if stored.state == "resident"}
        self.evicted += count

    def remove(self, keys: Sequence[Key]) -> None:
        gone = [
            stored for stored in map(self.resident, dict.fromkeys(keys)) if stored is not None and not stored.readers
        ]
        assert self.core.remove(b"".join(key[0] for key in keys), b"".join(key[1] for key in keys)) == len(gone)
        for stored in gone:
            self.drop(stored)

    def clear(self) -> None:
        gone = list(self.order)
        assert values(self.core.clear()) == (len(gone), sum(stored.size_bytes for stored in gone))
        for stored in gone:
            self.drop(stored)
        for key, stored in list(self.found.items()):
            if stored.state == "resident":
                stored.state = "detached"
                del self.found[key]

    def commit_memory(self, committed_bytes: int) -> None:
        self.core.set_committed(committed_bytes)
        self.committed_bytes = max(self.committed_bytes, committed_bytes)

    def check(self) -> None:
        """The core's own invariants, and every figure that it reports."""
        self.core.check()
        gaps = self.gaps()
        stats = self.core.stats()
        expected = {
            "committed_bytes": self.committed_bytes,
            "used_bytes": sum(stored.size_bytes for stored in self.memory),
            "free_bytes": sum(gaps),
            "largest_free_bytes": max(gaps),
            "objects": sum(stored.state == "resident" for stored in self.found.values()),
            "staged": sum(stored.state == "staged" for stored in self.found.values()),
            "leases": len(self.leases),
            "leased_objects": sum(stored.readers > 0 for stored in self.memory),
            "reservations": len(self.reservations),
            "quarantined_bytes": sum(stored.size_bytes for stored in self.memory if stored.state == "quarantined"),
            "evicted_objects": self.evicted,
            "allocation_failures": self.failures,
        }
        assert {name: stats[name] for name in expected} == expected
        usage: dict[str, int] = {}
        for stored in self.memory:
            salt = self.salts[stored.key[0]]
            usage[salt] = usage.get(salt, 0) + stored.size_bytes
        assert dict(self.core.salt_usage()) == usage
        assert self.listed() == {key for key, stored in self.found.items() if stored.state == "resident"}
