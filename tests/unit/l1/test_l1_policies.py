"""Who goes first from L1, under each policy."""

from __future__ import annotations

import hashlib
import random
import re
import struct
from typing import get_args, get_type_hints

import pytest

from lmcache._native import L1Core
from lmcache.cli import cache_simulator
from lmcache.config.spec import options
from lmcache.config.values import Choice
from lmcache.l2.adapter_config import EvictionConfig
from seeds import SEED
from unit.l1.results import values

UNIT = 4096
FOREVER = 1e18


class Tier:
    """An L1 of `slots` objects of one unit each; objects are called by names."""

    def __init__(self, policy: str, slots: int) -> None:
        self.core = L1Core(slots * UNIT, 0, UNIT, policy)
        self.core.set_committed(slots * UNIT)
        self.names: dict[bytes, str] = {}

    def namespace(self, salt: str) -> bytes:
        return hashlib.sha256(salt.encode()).digest()

    def hashes(self, names: str) -> bytes:
        packed = [hashlib.sha256(name.encode()).digest() for name in names]
        self.names.update(zip(packed, names, strict=True))
        return b"".join(packed)

    def store(self, names: str, salt: str = "") -> int:
        """A prompt of these chunks; how many of them got no room."""
        reservation, _, without_room = values(
            self.core.reserve(1, self.namespace(salt), salt, struct.pack("<Q", UNIT), self.hashes(names), FOREVER)
        )
        self.core.commit(reservation, b"")
        return without_room

    def read(self, names: str, salt: str = "", *, is_use: bool = True) -> int:
        lease, chunks, _ = values(
            self.core.acquire(1, self.namespace(salt), self.hashes(names), FOREVER, is_use=is_use)
        )
        self.core.release(lease)
        return chunks

    def hold(self, names: str, salt: str = "", *, is_use: bool = True) -> int:
        return self.core.acquire(1, self.namespace(salt), self.hashes(names), FOREVER, is_use=is_use).lease

    def resident(self) -> str:
        return "".join(sorted(self.names[listed.chunk_hash] for listed in self.core.list_objects(0, 1000)))

    def evicted(self, count: int = 1) -> str:
        """The names that go when so many must."""
        before = self.resident()
        gone = ""
        for _ in range(count):
            self.core.evict(1)
            gone += "".join(sorted(set(before) - set(self.resident()) - set(gone)))
        self.core.check()
        return gone


@pytest.mark.parametrize("policy", ["LRU", "S3FIFO"])
def test_a_suffix_goes_before_its_prefix(policy: str) -> None:
    tier = Tier(policy, 8)
    tier.store("abcd")
    assert tier.evicted(4) == "dcba"
    tier.store("ab")
    tier.store("abcd")  # a conversation that went on; at the end of a request its whole prompt is touched
    tier.core.touch(tier.namespace(""), tier.hashes("abcd"))
    assert tier.evicted(4) == "dcba"


@pytest.mark.parametrize("policy", ["LRU", "S3FIFO"])
def test_copying_an_object_elsewhere_is_no_use(policy: str) -> None:
    tier = Tier(policy, 8)
    tier.store("a")
    tier.store("b")
    tier.store("c")
    tier.read("a", is_use=False)
    assert tier.evicted() == "a"
    tier.read("b")
    assert tier.evicted(2) == "cb"


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_what_is_being_copied_stays_and_keeps_its_turn(policy: str) -> None:
    tier = Tier(policy, 8)
    tier.core.set_limit("", 8 * UNIT)
    for name in "abcd":
        tier.store(name)
    first, second = tier.hold("b", is_use=False), tier.hold("a", is_use=False)
    assert tier.evicted() == "c"  # a and b were passed over
    tier.core.release(first)
    tier.core.release(second)
    tier.store("e")
    assert tier.evicted(4) == "abde"


def test_a_use_that_ends_while_a_copy_goes_on_counts() -> None:
    tier = Tier("LRU", 8)
    tier.store("ab")
    tier.store("c")
    copy, use = tier.hold("ab", is_use=False), tier.hold("ab")
    tier.core.release(use)
    assert tier.evicted() == "c"
    assert tier.evicted() == ""
    tier.core.release(copy)
    assert tier.evicted(2) == "ba"


def test_s3fifo_keeps_what_is_reused_through_a_scan() -> None:
    chats = {policy: Tier(policy, 20) for policy in ("LRU", "S3FIFO")}
    for tier in chats.values():
        tier.store("abcdefgh")
        tier.read("abcdefgh")
        for start in range(0, 400, 10):  # documents that nobody asks for again
            tier.store("".join(chr(1000 + start + i) for i in range(10)))
    assert chats["LRU"].read("abcdefgh") == 0
    assert chats["S3FIFO"].read("abcdefgh") == 8


