"""What peers said they have, from the lookup that asked until it is loaded. Nothing here is believed for longer than
the lease that came with the answer: a peer evicts by itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
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
    empty where the peer did not say them, `lease` 0 where there is none. `due_at`: when it is looked at, at the
    earliest."""

    peer: P
    lease: int
    ends_at: float
    due_at: float
    places: dict[ObjectKey, int]
    sizes: Sequence[int]
    slots: Sequence[int]

    def is_leased(self, monotonic: float) -> bool:
        """Whether its peer may not evict what may still be loaded of it."""
        return bool(self.lease and self.places) and monotonic < self.ends_at


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
        # None without objects, and about the first to end first. Each is in `_owners` under each of its objects.
        self._holdings: OrderedDict[Holding[P], None] = OrderedDict()
        self._owners: dict[ObjectKey, dict[Holding[P], None]] = {}
        self._objects = 0

    def __len__(self) -> int:
        """Objects, one for each peer that has it."""
        return self._objects

    def add(self, peer: P, lease: int, keys: Sequence[ObjectKey], sizes: Sequence[int], slots: Sequence[int]) -> bool:
        """An answer that came just now: a size of 0 for what the peer lacks; `slots` may be empty. False where it is
        not remembered, so that nothing of it can be loaded."""
        self.end_expired()
        places = dict(compress(zip(keys, range(len(keys)), strict=True), sizes))
        is_full = len(self._holdings) >= limits.MAX_PEER_LEASES or len(self) + len(places) > limits.MAX_PEER_PLACEMENTS
        if not places or is_full:
            self._release(peer, lease)
            return False
        ends_at = self._clock.monotonic() + limits.PEER_LEASE_SECONDS
        holding = Holding(peer, lease, ends_at, ends_at, places, sizes, slots)
        self._holdings[holding] = None
        self._objects += len(places)
        for key in places:
            self._owners.setdefault(key, {})[holding] = None
        return True

    def shares(self, keys: Sequence[ObjectKey], wanted: Sequence[int], without: Collection[P]) -> list[Share[P]]:
        """Who is to give what of the `wanted` positions of `keys`: who has the most of them, of those the one with the
        least on its way; then likewise for the rest. What none of them has is in no share."""
        shares: list[Share[P]] = []
        left = list(wanted)
        while left:
            counts = Counter(chain.from_iterable(self._owners.get(keys[index], ()) for index in left))
            owners = [holding for holding in counts if holding.peer not in without]
            if not owners:
                break
            best = max(owners, key=lambda holding: (counts[holding], -holding.peer.in_flight_bytes))
            shares.append(Share(best, [index for index in left if keys[index] in best.places]))
            left = [index for index in left if keys[index] not in best.places]
        return shares

    def renew(self, holding: Holding[P]) -> bool:
        """It is being loaded. True when it is time to tell the peer."""
        monotonic = self._clock.monotonic()
        if monotonic >= holding.ends_at:
            holding.lease = 0  # it has ended at the peer
        if not holding.lease or monotonic < holding.ends_at - limits.PEER_LEASE_SECONDS * _TOLD_FRACTION:
            return False
        holding.ends_at = monotonic + limits.PEER_LEASE_SECONDS
        return True

    def forget(self, keys: Sequence[ObjectKey]) -> None:
        """They have been loaded, or cannot be. Leases of which nothing is left end."""
        for key in keys:
            owners = self._owners.pop(key, ())
            self._objects -= len(owners)
            for holding in owners:
                del holding.places[key]
                if not holding.places:
                    del self._holdings[holding]
                    self._release(holding.peer, holding.lease)

    def end_expired(self) -> None:
        """At the peers these leases have ended, or end by themselves."""
        monotonic = self._clock.monotonic()
        while self._holdings and (holding := next(iter(self._holdings))).due_at <= monotonic:
            if holding.ends_at <= monotonic:
                self._drop([holding])
            else:  # renewed since
                holding.due_at = holding.ends_at
                self._holdings.move_to_end(holding)

    def forget_peer(self, peer: P) -> None:
        """It has left, or was started anew."""
        self._drop([holding for holding in self._holdings if holding.peer is peer])

    def end_leases(self, peer: P) -> None:
        """They ended with the connection to it; what it said may still be there."""
        for holding in self._holdings:
            if holding.peer is peer:
                holding.lease = 0

    def clear(self) -> None:
        self._drop(list(self._holdings))

    def _drop(self, holdings: Iterable[Holding[P]]) -> None:
        """Without a word to their peers."""
        for holding in holdings:
            del self._holdings[holding]
            holding.lease = 0
            self._objects -= len(holding.places)
            for key in holding.places:
                owners = self._owners[key]
                del owners[holding]
                if not owners:
                    del self._owners[key]
