"""Random calls of a ledger beside a model of its rules: TEST_LEDGER_STEPS of them for each policy."""

from __future__ import annotations

import os
import random
from itertools import count

import pytest

from lmcache._native import LedgerHold
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.salt_limits import SaltLimits
from lmcache.l2.accounting import Ledger
from lmcache.l2.adapter import Capacity
from seeds import SEED
from unit.l2.ledger_model import FOLDER_BYTES, OVERHEAD_BYTES, UNIT_BYTES, LedgerModel, Record

STEPS = int(os.environ.get("TEST_LEDGER_STEPS", "1500"))
ROOM_BYTES = 100_000
KNOWN_KEYS = 200
SALTS = ("", "a", "b", "c")
NAMESPACES = [Namespace(f"model-{model}", 1, 0, 0, "0" * 32, salt) for salt in SALTS for model in range(2)]


class Both:
    """A ledger and its model, given the same random calls. Keys that were evicted do not come back: what S3FIFO
    remembers of them is tested apart."""

    def __init__(self, policy: str, rng: random.Random) -> None:
        self.rng = rng
        self.limits = SaltLimits()
        self.ledger = Ledger(policy, lambda: 0, self.limits)
        self.ledger.capacity = Capacity(ROOM_BYTES, UNIT_BYTES, OVERHEAD_BYTES, folder_bytes=FOLDER_BYTES)
        self.model = LedgerModel(policy, {}, ROOM_BYTES)
        self.keys: list[ObjectKey] = []
        self.numbers = count()
        self.leaving: list[ObjectKey] = []
        self.holds: list[tuple[LedgerHold, list[Record]]] = []
        self.reservations: list[tuple[list[ObjectKey], int]] = []

    def some_keys(self, *, fresh: int = 0) -> list[ObjectKey]:
        for _ in range(fresh):
            chunk_hash = bytes([self.rng.randrange(3)]) + next(self.numbers).to_bytes(31, "big")
            self.keys.append(ObjectKey(self.rng.choice(NAMESPACES), chunk_hash))
        self.forget(self.keys[:-KNOWN_KEYS])
        return self.rng.sample(self.keys, min(len(self.keys), self.rng.randint(1, 8)))

    def forget(self, keys: list[ObjectKey]) -> None:
        """These are lost and not named again: each step costs the same, however many there are."""
        self.ledger.lost(keys)
        self.model.lost(keys)
        self.keys = self.keys[len(keys) :]

    def sizes(self, keys: list[ObjectKey]) -> list[int]:
        return [self.rng.randint(1, 4000) for _ in keys]

    def store(self) -> None:
        keys = self.some_keys(fresh=4)
        sizes = self.sizes(keys)
        charged_bytes = self.ledger.native.stored(keys, sizes)
        self.model.stored(keys, sizes)
        assert charged_bytes == sum(self.model.records[key].charge for key in keys)

    def find(self) -> None:
        keys = self.some_keys(fresh=2)
        sizes = self.sizes(keys)
        newer = self.rng.random() < 0.5
        self.ledger.found(list(zip(keys, sizes, strict=True)), newer=newer)
        self.model.found(keys, sizes, newer=newer)

    def touch(self) -> None:
        keys = self.some_keys()
        self.ledger.touch(keys)
        self.model.touch(keys)

    def lose(self) -> None:
        keys = self.some_keys()[:2]
        self.ledger.lost(keys)
        self.model.lost(keys)

    def hold(self) -> None:
        keys = self.some_keys()
        self.holds.append((self.ledger.hold(keys), self.model.hold(keys)))

    def let_go(self) -> None:
        if self.holds:
            hold, records = self.holds.pop(self.rng.randrange(len(self.holds)))
            self.ledger.let_go(hold)
            self.model.let_go(records)

    def evict(self) -> None:
        wanted_bytes, most = self.rng.randint(0, 20_000), self.rng.randint(1, 12)
        victims = self.ledger.victims(wanted_bytes, most)
        chosen_bytes = 0
        for key in victims.keys:
            assert chosen_bytes < wanted_bytes
            assert self.model.may_go_next(key)
            chosen_bytes += self.model.choose(key)
        assert chosen_bytes == victims.size_bytes
        assert chosen_bytes >= wanted_bytes or len(victims.keys) == most or self.model.may_go_next(None)
        # One may have been stored anew, and chosen again, before its first deletion ended.
        self.leaving = [key for key in self.leaving if key not in victims.keys] + victims.keys

    def end_deletes(self) -> None:
        self.rng.shuffle(self.leaving)
        keys, self.leaving = self.leaving[:6], self.leaving[6:]
        gone = [self.rng.random() < 0.7 for _ in keys]
        self.ledger.evicted([key for key, is_gone in zip(keys, gone, strict=True) if is_gone])
        self.ledger.not_evicted([key for key, is_gone in zip(keys, gone, strict=True) if not is_gone])
        self.model.evicted(keys, gone)
        self.keys = [key for key in self.keys if key not in keys]

    def reserve(self) -> None:
        keys, charge_bytes = self.some_keys(fresh=1), self.rng.randint(0, 9000)
        assert self.ledger.lacking_bytes(keys, charge_bytes) == self.model.lacking(keys, charge_bytes)
        self.ledger.native.reserve(keys, charge_bytes)
        self.model.reserved.update(keys)
        self.model.reserved_bytes += charge_bytes
        self.reservations.append((keys, charge_bytes))

    def give_back(self) -> None:
        if self.reservations:
            keys, charge_bytes = self.reservations.pop(self.rng.randrange(len(self.reservations)))
            self.ledger.native.give_back(keys, charge_bytes)
            self.model.reserved -= type(self.model.reserved)(keys)
            self.model.reserved_bytes -= charge_bytes

    def limit(self) -> None:
        salt, limit_bytes = self.rng.choice(SALTS), self.rng.choice((0, 5_000, 20_000))
        self.limits.set(salt, limit_bytes) if limit_bytes else self.limits.remove(salt)
        self.model.limits = self.limits.all()

    def scan(self) -> None:
        assert self.ledger.begin_scan() == (self.model.scan + 1) % 256
        self.model.scan += 1

    def compare(self) -> None:
        model, stats = self.model, self.ledger.native.stats()
        known = model.known
        assert stats.objects == len(known)
        assert stats.used_bytes == model.used_bytes
        assert stats.reserved_bytes == model.reserved_bytes
        assert stats.folders == model.folders()
        assert stats.leaving_objects == sum(record.state == "leaving" for record in known.values())
        assert stats.read_objects == sum(len(records) for _, records in self.holds)
        flags = {"resident": 1, "leaving": 2}
        assert list(self.ledger.native.known(self.keys)) == [
            flags[known[key].state] if key in known else 0 for key in self.keys
        ]
        listed = [key for page in self.ledger.pages(7) for key in page]
        assert len(listed) == len(known) and set(listed) == set(known)
        scan = max(0, model.scan - self.rng.randrange(100))
        assert {key for page in self.ledger.pages(unseen_by=scan % 256) for key in page} == model.unseen_by(scan)
        self.ledger.check()


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO", "noop"])
def test_the_ledger_agrees_with_its_model(policy: str) -> None:
    rng = random.Random(SEED)
    both = Both(policy, rng)
    calls = (both.store, both.store, both.find, both.touch, both.touch, both.lose, both.hold, both.let_go, both.evict)
    calls += (both.evict, both.end_deletes, both.end_deletes, both.reserve, both.give_back, both.limit, both.scan)
    for step in range(STEPS):
        rng.choice(calls)()
        if step % 50 == 0:
            both.compare()
    while both.holds:
        both.let_go()
    both.compare()