def test_s3fifo_takes_back_what_it_sent_away_too_early() -> None:
    tier = Tier("S3FIFO", 20)
    tier.store("abcdefghijklmnop")
    tier.read("abcdefghijklmnop")
    tier.store("wxyz")
    tier.store("123456")
    assert tier.read("wxyz") < 4  # it went, and was stored again ...
    tier.store("wxyz")
    for start in range(0, 100, 5):
        tier.store("".join(chr(1000 + start + i) for i in range(5)))
    assert tier.read("wxyz") == 4  # ... for longer


def test_what_a_salt_has_beyond_its_limit_passes_through() -> None:
    tier = Tier("IsolatedLRU", 8)
    assert tier.store("ab") == 0
    assert tier.read("ab") == 2  # until the next cycle
    assert values(tier.core.enforce_limits()) == (2, 2 * UNIT)
    tier.core.set_limit("", 2 * UNIT)
    assert tier.store("abc") == 0
    assert tier.core.stats()["above_limits_bytes"] == UNIT
    assert values(tier.core.enforce_limits()) == (1, UNIT)
    assert tier.resident() == "ab"
    assert tier.core.stats()["above_limits_bytes"] == 0


def test_what_is_new_has_a_cycle_to_be_copied_elsewhere() -> None:
    tier = Tier("IsolatedLRU", 8)
    tier.core.set_limit("x", 2 * UNIT)
    tier.store("ab")
    tier.store("cd", "x")
    tier.store("ef", "x")
    assert values(tier.core.enforce_limits(spare_new=True)) == (0, 0)
    tier.store("g")
    assert values(tier.core.enforce_limits(spare_new=True)) == (4, 4 * UNIT)
    tier.store("ij")
    tier.read("g")
    tier.core.enforce_limits(spare_new=True)
    assert tier.resident() == "efgij"  # what is older in order of use and new holds the others up, for one cycle
    assert values(tier.core.enforce_limits(spare_new=True)) == (3, 3 * UNIT)
    assert tier.resident() == "ef"
    tier.store("h")
    assert values(tier.core.enforce_limits()) == (1, UNIT)
    tier.core.check()


def test_what_is_beyond_a_limit_goes_first_and_costs_nobody_within_one() -> None:
    tier = Tier("IsolatedLRU", 8)
    tier.core.set_limit("x", 3 * UNIT)
    tier.core.set_limit("y", 4 * UNIT)
    tier.store("abc", "x")
    tier.store("pqr", "y")
    assert tier.store("12", "guest") == 0  # there is room
    assert tier.store("3", "guest") == 0  # there is none but its own
    assert tier.resident() == "13abcpqr"
    assert tier.store("d", "x") == 0  # beyond its limit as well, and by less: the guest gives
    assert tier.store("s", "y") == 0
    assert tier.resident() == "abcdpqrs"
    assert tier.store("4", "guest") == 0  # x is beyond its limit
    assert tier.resident() == "4abdpqrs"
    lease = tier.hold("4", "guest")
    assert tier.store("5", "guest") == 1  # all others are within theirs
    assert tier.store("e", "x") == 0  # at the cost of x itself, although y is older
    assert tier.resident() == "4adepqrs"
    tier.core.release(lease)
    assert tier.store("f", "x") == 0
    assert values(tier.core.enforce_limits()) == (1, UNIT)
    tier.core.check()


def test_a_limit_is_not_undercut_by_what_is_beyond_another() -> None:
    """Large objects of one salt would need several small neighbours of another."""
    tier = Tier("IsolatedLRU", 8)
    tier.core.set_limit("x", 4 * UNIT)
    tier.store("abcdefgh", "x")
    tier.core.remove(tier.namespace("x") * 2, tier.hashes("be"))  # holes, too small ones
    reservation, _, without_room = values(
        tier.core.reserve(1, tier.namespace("guest"), "guest", struct.pack("<Q", 4 * UNIT), tier.hashes("1"), FOREVER)
    )
    assert dict(tier.core.salt_usage())["x"] >= 4 * UNIT
    assert (reservation != 0) == (without_room == 0)
    tier.core.check()


def test_isolated_lru_evicts_within_the_salt() -> None:
    tier = Tier("IsolatedLRU", 6)
    tier.core.set_limit("x", 2 * UNIT)
    tier.core.set_limit("y", 4 * UNIT)
    tier.store("ab", "x")
    tier.store("pqrs", "y")
    tier.store("c", "x")
    tier.store("d", "x")
    assert tier.resident() == "cdpqrs"  # y was left alone although it is older
    lease = tier.hold("cd", "x")
    assert tier.store("e", "x") == 1  # everything of x is being read
    tier.core.release(lease)
    assert tier.store("e", "x") == 0


