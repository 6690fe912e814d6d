"""What peers said they have: who is asked for it, how long it is believed, and when its lease is given back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lmcache.core import limits
from lmcache.peers.placements import Placements
from lmcache.testing.frames import keys
from manual_clock import ManualClock

KEYS = keys(6)


@dataclass(eq=False)
class Peer:
    name: str
    in_flight_bytes: int = 0


class Stage:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.released: list[tuple[str, int]] = []
        self.placements: Placements[Peer] = Placements(
            self.clock, lambda peer, lease: self.released.append((peer.name, lease))
        )

    def shares(self, wanted: list[int], *without: Peer) -> dict[str, list[int]]:
        return {
            share.holding.peer.name: list(share.indices) for share in self.placements.shares(KEYS, wanted, set(without))
        }


def test_who_has_the_most_gives_it_and_others_the_rest() -> None:
    stage, a, b = Stage(), Peer("a"), Peer("b")
    stage.placements.add(a, 1, KEYS, [1, 1, 0, 0, 0, 0], [])
    stage.placements.add(b, 2, KEYS, [0, 1, 1, 1, 0, 0], [])
    assert stage.shares([0, 1, 2, 3, 4, 5]) == {"b": [1, 2, 3], "a": [0]}
    assert stage.shares([0, 1, 2], b) == {"a": [0, 1]}
    assert stage.shares([5]) == {} == stage.shares([0], a, b)


def test_of_two_with_the_same_the_idle_one_gives_it() -> None:
    stage, a, b = Stage(), Peer("a", 100), Peer("b")
    for lease, peer in enumerate((a, b)):
        stage.placements.add(peer, lease, KEYS, [1] * 6, [])
    assert stage.shares([0, 1]) == {"b": [0, 1]}
    b.in_flight_bytes = 200
    assert stage.shares([0, 1]) == {"a": [0, 1]}


def test_a_lease_ends_with_the_last_of_its_objects_wherever_that_came_from() -> None:
    stage, a, b = Stage(), Peer("a"), Peer("b")
    stage.placements.add(a, 1, KEYS, [1, 1, 0, 0, 0, 0], [])
    stage.placements.add(b, 2, KEYS, [0, 1, 1, 0, 0, 0], [])
    stage.placements.forget(KEYS[:2])
    assert stage.released == [("a", 1)] and len(stage.placements) == 1
    stage.placements.forget(KEYS)
    assert stage.released == [("a", 1), ("b", 2)] and len(stage.placements) == 0


def test_nothing_is_believed_longer_than_its_lease() -> None:
    stage, a = Stage(), Peer("a")
    stage.placements.add(a, 1, KEYS, [1] * 6, [])
    stage.clock.advance(limits.PEER_LEASE_SECONDS / 2)
    stage.placements.renew(stage.placements.shares(KEYS, [0], ())[0].holding)
    stage.placements.add(a, 2, KEYS, [1] * 6, [])
    stage.clock.advance(limits.PEER_LEASE_SECONDS * 0.75)
    stage.placements.end_expired()
    assert len(stage.placements) == 12
    stage.clock.advance(limits.PEER_LEASE_SECONDS)
    stage.placements.end_expired()
    assert len(stage.placements) == 0 and stage.released == []  # the peers end them by themselves


def test_beyond_the_limit_a_lease_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PEER_PLACEMENTS", 8)
    stage, a = Stage(), Peer("a")
    stage.placements.add(a, 1, KEYS, [1] * 6, [])
    stage.placements.add(a, 2, KEYS, [1] * 6, [])
    stage.placements.add(a, 3, KEYS, [0] * 6, [])
    assert stage.released == [("a", 2), ("a", 3)]


def test_what_was_loaded_leaves_its_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PEER_LEASES", 2)
    stage, a = Stage(), Peer("a")
    assert stage.placements.add(a, 1, KEYS, [1, 0, 0, 0, 0, 0], [])  # is not loaded
    for lease in (2, 3):
        assert stage.placements.add(a, lease, KEYS, [0, 1, 0, 0, 0, 0], [])
        stage.placements.forget(KEYS[1:2])
    assert stage.released == [("a", 2), ("a", 3)]
    assert stage.placements.add(a, 4, KEYS, [0, 1, 0, 0, 0, 0], [])
    assert not stage.placements.add(a, 5, KEYS, [0, 1, 0, 0, 0, 0], [])


def test_answers_about_other_objects_cost_nothing() -> None:
    """Counted by what is looked at, as a clock would tell what else the machine does."""
    looked_at = 0

    @dataclass(eq=False)
    class Counting(Peer):
        def __getattribute__(self, name: str) -> object:
            nonlocal looked_at
            looked_at += name == "in_flight_bytes"
            return super().__getattribute__(name)

    stage, peers = Stage(), [Counting(str(number)) for number in range(100)]
    for peer in peers[1:]:
        stage.placements.add(peer, 1, KEYS[:5], [1] * 5, [])
    stage.placements.add(peers[0], 1, KEYS[5:], [1], [])
    assert stage.shares([5]) == {"0": [5]} and looked_at == 1


def test_a_share_is_read_in_parts() -> None:
    stage, a = Stage(), Peer("a")
    stage.placements.add(a, 1, KEYS, [1] * 6, [])
    (share,) = stage.placements.shares(KEYS, range(6), ())
    assert [list(part.indices) for part in share.parts(4)] == [[0, 1, 2, 3], [4, 5]]
    assert share.parts(6) == [share]


def test_a_peer_that_left_has_nothing() -> None:
    stage, a, b = Stage(), Peer("a"), Peer("b")
    for lease, peer in enumerate((a, b)):
        stage.placements.add(peer, lease, KEYS, [1] * 6, [])
    stage.placements.forget_peer(a)
    assert stage.shares([0]) == {"b": [0]} and len(stage.placements) == 6
    stage.placements.clear()
    assert stage.shares([0]) == {} and len(stage.placements) == 0
