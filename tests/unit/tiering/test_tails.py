"""Loads for groups that need only the end of a hit."""

from __future__ import annotations

from array import array

import pytest

from lmcache._native import NO_SLOT
from lmcache.core.key import ObjectKey
from lmcache.core.outcome import MissReason
from lmcache.tiering.tails import is_needed, longest_whole
from unit.tiering.support import faulty, keys, namespace, rig

WHOLE, STATE = namespace(), namespace("states")


def of(name, chunks):
    return [ObjectKey(name, key.chunk_hash) for key in chunks]


def test_only_what_a_hit_needs_is_loaded() -> None:
    wanted = keys(60)
    with rig([faulty()[0]]) as it:
        it.put(of(WHOLE, wanted))
        it.put(of(STATE, [wanted[10], wanted[39], wanted[40], wanted[50]]))
        it.storage.flush(20)
        it.storage.clear("l1")
        result = it.fetch(wanted, namespaces=(WHOLE, STATE), tails=(0, 2))
        assert (result.chunks, result.miss_reason) == (41, MissReason.NOT_STORED)
        assert it.holds(result, wanted, (WHOLE, STATE))
        states = array("Q", result.offsets)[41:]
        assert [chunk for chunk, slot in enumerate(states) if slot != NO_SLOT] == [39, 40]
        assert it.sample("l2_prefetch_load_completed_chunks_total") == 41 + 2
        it.l1.core.release(result.lease)


def test_a_state_in_l2_goes_with_attention_in_l1() -> None:
    wanted = keys(20)
    with rig([faulty()[0]]) as it:
        it.put(of(STATE, [wanted[4], wanted[14]]))
        it.storage.flush(20)
        it.storage.clear("l1")
        it.put(of(WHOLE, wanted), tell=False)
        result = it.fetch(wanted[5:], namespaces=(WHOLE, STATE), tails=(0, 1), in_l1=wanted[:5])
        assert result.chunks == 10
        assert it.holds(result, wanted[5:], (WHOLE, STATE))
        assert it.sample("l2_prefetch_load_completed_chunks_total") == 1
        it.l1.core.release(result.lease)


def test_without_a_state_nothing_is_loaded() -> None:
    wanted = keys(20)
    with rig([faulty()[0]]) as it:
        it.put(of(WHOLE, wanted))
        it.storage.flush(20)
        it.storage.clear("l1")
        result = it.fetch(wanted, namespaces=(WHOLE, STATE), tails=(0, 1))
        assert (result.chunks, result.lease, result.miss_reason) == (0, 0, MissReason.NOT_STORED)
        assert it.sample("l2_prefetch_load_completed_chunks_total") == 0


@pytest.mark.parametrize(
    ("whole", "window", "tail", "longest"),
    [
        ("1111", "1111", 0, 4),
        ("1101", "1111", 0, 2),
        ("1111", "0100", 1, 2),
        ("1111", "0110", 2, 3),
        ("1111", "1000", 3, 1),  # what lies before the first chunk is there
        ("1111", "0000", 1, 0),
        ("1011", "0001", 1, 0),
    ],
)
def test_the_longest_usable_prefix(whole: str, window: str, tail: int, longest: int) -> None:
    there = [[one == "1", two == "1"] for one, two in zip(whole, window, strict=True)]
    assert longest_whole(there, (0, tail)) == longest


def test_what_a_prefix_needs_of_a_tail() -> None:
    assert [is_needed(chunk, 4, 2) for chunk in range(4)] == [False, False, True, True]
    assert all(is_needed(chunk, 4, 0) for chunk in range(4))