def test_who_goes_beyond_a_limit_is_reported_once() -> None:
    tier = Tier("IsolatedLRU", 8)
    tier.core.set_limit("x", 2 * UNIT)
    tier.store("ab", "x")
    assert tier.core.take_overuses() == []
    tier.store("c", "x")
    tier.store("1", "guest")
    tier.store("2", "guest")
    assert sorted(map(values, tier.core.take_overuses())) == [("guest", 0), ("x", 2 * UNIT)]
    tier.store("d", "x")
    tier.store("3", "guest")
    assert tier.core.take_overuses() == []
    tier.core.clear()
    for number in range(1000):
        tier.store("5", f"guest {number}")
    assert len(tier.core.take_overuses()) == 256
    tier.core.clear()
    tier.core.set_limit("y", 8 * UNIT)
    tier.store("stuvwxyz", "y")
    assert tier.store("4", "late") == 1  # it got no room at all
    assert [values(overuse) for overuse in tier.core.take_overuses()] == [("late", 0)]
    tier.core.check()


def test_a_lower_limit_takes_effect() -> None:
    tier = Tier("IsolatedLRU", 8)
    tier.core.set_limit("x", 4 * UNIT)
    tier.store("abcd", "x")
    lease = tier.hold("abc", "x")
    tier.core.set_limit("x", 1 * UNIT)
    assert values(tier.core.enforce_limits()) == (1, UNIT)
    tier.core.release(lease)
    assert values(tier.core.enforce_limits()) == (2, 2 * UNIT)
    assert tier.resident() == "a"
    assert values(tier.core.enforce_limits()) == (0, 0)


def test_limits_that_promise_more_than_there_is_share_it() -> None:
    tier = Tier("IsolatedLRU", 8)
    tier.core.set_limit("x", 8 * UNIT)
    tier.core.set_limit("y", 8 * UNIT)
    tier.store("abcdefgh", "x")
    for name in "pqrstuvw":
        assert tier.store(name, "y") == 0
    usage = dict(tier.core.salt_usage())
    assert sum(usage.values()) == 8 * UNIT
    assert min(usage["x"], usage["y"]) >= 3 * UNIT
    tier.core.check()


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_no_chunk_outlives_its_prefix(policy: str) -> None:
    """Prompts that branch anywhere, used and stored as a server does: a chunk without its prefix is of no use."""
    rng = random.Random(SEED)
    tier = Tier(policy, 60)
    tier.core.set_limit("", 60 * UNIT)
    namespace = tier.namespace("")
    names = (chr(0x100 + number) for number in range(1 << 20))
    parents: dict[str, str] = {}
    prompts = [next(names)]
    for _ in range(1500):
        prompt = rng.choice(prompts[-30:])
        prompt = prompt[: rng.randint(1, len(prompt))] + "".join(next(names) for _ in range(rng.randint(0, 4)))
        if len(prompt) > 25:
            prompt = next(names)
        prompts.append(prompt)
        parents.update(zip(prompt[1:], prompt, strict=False))
        lease = tier.core.acquire(1, namespace, tier.hashes(prompt), FOREVER).lease
        tier.store(prompt)
        tier.core.release(lease)
        tier.core.touch(namespace, tier.hashes(prompt))
        if rng.random() < 0.2:
            tier.core.evict(rng.randint(1, 20) * UNIT)
        resident = set(tier.resident())
        orphans = [name for name in resident if name in parents and parents[name] not in resident]
        assert not orphans
    assert tier.core.stats()["evicted_objects"] > 500


def test_every_policy_is_offered_wherever_one_is_chosen() -> None:
    """The core names them; a new one is to be added at each of these places (policy.h)."""
    with pytest.raises(ValueError, match="policy must be ") as refused:
        L1Core(UNIT, 0, UNIT, "a policy that is not there")
    known = set(re.split(", | or ", str(refused.value).removeprefix("policy must be ").partition(", not ")[0]))
    kind = options()["eviction_policy"][0].kind
    assert isinstance(kind, Choice) and set(kind.choices) == known
    assert set(get_args(get_type_hints(EvictionConfig)["eviction_policy"])) == known
    assert {*cache_simulator.POLICIES, "noop"} == known  # with noop nothing leaves: there is nothing to simulate
    for policy in known:
        Tier(policy, 4).store("a")
