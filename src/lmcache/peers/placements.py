"""What peers said they have, from the lookup that asked until it is loaded. Nothing here is believed for longer than
the lease that came with the answer: a peer evicts by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Generic, Protocol, TypeVar

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey

_TOLD_FRACTION = 0.8  # of a lease, that is left of it when it is renewed


class Owner(Protocol):
    @property
    def in_flight_bytes(self) -> int: ...


P = TypeVar("P", bound=Owner)


@dataclass(slots=True, eq=False)
class Holding(Generic[P]):
    """One answer: the objects of it that may still be loaded, with their places in `sizes` and `slots`. `slots` is
    empty where the peer did not say them. `due_at`: when it is looked at, at the earliest."""

    peer: P
    lease: int
    ends_at: float
    due_at: float
    places: dict[ObjectKey, int]
    sizes: Sequence[int]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Share(Generic[P]):
    """What one peer is to give, as positions in the keys that were asked for."""

    holding: Holding[P]
    indices: Sequence[int]

    def parts(self, most: int) -> list[Share[P]]:
        """Splits the share into parts of at most so many."""
        if len(self.indices) <= most:
            return [self]
        return [Share(self.holding, self.indices[at : at + most]) for at in range(0, len(self.indices), most)]


class Placements(Generic[P]):
    def __init__(self, clock: Clock, release: Callable[[P, int], None]) -> None:
        """`release` ends a lease at its peer."""
        self._clock = clock
        self._release = release
        self._holdings: deque[Holding[P]] = deque()  # about the first to end first

    def __len__(self) -> int:
        """Objects, one for each peer that has it."""
        return sum(len(holding.places) for holding in self._holdings)

    def add(self, peer: P, lease: int, keys: Sequence[ObjectKey], sizes: Sequence[int], slots: Sequence[int]) -> None:
        """An answer that came just now: a size of 0 for what the peer lacks; `slots` may be empty."""
        self.end_expired()
        places = dict(compress(zip(keys, range(len(keys)), strict=True), sizes))
        is_full = len(self._holdings) >= limits.MAX_PEER_LEASES or len(self) + len(places) > limits.MAX_PEER_PLACEMENTS
        if not places or is_full:
            self._release(peer, lease)
            return
        ends_at = self._clock.monotonic() + limits.PEER_LEASE_SECONDS
        self._holdings.append(Holding(peer, lease, ends_at, ends_at, places, sizes, slots))

    def shares(self, keys: Sequence[ObjectKey], wanted: Sequence[int], without: Collection[P]) -> list[Share[P]]:
        """Who is to give what of the `wanted` positions of `keys`: who has the most of them, of those the one with the
        least on its way; then likewise for the rest. What none of them has is in no share."""
        shares: list[Share[P]] = []
        holdings = [holding for holding in self._holdings if holding.places and holding.peer not in without]
        left = list(wanted)
        while left and holdings:
            left_keys = [keys[index] for index in left]
            flags = [list(map(holding.places.__contains__, left_keys)) for holding in holdings]
            best = max(range(len(holdings)), key=lambda at: (flags[at].count(True), -holdings[at].peer.in_flight_bytes))
            if True not in flags[best]:
                break
            shares.append(Share(holdings[best], list(compress(left, flags[best]))))
            left = [index for index, is_there in zip(left, flags[best], strict=True) if not is_there]
            del holdings[best]
        return shares

    def renew(self, holding: Holding[P]) -> bool:
        """It is being loaded. True when it is time to tell the peer."""
        monotonic = self._clock.monotonic()
        if monotonic < holding.ends_at - limits.PEER_LEASE_SECONDS * _TOLD_FRACTION:
            return False
        holding.ends_at = monotonic + limits.PEER_LEASE_SECONDS
        return True

    def forget(self, keys: Sequence[ObjectKey]) -> None:
        """They have been loaded, or cannot be. Leases of which nothing is left end."""
        for holding in self._holdings:
            places = holding.places
            if places:
                deque(map(places.pop, keys, repeat(None)), maxlen=0)
                if not places:
                    self._release(holding.peer, holding.lease)

    def end_expired(self) -> None:
        """At the peers these leases have ended, or end by themselves."""
        monotonic = self._clock.monotonic()
        while self._holdings and (self._holdings[0].due_at <= monotonic or not self._holdings[0].places):
            holding = self._holdings.popleft()
            if holding.ends_at > monotonic and holding.places:  # renewed since
                holding.due_at = holding.ends_at
                self._holdings.append(holding)

    def forget_peer(self, peer: P) -> None:
        """It has left."""
        self._holdings = deque(holding for holding in self._holdings if holding.peer is not peer)

    def clear(self) -> None:
        self._holdings.clear()
