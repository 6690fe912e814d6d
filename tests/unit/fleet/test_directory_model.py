"""Random calls of the directory beside a dict: TEST_FLEET_STEPS of them."""

from __future__ import annotations

import os
import random
from itertools import count

from lmcache.core.limits import MAX_FLEET_PLACES_PER_INSTANCE, MAX_FLEET_UNFINISHED_RESYNCS
from lmcache.fleet.directory import Directory
from lmcache.fleet.messages import Entry, Key
from seeds import SEED
from unit.fleet.support import chunk_hash, namespace

STEPS = int(os.environ.get("TEST_FLEET_STEPS", "3000"))
INSTANCES = ("a", "b", "c")
PLACES = (("l1", ""), ("l2", "disk"))

_Key = tuple[int, int]
_Place = tuple[str, str, str]


def key_of(key: _Key, *, named: bool = True) -> Key:
    of = namespace(key[0])
    digest = of.digest.hex() if named else ""
    return Key(chunk_hash(key[1]).hex(), of.model_name, of.rank, 0, of.cache_salt, digest)


class Both:
    """A directory and its model: by place the size of each key, and in which resync it was told."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.directory = Directory(lambda instance_id: 7)
        self.held: dict[_Place, dict[_Key, int]] = {}
        self.told_in: dict[_Place, dict[_Key, int]] = {}
        self.resyncs = count(1)
        self.resync: dict[_Place, int] = {}  # the latest
        self.unfinished: dict[_Place, list[int]] = {}  # those before it

    def some(self) -> dict[_Key, int]:
        keys = [(self.rng.randrange(4), self.rng.randrange(30)) for _ in range(self.rng.randrange(1, 12))]
        return {key: self.rng.choice((0, 4096, 3 << 30, (5 << 30))) for key in keys}

    def place(self) -> _Place:
        place = (self.rng.choice(INSTANCES), *self.rng.choice(PLACES))
        self.held.setdefault(place, {})
        self.told_in.setdefault(place, {})
        self.resync.setdefault(place, 0)
        self.unfinished.setdefault(place, [])
        return place

    def store(self) -> None:
        place, some = self.place(), self.some()
        entries = [Entry(key_of(key), size) for key, size in some.items()]
        assert self.directory.store(*place, False, entries, "") == len(some)
        self.held[place].update(some)
        self.told_in[place].update(dict.fromkeys(some, self.resync[place]))

    def remove(self) -> None:
        place, some = self.place(), self.some()
        removed = sum(self.held[place].pop(key, None) is not None for key in some)
        assert self.directory.remove(*place, [Entry(key_of(key)) for key in some], "") == removed

    def count_accesses(self) -> None:
        some = self.some()
        self.directory.count_accesses([Entry(key_of(key)) for key in some], "")

    def places_of(self, instance: str) -> list[_Place]:
        return [place for place in self.held if place[0] == instance]

    def drop(self, place: _Place, resyncs: list[int]) -> None:
        """What was told in these and not again."""
        for key in [key for key in self.held[place] if self.told_in[place][key] in resyncs]:
            del self.held[place][key]

    def forget_l1(self) -> None:
        instance = self.rng.choice(INSTANCES)
        self.directory.forget_l1(instance)
        for place in self.places_of(instance):
            if place[1] == "l1":
                self.held[place].clear()
                self.unfinished[place].clear()

    def begin(self) -> None:
        instance = self.rng.choice(INSTANCES)
        self.directory.begin_resync(instance)
        for place in self.places_of(instance):
            self.unfinished[place].append(self.resync[place])
            self.resync[place] = next(self.resyncs)
            if len(self.unfinished[place]) > MAX_FLEET_UNFINISHED_RESYNCS:
                self.drop(place, [self.unfinished[place].pop(0)])

    def end(self) -> None:
        instance = self.rng.choice(INSTANCES)
        self.directory.end_resync(instance)
        for place in self.places_of(instance):
            self.drop(place, self.unfinished[place])
            self.unfinished[place].clear()

    def forget(self) -> None:
        instance = self.rng.choice(INSTANCES)
        self.directory.forget(instance)
        for place in self.places_of(instance):
            del self.held[place], self.told_in[place], self.resync[place], self.unfinished[place]

    def sweep(self) -> None:
        self.directory.sweep()

    def look(self) -> None:
        keys = list(self.some())
        results = self.directory.lookup([key_of(key, named=self.rng.random() < 0.5) for key in keys])
        for key, result in zip(keys, results, strict=True):
            found = {(place.instance_id, place.tier, place.backend): place.size_bytes for place in result.placements}
            assert len(found) == len(result.placements)
            assert found == {place: held[key] for place, held in self.held.items() if key in held}
        names, unnamed = self.directory.names_by_instance([key_of(key, named=False) for key in keys])
        assert not unnamed
        for instance in INSTANCES:
            held_keys = {
                key for key in keys for place, held in self.held.items() if place[0] == instance and key in held
            }
            expected = {f"{namespace(key[0]).digest.hex()}/{chunk_hash(key[1]).hex()}" for key in held_keys}
            assert set(names.get(instance, ())) == expected

    def check(self) -> None:
        self.directory.check()
        for instance in INSTANCES:
            for usage in self.directory.usage(instance):
                held = self.held.get((instance, usage.place.tier, usage.place.backend), {})
                assert (usage.objects, usage.used_bytes) == (len(held), sum(held.values()))


def test_random_calls_agree_with_a_dict() -> None:
    rng = random.Random(SEED)
    both = Both(rng)
    steps = [both.store] * 8 + [both.remove] * 4 + [both.look] * 6 + [both.count_accesses, both.sweep]
    steps += [both.forget_l1, both.begin, both.end, both.forget]
    for number in range(STEPS):
        rng.choice(steps)()
        if number % 50 == 0:
            both.check()
    for instance in INSTANCES:
        both.directory.forget(instance)
    while both.directory.sweep():
        pass
    stats = both.directory.stats()
    assert (stats.keys, stats.records, stats.void_records, stats.scopes, stats.holders) == (0, 0, 0, 0, 0)


def test_a_tier_that_is_not_told_again_is_gone() -> None:
    """However often a server was started with other adapters."""
    directory = Directory(lambda instance_id: 1)
    for number in range(2 * MAX_FLEET_PLACES_PER_INSTANCE):
        directory.begin_resync("a")
        directory.set_capacity("a", "l1", "", False, 1)
        directory.store("a", "l2", f"disk-{number}", False, [Entry(Key("ab" * 32, "m", 0), 5)], "")
        directory.end_resync("a")
    held = [(usage.place.backend, usage.objects, usage.used_bytes) for usage in directory.usage("a")]
    assert held == [("", 0, 0), (f"disk-{number}", 1, 5)]
    while directory.sweep():
        pass
    assert directory.stats().holders == 2
    directory.check()


def test_accesses_are_counted_for_a_key() -> None:
    directory = Directory(lambda instance_id: 7)
    entry = Entry(key_of((0, 1)), 10)
    directory.count_accesses([entry], "")  # nobody has it
    directory.store("a", "l1", "", False, [entry], "")
    directory.count_accesses([entry, entry], "")
    directory.store("b", "l1", "", False, [entry], "")
    directory.forget("a")
    (result,) = directory.lookup([entry.key])
    assert result.access_count == 2
    assert [place.instance_id for place in result.placements] == ["b"]


def test_layouts_of_one_model_are_told_apart() -> None:
    """A lookup without a namespace finds all; what goes in one stays in the other."""
    directory = Directory(lambda instance_id: 7)
    first, other, unnamed = (Entry(Key("ab" * 32, "m", 0, 0, "", name), 10) for name in ("11" * 32, "22" * 32, ""))
    for entry in (first, other, unnamed):
        directory.store("a", "l1", "", False, [entry], "")
    assert directory.stats().records == 3
    (result,) = directory.lookup([unnamed.key])
    assert (len(result.placements), result.key.namespace) == (1, "")  # of one place
    directory.remove("a", "l1", "", [first], "")
    assert directory.names_by_instance([unnamed.key]) == ({"a": [f"{'22' * 32}/{'ab' * 32}"]}, 0)
    directory.remove("a", "l1", "", [other], "")
    assert directory.names_by_instance([unnamed.key]) == ({}, 1)
