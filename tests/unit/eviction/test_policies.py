from __future__ import annotations

import random

import pytest

from lmcache.errors import ConfigError
from lmcache.eviction.base import EvictionPolicy
from lmcache.eviction.limits import SaltLimits
from lmcache.eviction.registry import POLICIES, build_policy

SIZE = 10


def make(name: str, **limits: int) -> EvictionPolicy[str]:
    """Keys are letters; an upper-case letter belongs to the salt `big`, the others to `small`."""
    salt_limits = SaltLimits()
    for salt, limit_bytes in limits.items():
        salt_limits.set(salt, limit_bytes)
    return build_policy(name, lambda key: "big" if key.isupper() else "small", salt_limits)


def add(policy: EvictionPolicy[str], keys: str) -> None:
    policy.add(keys, [SIZE] * len(keys))


def add_older(policy: EvictionPolicy[str], keys: str) -> None:
    policy.add_older(keys, [SIZE] * len(keys))


def order(policy: EvictionPolicy[str], wanted: int = 10_000) -> str:
    return "".join(policy.victims(wanted))


def evict(policy: EvictionPolicy[str], count: int) -> str:
    gone = order(policy, count * SIZE)
    for key in gone:
        policy.remove(key)
    return gone


@pytest.mark.parametrize("name", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_suffixes_go_before_prefixes_and_the_found_behind_the_known(name: str) -> None:
    policy = make(name)
    add(policy, "ab")
    add_older(policy, "xay")  # youngest first; a is known and keeps its place
    add_older(policy, "z")
    assert order(policy) == "zyxba"
    policy.remove("x")
    policy.remove("x")
    policy.touch("?")
    assert order(policy) == "zyba"


@pytest.mark.parametrize("name", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_as_many_bytes_as_wanted(name: str) -> None:
    policy = make(name)
    add(policy, "abcd")
    assert [order(policy, wanted) for wanted in (0, 1, 10, 11, 1000)] == ["", "d", "d", "dc", "dcba"]
    assert order(policy) == "dcba"  # choosing removes nothing


def test_lru_takes_the_oldest() -> None:
    policy = make("LRU")
    add(policy, "abc")
    add(policy, "xy")
    assert order(policy) == "cbayx"
    policy.touch("ab")
    assert order(policy) == "cyxba"
    add(policy, "c")  # stored again
    assert order(policy) == "yxbac"


def test_isolated_lru_takes_from_who_has_most_for_its_limit() -> None:
    policy = make("IsolatedLRU", big=40, small=20)
    add(policy, "ABCD")
    add(policy, "abc")
    assert order(policy, 20)[0] == "c"  # 30 of 20 against 40 of 40
    policy.remove("a")
    policy.remove("b")
    assert order(policy, 10) == "D"  # 10 of 20 against 40 of 40


def test_isolated_lru_takes_first_from_who_has_no_limit() -> None:
    policy = make("IsolatedLRU", big=10)
    add(policy, "abc")
    add(policy, "ABCD")
    assert order(policy) == "cbaDCBA"


def test_s3fifo_keeps_what_is_reused_through_a_scan() -> None:
    policy = make("S3FIFO")
    add(policy, "abcdefgh")
    policy.touch("abcd")
    add(policy, "ABCDEFGH")  # nobody asks for these again
    assert evict(policy, 10) == "hgfeHGFEDC"
    policy.touch("a")
    assert evict(policy, 10) == "BAdcba"


def test_s3fifo_keeps_for_longer_what_it_sent_away_too_early() -> None:
    policy = make("S3FIFO")
    reused = "ABCDEFGHIJKL"
    add(policy, reused)
    policy.touch(reused)
    add(policy, "xyz")
    assert evict(policy, 2) == "zy"
    add(policy, "xyz")
    add(policy, "0123456789")
    assert evict(policy, 5) == "x9876"  # y and z had come back: they count as reused


def test_noop_gives_nothing() -> None:
    policy = make("noop")
    add(policy, "abc")
    add_older(policy, "d")
    policy.touch("a")
    policy.remove("a")
    assert order(policy) == ""


@pytest.mark.parametrize("name", POLICIES)
def test_every_key_is_known_until_it_is_removed(name: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    policy = make(name, big=200)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    sizes: dict[str, int] = {}
    for _ in range(2000):
        keys = rng.sample(letters, rng.randint(1, 6))
        new = {key: rng.randint(1, 30) for key in keys}
        match rng.choice(("add", "add_older", "touch", "remove", "evict")):
            case "add":
                policy.add(keys, list(new.values()))
                sizes |= new
            case "add_older":
                policy.add_older(keys, list(new.values()))
                sizes = new | sizes
            case "touch":
                policy.touch(keys)
            case "remove":
                policy.remove(keys[0])
                sizes.pop(keys[0], None)
            case "evict":
                wanted = rng.randint(0, 100)
                chosen = policy.victims(wanted)
                for key in chosen:
                    policy.remove(key)
                freed = [sizes.pop(key) for key in chosen]
                assert name == "noop" or sum(freed) >= wanted or not sizes
                assert sum(freed[:-1]) < max(1, wanted)
        if name != "noop":
            assert sorted(policy.victims(1 << 30)) == sorted(sizes)


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="LRU, IsolatedLRU, S3FIFO, noop"):
        make("lfu")
