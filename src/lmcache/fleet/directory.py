"""Which server has a copy of what: names over the native directory.

A place is a tier and a backend of a server. It has a holder in the native directory, a new one for each time that
everything is told again, so that what was not told again can be forgotten at once.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from lmcache import _native
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import LMCacheError
from lmcache.fleet.keys import PackedKeys, decode_scope, pack, told
from lmcache.fleet.messages import Entry, Key, KeyEntry, LookupResult, Objects, Placement

SWEEP_STEP_RECORDS = 65_536
_LIST_EXAMINED_RECORDS = 262_144
_NAMED_KEYS = 256  # of which all copies are looked at under the lock
_MOST_COPIES = limits.MAX_FLEET_INSTANCES * limits.MAX_FLEET_PLACES_PER_INSTANCE
_L1 = "l1"

PlaceName = tuple[str, str, str]  # instance, tier, backend
Copy = tuple[int, int, str, str]  # position of its key, world size of its namespace (0: not told), instance, tier


@dataclass
class Place:
    number: int
    holder: int
    instance_id: str
    tier: str
    backend: str
    shared: bool
    capacity_bytes: int = 0
    is_told: bool = True  # since the resync began that is under way or was the last
    previous_holders: list[int] = field(default_factory=list)  # told before the resync that is under way, oldest first


@dataclass(frozen=True)
class PlaceUsage:
    place: Place
    objects: int
    used_bytes: int


class Directory:
    """Thread-safe."""

    def __init__(self, incarnation_of: Callable[[str], int], most_copies: int = limits.MAX_FLEET_COPIES) -> None:
        """`incarnation_of` an instance, for answers."""
        self._native = _native.FleetDirectory(most_copies)
        self._incarnation_of = incarnation_of
        self._lock = threading.Lock()
        self._places: dict[str, dict[tuple[str, str], Place]] = {}  # by instance
        self._holders: dict[int, Place] = {}
        self._numbers = count()
        self._models: dict[str, int] = {}  # the highest rank of each that was told since `refresh_models`
        self._world_sizes: dict[bytes, int] = {}  # by variant, of those that were told

    @property
    def is_idle(self) -> bool:
        """Whether a call would not wait for another one, at this moment."""
        return not self._lock.locked()

    # ---- what is told ------------------------------------------------------------------------------------------------
    def store(
        self,
        instance_id: str,
        tier: str,
        backend: str,
        shared: bool,
        entries: Sequence[Entry],
        namespace: str,
        objects: Objects | None = None,
        *,
        world_size: int = 0,
    ) -> int:
        """How many of these the directory has now. `world_size` of that namespace, 0 where it is not known."""
        with self._lock:
            self._note_world_size(bytes.fromhex(namespace), world_size)
            place = self._place(instance_id, tier, backend)
            place.shared = shared
            stored = 0
            for some in told(entries, namespace, objects):
                keys = some.keys
                self._note_models(keys.scopes)
                stored += self._native.store(
                    *(place.holder, keys.scopes, some.variant, keys.positions, keys.hashes), some.sizes_bytes
                )
            return stored

    def remove(
        self,
        instance_id: str,
        tier: str,
        backend: str,
        entries: Sequence[Entry],
        namespace: str,
        objects: Objects | None = None,
    ) -> int:
        """How many there were."""
        with self._lock:
            place = self._place(instance_id, tier, backend)
            removed = 0
            for some in told(entries, namespace, objects):
                keys = some.keys
                removed += self._native.remove(place.holder, keys.scopes, some.variant, keys.positions, keys.hashes)
            return removed

    def count_accesses(self, entries: Sequence[Entry], namespace: str, objects: Objects | None = None) -> None:
        with self._lock:
            for some in told(entries, namespace, objects):
                keys = some.keys
                self._native.count_accesses(keys.scopes, some.variant, keys.positions, keys.hashes)

    def restore(
        self,
        place_name: PlaceName,
        scopes: list[bytes],
        variant: bytes,
        positions: bytes,
        hashes: bytes,
        sizes: bytes,
        world_size: int = 0,
    ) -> None:
        """Copies of a checkpoint. ValueError for columns that do not fit each other."""
        with self._lock:
            self._note_models(scopes)
            self._note_world_size(variant, world_size)
            self._native.store(self._place(*place_name).holder, scopes, variant, positions, hashes, sizes)

    def set_capacity(self, instance_id: str, tier: str, backend: str, shared: bool, capacity_bytes: int) -> None:
        with self._lock:
            place = self._place(instance_id, tier, backend)
            place.shared, place.capacity_bytes = shared, capacity_bytes

    def forget_l1(self, instance_id: str) -> None:
        """What was told of that server's L1 is not known any more."""
        with self._lock:
            places = self._places.get(instance_id, {})
            for name, place in list(places.items()):
                if place.tier != _L1:
                    continue
                try:
                    holder = self._holder(place)  # before anything is forgotten, as there may be none
                except LMCacheError:
                    del places[name]
                    self._void(place)
                    continue
                self._void(place)
                place.holder = holder

    def begin_resync(self, instance_id: str) -> None:
        """Everything of that server is told again from here on."""
        with self._lock:
            for place in self._places.get(instance_id, {}).values():
                holder = self._holder(place)
                place.previous_holders.append(place.holder)
                place.holder, place.is_told = holder, False
                while len(place.previous_holders) > limits.MAX_FLEET_UNFINISHED_RESYNCS:
                    self._void_holder(place.previous_holders.pop(0))

    def end_resync(self, instance_id: str) -> None:
        """Everything has been told again: what was not is not there."""
        with self._lock:
            places = self._places.get(instance_id, {})
            for name, place in list(places.items()):
                if not place.is_told:  # a tier that the server has no more
                    del places[name]
                    self._void(place)
                    continue
                for holder in place.previous_holders:
                    self._void_holder(holder)
                place.previous_holders.clear()

    def forget(self, instance_id: str) -> None:
        """That server has left."""
        with self._lock:
            for place in self._places.pop(instance_id, {}).values():
                self._void(place)

    def sweep(self) -> bool:
        """Frees a part of what is forgotten. Whether there is more."""
        return self._native.sweep(SWEEP_STEP_RECORDS)

    # ---- answers -----------------------------------------------------------------------------------------------------
    def lookup(self, keys: Sequence[Key], most_copies: int = 0) -> list[LookupResult]:
        """In the order of the keys, a placement for each place. A key without a namespace finds copies of any, and
        the answer names it where they have one. Of a key with more than `most_copies`, by default
        MAX_FLEET_COPIES_SHOWN, the answer is not complete."""
        packed = pack(keys)
        most_copies = min(most_copies or limits.MAX_FLEET_COPIES_SHOWN, _MOST_COPIES)
        with self._lock:
            page = self._lookup(packed, most_copies + 1)
            copies = [0] * len(keys)
            placements: list[dict[int, Placement]] = [{} for _ in keys]
            access_counts = [0] * len(keys)
            namespaces = [variant.hex() for variant in page.variants]
            found: list[set[str]] = [set() for _ in keys]
            incarnations: dict[str, int] = {}
            rows = zip(page.keys, page.positions, page.holders, page.sizes_bytes, page.access_counts, strict=True)
            for index, position, holder, size_bytes, accesses in rows:
                namespace, wanted = namespaces[position], keys[index].namespace
                copies[index] += 1
                if copies[index] > most_copies:
                    continue
                if wanted and namespace and wanted != namespace:
                    continue
                found[index].add(namespace)
                number = self._holders[holder].number
                placements[index].setdefault(number, self._placement(holder, size_bytes, incarnations))
                access_counts[index] = max(access_counts[index], accesses)
        return [
            LookupResult(
                _with_namespace(key, names), list(places.values()), accesses, complete=copies_of_key <= most_copies
            )
            for key, names, places, accesses, copies_of_key in zip(
                keys, found, placements, access_counts, copies, strict=True
            )
        ]

    def copies(self, keys: Sequence[Key]) -> list[Copy]:
        """All of these keys, in any namespace."""
        packed = pack(keys)
        with self._lock:
            page = self._lookup(packed, _MOST_COPIES)
            world_sizes = [self._world_sizes.get(variant, 0) for variant in page.variants]
            places = [self._holders[holder] for holder in page.holders]
            return [
                (index, world_sizes[position], place.instance_id, place.tier)
                for index, position, place in zip(page.keys, page.positions, places, strict=True)
            ]

    def _lookup(self, packed: PackedKeys, most_copies: int) -> _native.FleetPage:
        return self._native.lookup(packed.scopes, packed.positions, packed.hashes, most_copies)

    def names_by_instance(
        self, keys: Sequence[Key], instance_id: str = "", tier: str = "all"
    ) -> tuple[dict[str, list[str]], int]:
        """Who has copies of these keys, all of them, and the names NAMESPACE/HASH that it calls them; and how many keys
        are known only of servers that tell no namespaces."""
        found: dict[str, dict[str, None]] = {}
        unnamed = 0
        for first in range(0, len(keys), _NAMED_KEYS):
            unnamed += self._add_names(found, keys[first : first + _NAMED_KEYS], instance_id, tier)
        return {instance: list(names) for instance, names in found.items()}, unnamed

    def _add_names(self, found: dict[str, dict[str, None]], keys: Sequence[Key], instance_id: str, tier: str) -> int:
        """How many of them have no name."""
        packed = pack(keys)
        unnamed: set[int] = set()
        with_name: set[int] = set()
        with self._lock:
            page = self._lookup(packed, _MOST_COPIES)
            for index, position, holder in zip(page.keys, page.positions, page.holders, strict=True):
                place, variant = self._holders[holder], page.variants[position].hex()
                if (instance_id and place.instance_id != instance_id) or tier not in ("all", place.tier):
                    continue
                if not variant:
                    unnamed.add(index)
                    continue
                if keys[index].namespace in ("", variant):
                    with_name.add(index)
                    name = f"{variant}/{keys[index].chunk_hash_hex[-2 * CHUNK_HASH_BYTES :].lower()}"
                    found.setdefault(place.instance_id, {})[name] = None
        return len(unnamed - with_name)

    def list_keys(
        self, tier: str, instance_id: str, backend: str, offset: int, limit: int
    ) -> tuple[list[KeyEntry], int]:
        """A page, and where the next one begins; 0 after the last."""
        with self._lock:
            wanted = [
                place
                for instance, places in self._places.items()
                for place in places.values()
                if instance_id in ("", instance) and tier in ("", place.tier) and backend in ("", place.backend)
            ]
            holders = array("I", [holder for place in wanted for holder in (place.holder, *place.previous_holders)])
            if not holders:
                return [], 0
            page = self._native.list(offset, limit, _LIST_EXAMINED_RECORDS, holders)
            namespaces = [variant.hex() for variant in page.variants]
            scopes = [decode_scope(scope) for scope in page.scopes]
            incarnations: dict[str, int] = {}
            entries = []
            hashes, digits = page.hashes.hex(), 2 * CHUNK_HASH_BYTES
            rows = zip(page.positions, page.holders, page.sizes_bytes, strict=True)
            for row, (position, holder, size_bytes) in enumerate(rows):
                model_name, rank, group, salt = scopes[position]
                chunk_hash = hashes[row * digits : (row + 1) * digits]
                key = Key(chunk_hash, model_name, rank, group, salt, namespaces[position])
                entries.append(KeyEntry(key, self._placement(holder, size_bytes, incarnations)))
            return entries, page.next_start

    def page(self, start: int, most: int) -> tuple[_native.FleetPage, list[PlaceName], list[int]]:
        """Lists all copies, for a checkpoint; the place of each, and the world size of each of its variants."""
        with self._lock:
            page = self._native.list(start, most, _LIST_EXAMINED_RECORDS)
            places = [self._holders[holder] for holder in page.holders]
            world_sizes = [self._world_sizes.get(variant, 0) for variant in page.variants]
            return page, [(place.instance_id, place.tier, place.backend) for place in places], world_sizes

    def usage(self, instance_id: str) -> list[PlaceUsage]:
        with self._lock:
            return [self._usage(place) for place in self._places.get(instance_id, {}).values()]

    def bytes_of_salts(self) -> dict[str, int]:
        """Over all servers and tiers."""
        page = self._native.scopes()
        found: dict[str, int] = {}
        for scope, size_bytes in zip(page.scopes, page.sizes_bytes, strict=True):
            salt = decode_scope(scope)[3]
            found[salt] = found.get(salt, 0) + size_bytes
        return found

    def models(self) -> dict[str, int]:
        """The ranks of each model of which objects were told since `refresh_models`, or are there."""
        with self._lock:
            return {name: rank + 1 for name, rank in self._models.items()}

    def refresh_models(self) -> None:
        """Forgets models of which nothing is there. O(scopes)."""
        with self._lock:
            page = self._native.scopes()
            self._models = {}
            self._note_models(page.scopes)
            variants = set(page.variants)
            self._world_sizes = {variant: size for variant, size in self._world_sizes.items() if variant in variants}

    def places(self) -> list[Place]:
        with self._lock:
            return [place for places in self._places.values() for place in places.values()]

    def stats(self) -> _native.FleetStats:
        return self._native.stats()

    def check(self) -> None:
        """RuntimeError that names the broken invariant."""
        self._native.check()

    # ---- under the lock ----------------------------------------------------------------------------------------------
    def _note_models(self, scopes: Sequence[bytes]) -> None:
        for scope in scopes:
            name, rank, _, _ = decode_scope(scope)
            if rank > self._models.get(name, -1):
                self._models[name] = rank

    def _note_world_size(self, variant: bytes, world_size: int) -> None:
        if world_size and variant and len(self._world_sizes) < limits.MAX_FLEET_NAMESPACES:
            self._world_sizes[variant] = world_size

    def _place(self, instance_id: str, tier: str, backend: str) -> Place:
        places = self._places.setdefault(instance_id, {})
        place = places.get((tier, backend))
        if place is None:
            if len(places) >= limits.MAX_FLEET_PLACES_PER_INSTANCE:
                most = limits.MAX_FLEET_PLACES_PER_INSTANCE
                raise LMCacheError(f"{instance_id} tells of more than {most} tiers and backends; a server has fewer.")
            place = Place(next(self._numbers) % 2**32, 0, instance_id, tier, backend, shared=False)
            place.holder = self._holder(place)
            places[tier, backend] = place
        place.is_told = True
        return place

    def _holder(self, place: Place) -> int:
        """LMCacheError where there is no room for another one."""
        may_free = True
        while True:
            try:
                holder = self._native.add_holder(place.number)
            except ValueError:
                if not may_free:
                    raise LMCacheError(
                        f"The directory knows {len(self._holders)} tiers and backends of servers, those that are told "
                        f"again counted twice, and takes no other one, such as that of {place.instance_id}: divide the "
                        "fleet among more coordinators."
                    ) from None
                may_free = self._native.sweep(SWEEP_STEP_RECORDS)  # of those that are forgotten
                continue
            self._holders[holder] = place
            return holder

    def _void(self, place: Place) -> None:
        for holder in (place.holder, *place.previous_holders):
            self._void_holder(holder)
        place.previous_holders.clear()

    def _void_holder(self, holder: int) -> None:
        del self._holders[holder]
        self._native.void_holder(holder)

    def _placement(self, holder: int, size_bytes: int, incarnations: dict[str, int]) -> Placement:
        place = self._holders[holder]
        instance_id = place.instance_id
        if instance_id not in incarnations:
            incarnations[instance_id] = self._incarnation_of(instance_id)
        return Placement(instance_id, incarnations[instance_id], place.tier, place.backend, size_bytes, place.shared)

    def _usage(self, place: Place) -> PlaceUsage:
        held = [self._native.holder_stats(holder) for holder in (place.holder, *place.previous_holders)]
        return PlaceUsage(place, sum(stats.objects for stats in held), sum(stats.bytes for stats in held))


def _with_namespace(key: Key, namespaces: set[str]) -> Key:
    if key.namespace or len(namespaces) != 1:
        return key
    return Key(*(key.chunk_hash_hex, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt), *namespaces)
