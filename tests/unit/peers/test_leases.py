"""What peers keep from eviction here: so much at most, for so long, and each for whom it was given to."""

from __future__ import annotations

from typing import cast

from lmcache._native import L1Core
from lmcache.core import limits
from lmcache.peers.leases import PeerLeases
from manual_clock import ManualClock


class Core:
    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, lease: int) -> bool:
        self.released.append(lease)
        return True


def stage() -> tuple[PeerLeases, Core, ManualClock]:
    core, clock = Core(), ManualClock()
    return PeerLeases(cast(L1Core, core), 1000, clock), core, clock


def test_all_together_have_a_part_of_l1() -> None:
    leases, _, _ = stage()
    assert leases.admits(250) and not leases.admits(251)
    leases.add(1, 200, "a")
    assert leases.admits(50) and not leases.admits(51)
    leases.release(1, "a")
    assert leases.admits(250) and len(leases) == leases.size_bytes == 0


def test_only_whom_it_was_given_to_ends_it() -> None:
    leases, core, _ = stage()
    holders = object(), object()
    leases.add(1, 10, holders[0])
    leases.add(2, 10, holders[1])
    leases.release(1, holders[1])
    leases.release(3, holders[1])
    assert core.released == []
    leases.release_all(holders[0])
    assert core.released == [1]
    leases.release_all(holders[0])
    leases.release(2, holders[1])
    assert core.released == [1, 2] and leases.size_bytes == 0


def test_it_ends_by_itself_unless_it_is_renewed() -> None:
    leases, core, clock = stage()
    leases.add(1, 10, "a")
    leases.add(2, 10, "a")
    clock.advance(limits.PEER_LEASE_SECONDS * 0.9)
    leases.renew(2)
    leases.renew(99)
    leases.end_expired()
    assert core.released == []
    clock.advance(limits.PEER_LEASE_SECONDS * 0.2)
    leases.end_expired()
    assert core.released == [1] and leases.size_bytes == 10
