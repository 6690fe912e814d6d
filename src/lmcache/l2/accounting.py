"""What an adapter holds, in bytes, and in which order it may go.

Invariant: `used_bytes` is the sum of the charges of known objects, `reserved_bytes` that of stores under way, and used
+ reserved + overhead never exceeds the limit through a store that was admitted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache.core.key import ObjectKey
from lmcache.eviction.base import EvictionPolicy
from lmcache.l2.adapter import Capacity


class Ledger:
    """Belongs to one loop. Keys are held by (namespace, hash); the policy sees the same keys."""

    def __init__(self, policy: EvictionPolicy[ObjectKey], overhead_bytes: Callable[[Sequence[ObjectKey]], int]) -> None:
        self.policy = policy
        self.capacity = Capacity()
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._overhead_bytes = overhead_bytes
        self._charges: dict[ObjectKey, int] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._charges

    def __len__(self) -> int:
        return len(self._charges)

    def keys(self) -> list[ObjectKey]:
        return list(self._charges)

    def charge_of(self, key: ObjectKey) -> int:
        return self._charges.get(key, 0)

    @property
    def held_bytes(self) -> int:
        """Objects and whatever else takes room in the backend."""
        return self.used_bytes + self._overhead_bytes(())

    @property
    def fraction(self) -> float:
        """Held part of the limit; 0 where there is none."""
        return self.held_bytes / self.capacity.limit_bytes if self.capacity.limit_bytes else 0.0

    def lacking_bytes(self, keys: Sequence[ObjectKey], charge_bytes: int) -> int:
        """How much must go before these keys, charged that much, may be stored; 0 when there is room."""
        total = self.used_bytes + self.reserved_bytes + self._overhead_bytes(keys) + charge_bytes
        limit = self.capacity.limit_bytes
        return 0 if limit is None else max(0, total - limit)

    def reserve(self, charge_bytes: int) -> None:
        self.reserved_bytes += charge_bytes

    def unreserve(self, charge_bytes: int) -> None:
        self.reserved_bytes -= charge_bytes
        assert self.reserved_bytes >= 0

    def add(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> None:
        """Objects that were just stored or seen, in prefix order; the youngest from now on."""
        for key, size in zip(keys, sizes_bytes, strict=True):
            self._charge(key, size)
        self.policy.add(keys)

    def add_older(self, objects: Sequence[tuple[ObjectKey, int]]) -> None:
        """Objects found at start, youngest first."""
        new = [(key, size) for key, size in objects if key not in self._charges]
        for key, size in new:
            self._charge(key, size)
        self.policy.add_older([key for key, _ in new])

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.policy.touch(keys)

    def remove(self, key: ObjectKey) -> int:
        """The charge that is free now, 0 for an unknown key."""
        self.policy.remove(key)
        charge = self._charges.pop(key, 0)
        self.used_bytes -= charge
        return charge

    def victims(self, wanted_bytes: int) -> list[ObjectKey]:
        return self.policy.victims(self.charge_of, wanted_bytes)

    def check(self) -> None:
        """Asserts the invariant. O(objects)."""
        assert self.used_bytes == sum(self._charges.values())

    def _charge(self, key: ObjectKey, size_bytes: int) -> None:
        charge = self.capacity.charge(size_bytes)
        self.used_bytes += charge - self._charges.get(key, 0)
        self._charges[key] = charge
