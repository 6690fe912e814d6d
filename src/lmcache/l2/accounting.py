"""What an adapter holds, in bytes, and in which order it may go.

Invariant: `used_bytes` is the sum of the charges of known objects, `reserved_bytes` that of stores under way; a folder
counts as long as a known object or a store under way needs it. Used + reserved + folders + overhead never exceeds the
limit through a store that was admitted here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from lmcache.core.key import ObjectKey
from lmcache.eviction.base import EvictionPolicy
from lmcache.l2.adapter import Capacity


class Room:
    """What one store may still write. Given back when the store has really ended, whoever still waits for it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._bytes = 0
        self._keys: list[ObjectKey] = []

    def reserve(self, keys: Sequence[ObjectKey], charge_bytes: int) -> None:
        """For these keys, charged that much, and for their folders."""
        self._bytes += charge_bytes
        self._ledger.reserved_bytes += charge_bytes
        self._keys += keys
        self._ledger.enter_folders(keys)

    def stored(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> None:
        """Objects of this store that are there now."""
        self._ledger.add(keys, sizes_bytes)
        self._free(min(self._bytes, sum(map(self._ledger.charge_of, keys))))

    def give_back(self) -> None:
        self._free(self._bytes)
        keys, self._keys = self._keys, []
        self._ledger.leave_folders(keys)

    def _free(self, charge_bytes: int) -> None:
        self._bytes -= charge_bytes
        self._ledger.reserved_bytes -= charge_bytes


class Folders:
    """Who needs each folder: an object, a store under way, or a folder in it. Each call names the folders of one
    object, innermost first."""

    def __init__(self) -> None:
        self._users: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._users)

    def with_these(self, objects: Iterable[Sequence[Hashable]]) -> int:
        """How many folders there are once these have entered."""
        new: set[Hashable] = set()
        for folders in objects:
            for folder in folders:
                if folder in self._users or folder in new:
                    break
                new.add(folder)
        return len(self._users) + len(new)

    def enter(self, folders: Iterable[Hashable]) -> None:
        for folder in folders:
            users = self._users.get(folder, 0)
            self._users[folder] = users + 1
            if users:
                return

    def leave(self, folders: Iterable[Hashable]) -> None:
        for folder in folders:
            users = self._users.get(folder, 0) - 1
            if users > 0:
                self._users[folder] = users
                return
            self._users.pop(folder, None)


class Ledger:
    """Belongs to one loop. Keys are held by (namespace, hash); the policy sees the same keys."""

    def __init__(self, policy: EvictionPolicy[ObjectKey], overhead_bytes: Callable[[], int]) -> None:
        self.policy = policy
        self.capacity = Capacity()
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._overhead_bytes = overhead_bytes
        self._charges: dict[ObjectKey, int] = {}
        self._folders = Folders()
        self._readers: dict[object, Sequence[ObjectKey]] = {}  # what each reads

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._charges

    def __len__(self) -> int:
        return len(self._charges)

    def known(self, keys: Sequence[ObjectKey]) -> list[bool]:
        charges = self._charges
        return [key in charges for key in keys]

    def keys(self) -> list[ObjectKey]:
        return list(self._charges)

    def charge_of(self, key: ObjectKey) -> int:
        return self._charges.get(key, 0)

    @property
    def held_bytes(self) -> int:
        """Objects and whatever else takes room in the backend."""
        return self.used_bytes + self._other_bytes(len(self._folders))

    @property
    def fraction(self) -> float:
        """Held part of the limit; 0 where there is none."""
        return self.held_bytes / self.capacity.limit_bytes if self.capacity.limit_bytes else 0.0

    def lacking_bytes(self, keys: Sequence[ObjectKey], charge_bytes: int) -> int:
        """How much must go before these keys, charged that much, may be stored; 0 when there is room."""
        folders_of = self.capacity.folders_of
        folders = self._folders.with_these(map(folders_of, keys)) if folders_of else 0
        total = self.used_bytes + self.reserved_bytes + self._other_bytes(folders) + charge_bytes
        limit = self.capacity.limit_bytes
        return 0 if limit is None else max(0, total - limit)

    def add(self, keys: Sequence[ObjectKey], sizes_bytes: Sequence[int]) -> None:
        """Objects that were just stored or seen, in prefix order; the youngest from now on."""
        charges = self._charge(dict(zip(keys, sizes_bytes, strict=True)))
        self.policy.add(list(charges), list(charges.values()))

    def add_older(self, objects: Sequence[tuple[ObjectKey, int]]) -> None:
        """Objects found at start, youngest first."""
        known = self._charges
        charges = self._charge({key: size for key, size in objects if key not in known})
        self.policy.add_older(list(charges), list(charges.values()))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.policy.touch(keys)

    def remove(self, key: ObjectKey) -> int:
        """The charge that is free now, 0 for an unknown key."""
        self.policy.remove(key)
        if key not in self._charges:
            return 0
        charge = self._charges.pop(key)
        self.used_bytes -= charge
        self.leave_folders([key])
        return charge

    def hold(self, reader: object, keys: Sequence[ObjectKey]) -> None:
        """They are being read, and no victims until the reader, which is only compared, lets go."""
        self._readers[reader] = keys

    def let_go(self, reader: object) -> None:
        del self._readers[reader]

    @property
    def read_objects(self) -> int:
        return sum(map(len, self._readers.values()))

    def victims(self, wanted_bytes: int) -> list[ObjectKey]:
        """Who goes to free so much, or as much as there is."""
        held = {key for keys in self._readers.values() for key in keys}
        passed_over = sum(map(self.charge_of, held))
        chosen: list[ObjectKey] = []
        for key in self.policy.victims(wanted_bytes + passed_over if wanted_bytes > 0 else 0):
            if wanted_bytes <= 0:
                break
            if key not in held:
                chosen.append(key)
                wanted_bytes -= self._charges[key]
        return chosen

    def check(self) -> None:
        """Asserts the invariant while no store is under way. O(objects)."""
        assert self.used_bytes == sum(self._charges.values())
        folders_of = self.capacity.folders_of
        expected = {folder for key in self._charges for folder in folders_of(key)} if folders_of else set()
        assert len(self._folders) == len(expected)
        assert self._folders.with_these([[folder] for folder in expected]) == len(expected)

    def enter_folders(self, keys: Iterable[ObjectKey]) -> None:
        folders_of = self.capacity.folders_of
        if folders_of:
            for key in keys:
                self._folders.enter(folders_of(key))

    def leave_folders(self, keys: Iterable[ObjectKey]) -> None:
        folders_of = self.capacity.folders_of
        if folders_of:
            for key in keys:
                self._folders.leave(folders_of(key))

    def _other_bytes(self, folders: int) -> int:
        return folders * self.capacity.folder_bytes + self._overhead_bytes()

    def _charge(self, sizes_bytes: dict[ObjectKey, int]) -> dict[ObjectKey, int]:
        """What each is charged from now on. Of a thousand objects most have one size."""
        of_size = {size: self.capacity.charge(size) for size in set(sizes_bytes.values())}
        charges = {key: of_size[size] for key, size in sizes_bytes.items()}
        self.enter_folders([key for key in charges if key not in self._charges])
        self.used_bytes += sum(charges.values()) - sum(self._charges.get(key, 0) for key in charges)
        self._charges.update(charges)
        return charges
