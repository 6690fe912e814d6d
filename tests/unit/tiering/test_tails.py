"""Loads for groups that need only the end of a hit."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from lmcache._native import usable_prefix
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.outcome import MissReason
from unit.tiering.support import faulty, keys, namespace, open_rig

WHOLE, STATE = namespace(), namespace("states")


def of(name: Namespace, chunks: Any) -> Any:
    return [ObjectKey(name, key.chunk_hash) for key in chunks]


def test_only_what_a_hit_needs_is_loaded() -> None:
    wanted = keys(60)
    with open_rig([faulty()[0]]) as rig:
        rig.put(of(WHOLE, wanted))
        rig.put(of(STATE, [wanted[10], wanted[39], wanted[40], wanted[50]]))
        rig.storage.flush(20)
        rig.storage.clear("l1")
        result = rig.fetch(wanted, namespaces=(WHOLE, STATE), tails=(0, 2))
        assert (result.chunks, result.miss_reason) == (41, MissReason.NOT_STORED)
        assert rig.holds(result, wanted, (WHOLE, STATE))
        assert [chunk for namespace, chunk in result.slots.places() if namespace == 1] == [39, 40]
        assert rig.sample("l2_prefetch_load_completed_chunks_total") == 41 + 2
        rig.l1.core.release(result.lease)


def test_a_state_in_l2_goes_with_attention_in_l1() -> None:
    wanted = keys(20)
    with open_rig([faulty()[0]]) as rig:
        rig.put(of(STATE, [wanted[4], wanted[14]]))
        rig.storage.flush(20)
        rig.storage.clear("l1")
        rig.put(of(WHOLE, wanted), tell=False)
        result = rig.fetch(wanted[5:], namespaces=(WHOLE, STATE), tails=(0, 1), in_l1=wanted[:5])
        assert result.chunks == 10
        assert rig.holds(result, wanted[5:], (WHOLE, STATE))
        assert rig.sample("l2_prefetch_load_completed_chunks_total") == 1
        rig.l1.core.release(result.lease)


def test_without_a_state_nothing_is_loaded() -> None:
    wanted = keys(20)
    with open_rig([faulty()[0]]) as rig:
        rig.put(of(WHOLE, wanted))
        rig.storage.flush(20)
        rig.storage.clear("l1")
        result = rig.fetch(wanted, namespaces=(WHOLE, STATE), tails=(0, 1))
        assert (result.chunks, result.lease, result.miss_reason) == (0, 0, MissReason.NOT_STORED)
        assert rig.sample("l2_prefetch_load_completed_chunks_total") == 0


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
    present = bytes(flag == "1" for row in zip(whole, window, strict=True) for flag in row)
    assert usable_prefix(present, array("I", [0, tail])) == longest
