"""The L1 core against the dictionary model, from a seed."""

from __future__ import annotations

import hashlib
import random

import pytest

from lmcache._native import L1Core
from seeds import SEED
from unit.l1.core_model import FIRST_OFFSET, UNIT, Key, Model

STEPS = 20_000
CAPACITY_UNITS = 48
OWNERS = (1, 2, 3)
PROMPTS = 5
PROMPT_CHUNKS = 9
SIZES = (UNIT, 2 * UNIT - 100, 5 * UNIT, UNIT)  # by namespace, if they are mixed


class Steps:
    """Chooses calls at random, weighted so that L1 is full, partly leased and partly being written most of the time."""

    def __init__(self, seed: int, *, has_one_size: bool, policy: str) -> None:
        self.random = random.Random(seed)
        core = L1Core(CAPACITY_UNITS * UNIT, FIRST_OFFSET, UNIT, policy)
        for salt in ("salt 0", "salt 1"):
            core.set_limit(salt, CAPACITY_UNITS * UNIT)  # no limit in effect: the model knows none
        self.namespaces = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
        self.sizes = dict(zip(self.namespaces, [UNIT] * 4 if has_one_size else SIZES, strict=True))
        salts = dict(zip(self.namespaces, ["salt 0"] * 3 + ["salt 1"], strict=True))
        self.model = Model(core, salts, has_one_size, 0, is_exact=policy == "LRU")
        self.model.commit_memory(CAPACITY_UNITS // 2 * UNIT)
        self.prompts = [
            [hashlib.sha256(f"{prompt} {chunk}".encode()).digest() for chunk in range(PROMPT_CHUNKS)]
            for prompt in range(PROMPTS)
        ]
        self.now = 0.0
        self.calls = {
            self.reserve: 26,
            self.commit: 22,
            self.abort: 4,
            self.acquire: 14,
            self.release: 12,
            self.probe: 6,
            self.touch: 3,
            self.renew: 3,
            self.expire: 4,
            self.drop_owner: 2,
            self.acquire_each: 2,
            self.evict: 3,
            self.remove: 3,
            self.clear: 1,
            self.commit_memory: 1,
        }

    def run(self, steps: int) -> None:
        calls, weights = list(self.calls), list(self.calls.values())
        for step in range(steps):
            self.random.choices(calls, weights)[0]()
            if step % 10 == 0:
                self.model.check()
        self.finish()

    def finish(self) -> None:
        """When everybody has gone, nothing is held and everything can be taken back."""
        for owner in OWNERS:
            self.model.drop_owner(owner)
        self.model.check()
        self.model.clear()
        self.model.check()
        stats = self.model.core.stats()
        assert (stats["used_bytes"], stats["leases"], stats["reservations"]) == (0, 0, 0)
        assert stats["largest_free_bytes"] == stats["committed_bytes"]

    # ---- arguments ---------------------------------------------------------------------------------------------------
    def some_namespaces(self) -> list[bytes]:
        """Of one salt."""
        return self.random.sample(self.namespaces[:3], self.random.choice((0, 1, 1, 2, 3))) or self.namespaces[3:]

    def some_chunks(self, *, from_start: bool = False) -> list[bytes]:
        prompt = self.random.choice(self.prompts)
        first = 0 if from_start else self.random.choice((0, 0, self.random.randrange(PROMPT_CHUNKS)))
        chunks = prompt[first : self.random.randint(first, PROMPT_CHUNKS)]
        if self.random.random() < 0.03:
            chunks = chunks + chunks[:2]  # a hash twice in one call
        return chunks

    def some_tails(self, namespaces: list[bytes]) -> list[int]:
        most = self.random.choice((0, 0, 1, 3))
        return [self.random.randint(0, most) for _ in namespaces]

    def some_keys(self) -> list[Key]:
        return [(self.random.choice(self.namespaces), chunk) for chunk in self.some_chunks()]

    def some_deadline(self) -> float:
        return self.now + self.random.choice((1.0, 5.0, 50.0))

    def one_of(self, numbers: dict[int, object]) -> int:
        """One that is there, or now and then one that is not."""
        if not numbers or self.random.random() < 0.05:
            return self.random.randint(0, 10_000)
        return self.random.choice(list(numbers))

    # ---- calls -------------------------------------------------------------------------------------------------------
    def reserve(self) -> None:
        namespaces = self.some_namespaces()
        sizes = [self.sizes[namespace] for namespace in namespaces]
        chunks = self.some_chunks()
        often = self.random.choice((1.0, 1.0, 0.7))
        wanted = [[int(self.random.random() < often) for _ in chunks] for _ in namespaces]
        self.model.reserve(self.random.choice(OWNERS), namespaces, sizes, chunks, self.some_deadline(), wanted)

    def commit(self) -> None:
        number = self.one_of(dict(self.model.reservations))
        written = None
        claim = self.model.reservations.get(number)
        if claim is not None and self.random.random() < 0.4:
            written = [[self.random.choice((0, 1, 1, 255)) for _ in row] for row in claim.slots]
        lease_owner = self.random.choice((0, 0, *OWNERS))
        self.model.commit(number, written, lease_owner, self.some_deadline(), self.random.random() < 0.2)

    def abort(self) -> None:
        self.model.abort(self.one_of(dict(self.model.reservations)))

    def acquire(self) -> None:
        namespaces = self.some_namespaces()
        self.model.acquire(
            self.random.choice(OWNERS),
            namespaces,
            self.some_chunks(from_start=True),
            self.some_deadline(),
            self.some_tails(namespaces),
            is_use=self.random.random() < 0.7,
        )

    def release(self) -> None:
        self.model.release(self.one_of(dict(self.model.leases)))

    def probe(self) -> None:
        self.model.probe(self.some_namespaces(), self.some_chunks())

    def touch(self) -> None:
        namespaces = self.some_namespaces()
        self.model.touch(namespaces, self.some_chunks(), self.some_tails(namespaces))

    def renew(self) -> None:
        self.model.renew(self.random.choice(OWNERS), self.some_deadline())

    def expire(self) -> None:
        self.now += self.random.choice((0.0, 1.0, 3.0))
        self.model.expire(self.now)

    def drop_owner(self) -> None:
        self.model.drop_owner(self.random.choice(OWNERS))

    def acquire_each(self) -> None:
        self.model.acquire_each(self.random.choice(OWNERS), self.some_keys(), self.some_deadline())

    def evict(self) -> None:
        self.model.evict(self.random.randint(0, 6) * UNIT)

    def remove(self) -> None:
        self.model.remove(self.some_keys())

    def clear(self) -> None:
        if self.random.random() < 0.3:
            self.model.clear()

    def commit_memory(self) -> None:
        self.model.commit_memory(self.random.randint(1, CAPACITY_UNITS) * UNIT)


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
@pytest.mark.parametrize("has_one_size", [True, False], ids=["one size", "mixed sizes"])
def test_random_calls_agree_with_the_model(has_one_size: bool, policy: str) -> None:
    Steps(SEED, has_one_size=has_one_size, policy=policy).run(STEPS if policy == "LRU" else STEPS // 4)
