from __future__ import annotations

import pytest

from lmcache.errors import ConfigError
from lmcache.eviction.base import EvictionPolicy
from lmcache.eviction.registry import build_policy


def order(policy: EvictionPolicy[str], wanted: int = 100) -> str:
    return "".join(policy.victims(lambda key: 10, wanted))


def test_lru_takes_the_oldest_and_suffixes_before_prefixes() -> None:
    policy: EvictionPolicy[str] = build_policy("LRU")
    policy.add("abc")
    policy.add("xy")
    assert order(policy) == "cbayx"
    policy.touch("ab")
    policy.touch("?")
    assert order(policy) == "cyxba"
    policy.add("c")  # stored again
    assert order(policy) == "yxbac"
    policy.remove("x")
    policy.remove("x")
    assert order(policy) == "ybac"


def test_lru_takes_as_many_bytes_as_wanted() -> None:
    policy: EvictionPolicy[str] = build_policy("LRU")
    policy.add("abcd")
    assert [order(policy, wanted) for wanted in (0, 1, 10, 11, 1000)] == ["", "d", "d", "dc", "dcba"]
    assert order(policy) == "dcba"  # choosing removes nothing


def test_lru_puts_what_was_found_behind_everything_known() -> None:
    policy: EvictionPolicy[str] = build_policy("LRU")
    policy.add("ab")
    policy.add_older("xay")  # youngest first; a is known and keeps its place
    policy.add_older("z")
    assert order(policy) == "zyxba"


def test_noop_gives_nothing() -> None:
    policy: EvictionPolicy[str] = build_policy("noop")
    policy.add("abc")
    policy.add_older("d")
    policy.touch("a")
    policy.remove("a")
    assert order(policy) == ""


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="LRU, noop"):
        build_policy("lfu")
