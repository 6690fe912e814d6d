"""What other servers keep from being evicted here, between their lookups and their reads. Belongs to the loop of the
listener.

Invariant: all leases together cover at most PEER_LEASED_FRACTION of L1. Each ends once: released, expired, or with the
connection that it was given to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmcache._native import L1Core
from lmcache.clock import Clock
from lmcache.core import limits


@dataclass(slots=True)
class _Lease:
    holder: object  # the connection that it was given to
    size_bytes: int
    ends_at: float


class PeerLeases:
    def __init__(self, core: L1Core, capacity_bytes: int, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._most_bytes = int(capacity_bytes * limits.PEER_LEASED_FRACTION)
        self._leases: dict[int, _Lease] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._leases)

    def admits(self, size_bytes: int) -> bool:
        return len(self._leases) < limits.MAX_PEER_LEASES and self.size_bytes + size_bytes <= self._most_bytes

    def add(self, lease: int, size_bytes: int, holder: object) -> None:
        """One of the core, of objects of that many bytes."""
        self._leases[lease] = _Lease(holder, size_bytes, self._clock.monotonic() + limits.PEER_LEASE_SECONDS)
        self.size_bytes += size_bytes

    def renew(self, lease: int) -> None:
        """It is being read. Unknown ones are ignored."""
        if (known := self._leases.get(lease)) is not None:
            known.ends_at = self._clock.monotonic() + limits.PEER_LEASE_SECONDS

    def release(self, lease: int, holder: object) -> None:
        """Unknown ones, and those of others, are ignored."""
        if (known := self._leases.get(lease)) is not None and known.holder is holder:
            self._end([lease])

    def release_all(self, holder: object) -> None:
        self._end([lease for lease, known in self._leases.items() if known.holder is holder])

    def end_expired(self) -> None:
        monotonic = self._clock.monotonic()
        self._end([lease for lease, known in self._leases.items() if known.ends_at <= monotonic])

    def _end(self, leases: Iterable[int]) -> None:
        for lease in leases:
            self.size_bytes -= self._leases.pop(lease).size_bytes
            self._core.release(lease)
