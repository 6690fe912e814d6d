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

    def add(self, lease: int, size_bytes: int) -> None:
        """One of the core, of objects of that many bytes."""
        self._leases[lease] = _Lease(size_bytes, self._clock.monotonic() + limits.PEER_LEASE_SECONDS)
        self.size_bytes += size_bytes

    def renew(self, lease: int) -> None:
        """It is being read. Unknown ones are ignored."""
        if (known := self._leases.get(lease)) is not None:
            known.ends_at = self._clock.monotonic() + limits.PEER_LEASE_SECONDS

    def release(self, leases: Iterable[int]) -> None:
        """Unknown ones are ignored."""
        for lease in list(leases):
            if (known := self._leases.pop(lease, None)) is not None:
                self.size_bytes -= known.size_bytes
                self._core.release(lease)

    def end_expired(self) -> None:
        now = self._clock.monotonic()
        self.release([lease for lease, known in self._leases.items() if known.ends_at <= now])
