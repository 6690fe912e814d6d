"""What peers said they have, from the lookup that asked until it is loaded. Nothing here is believed for longer than
the lease that came with the answer: a peer evicts by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.key import ObjectKey

P = TypeVar("P")


@dataclass(slots=True, eq=False)
class Holding(Generic[P]):
    """One answer. `left` counts its objects that may still be loaded. `due_at`: when it is looked at."""

    peer: P
    lease: int
    ends_at: float
    due_at: float
    keys: list[ObjectKey] = field(default_factory=list)
    left: int = 0


@dataclass(frozen=True, slots=True)
class Placement(Generic[P]):
    """One object at one peer. `slot` is None where the peer did not say it."""

    holding: Holding[P]
    size: int
    slot: int | None

    @property
    def peer(self) -> P:
        return self.holding.peer


class Placements(Generic[P]):
    def __init__(self, clock: Clock, release: Callable[[P, int], None]) -> None:
        """`release` ends a lease at its peer."""
        self._clock = clock
        self._release = release
        self._by_key: dict[ObjectKey, list[Placement[P]]] = {}
        self._holdings: deque[Holding[P]] = deque()  # the first to end first
        self._count = 0  # placements

    def __len__(self) -> int:
        return self._count

    def add(self, peer: P, lease: int, keys: Sequence[ObjectKey], sizes: Sequence[int], slots: Sequence[int]) -> None:
        """An answer that came just now: a size of 0 for what the peer lacks; `slots` may be empty."""
        self.end_expired()
        present = [index for index, size in enumerate(sizes) if size]
        if not present or self._count + len(present) > limits.MAX_PEER_PLACEMENTS:
            self._release(peer, lease)
            return
        ends_at = self._clock.monotonic() + limits.PEER_LEASE_SECONDS
        holding = Holding(peer, lease, ends_at, ends_at, [keys[index] for index in present], len(present))
        self._holdings.append(holding)
        self._count += len(present)
        for index in present:
            placement = Placement(holding, sizes[index], slots[index] if slots else None)
            self._by_key.setdefault(keys[index], []).append(placement)

    def of(self, key: ObjectKey, tried: Container[P]) -> list[Placement[P]]:
        """At peers that were not tried, the latest answer of each first."""
        found: dict[int, Placement[P]] = {}
        for placement in reversed(self._by_key.get(key, ())):
            if placement.peer not in tried:
                found.setdefault(id(placement.peer), placement)
        return list(found.values())

    def renew(self, holding: Holding[P]) -> None:
        """It is being loaded, and its lease renewed with that."""
        holding.ends_at = self._clock.monotonic() + limits.PEER_LEASE_SECONDS

    def forget(self, keys: Sequence[ObjectKey]) -> None:
        """They have been loaded, or cannot be. Leases of which nothing is left end."""
        for key in keys:
            for placement in self._by_key.pop(key, ()):
                self._count -= 1
                holding = placement.holding
                holding.left -= 1
                if not holding.left:
                    self._release(holding.peer, holding.lease)

    def end_expired(self) -> None:
        """At the peers these leases have ended, or end by themselves."""
        now = self._clock.monotonic()
        while self._holdings and (self._holdings[0].due_at <= now or not self._holdings[0].left):
            holding = self._holdings.popleft()
            if holding.ends_at <= now or not holding.left:
                self._drop(holding)
            else:  # renewed since
                holding.due_at = holding.ends_at
                self._holdings.append(holding)

    def forget_peer(self, peer: P) -> None:
        """It has ended, or left."""
        for holding in [holding for holding in self._holdings if holding.peer is peer]:
            self._drop(holding)
            self._holdings.remove(holding)

    def _drop(self, holding: Holding[P]) -> None:
        if not holding.left:
            return
        for key in holding.keys:
            placements = self._by_key.get(key, [])
            kept = [placement for placement in placements if placement.holding is not holding]
            self._count -= len(placements) - len(kept)
            if kept:
                self._by_key[key] = kept
            else:
                self._by_key.pop(key, None)
        holding.left = 0

    def clear(self) -> None:
        while self._holdings:
            self._drop(self._holdings.popleft())
