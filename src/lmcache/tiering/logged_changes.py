"""The changes of a tier as its index notes them (native/include/lmcache/change_log.h), with the names of namespaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lmcache._native import ChangePage as NativePage
from lmcache._native import objects_by_namespace
from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, UnnamedNamespace, decode_known
from lmcache.core.object_changes import ChangePage, ObjectsPage, Run
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.tiering.namespace_directory import NamespaceDirectory, served_namespace

_STEP_RECORDS = 16_384  # looked at under a lock at a time
_NEVER_GIVEN = (1 << 64) - 1  # a cursor that no index has given

Listed = tuple[list[tuple[bytes, Namespace]], bytes, bytes, bytes, int]
ListStep = Callable[[int, int], Listed]
NameOf = Callable[[bytes, bytes], Namespace]


class WatchedIndex(Protocol):
    def watch_changes(self) -> int: ...
    def changes(self, cursor: int, most: int) -> NativePage: ...


class LoggedChanges:
    """A `core.object_changes.ChangeSource`. Used by one thread. The index notes its changes from the first `cursor` on.

    Of a key that changes several times in a page the last state counts. What goes is named as it was when it came: an
    object that had gone before its namespace could be named was never told of."""

    def __init__(
        self,
        tier: str,
        backend: str,
        index: WatchedIndex,
        name_of: NameOf,
        list_step: ListStep,
        capacity_bytes: Callable[[], int],
        *,
        shared: bool = False,
    ) -> None:
        """`name_of` a digest and the chunk hash of an object in it; an UnnamedNamespace where nothing says it.
        `list_step(start, most)`: digests and namespaces, and for each object u32 of its position there, hash and u64
        of its size; and where to go on."""
        self.tier = tier
        self.backend = backend
        self.shared = shared
        self.capacity_bytes = capacity_bytes
        self._index = index
        self._name_of = name_of
        self._list_step = list_step
        self._watches = False
        self._names: dict[bytes, Namespace] = {}
        self._forgot = False  # a name of something that was told

    def cursor(self) -> int:
        if not self._watches:
            self._watches = True
            return self._index.watch_changes()
        return self._index.changes(_NEVER_GIVEN, 0).next_cursor

    def changes(self, cursor: int, most: int) -> ChangePage:
        page = self._index.changes(cursor, most)
        if page.lost:
            return ChangePage((), page.next_cursor, lost=True)
        runs: list[Run] = []
        for digest, (gone, came, sizes_bytes) in zip(page.namespaces, page.last_states(), strict=True):
            # What went has a name if it was told; to look for it would take long, in vain.
            namespace = self._named(digest, came) if came else self._names.get(digest)
            if namespace is None or isinstance(namespace, UnnamedNamespace):
                if self._forgot and gone:
                    return ChangePage((), page.next_cursor, lost=True)
                continue
            if gone:
                runs.append(Run(namespace, gone, bytes(8 * (len(gone) // CHUNK_HASH_BYTES)), added=False))
            if came:
                runs.append(Run(namespace, came, sizes_bytes))
        return ChangePage(runs, page.next_cursor)

    def objects(self, start: int, most: int) -> ObjectsPage:
        if start == 0:  # what was told before is void
            self._names.clear()
            self._forgot = False
        namespaces, positions, all_hashes, all_sizes_bytes, next_start = self._list_step(start, most)
        listed = objects_by_namespace(positions, all_hashes, all_sizes_bytes, len(namespaces))
        runs = []
        for (digest, namespace), (_, hashes, sizes_bytes) in zip(namespaces, listed, strict=True):
            if isinstance(namespace, UnnamedNamespace) or not hashes:
                continue
            self._note(digest, namespace)
            runs.append(Run(namespace, hashes, sizes_bytes))
        return ObjectsPage(runs, next_start)

    def _named(self, digest: bytes, hashes: bytes) -> Namespace:
        known = self._names.get(digest)
        if known is not None:
            return known
        namespace = self._name_of(digest, hashes[:CHUNK_HASH_BYTES])
        if not isinstance(namespace, UnnamedNamespace):
            self._note(digest, namespace)
        return namespace

    def _note(self, digest: bytes, namespace: Namespace) -> None:
        """`digest` is that in the index, which is another one where a serde is in between."""
        if digest not in self._names and len(self._names) >= limits.MAX_NAMESPACES_REMEMBERED:
            del self._names[next(iter(self._names))]
            self._forgot = True
        self._names[digest] = namespace


def l1_changes(l1: L1Store, directory: NamespaceDirectory) -> LoggedChanges:
    core = l1.core

    def step(start: int, most: int) -> Listed:
        page = core.list_objects(start, most, _STEP_RECORDS)
        names = [(digest, directory.of_l1_object(digest, chunk_hash)) for digest, chunk_hash in page.namespaces]
        return names, page.positions, page.hashes, page.sizes_bytes, page.next_start

    return LoggedChanges("l1", "", core, directory.of_l1_object, step, lambda: core.stats()["capacity_bytes"])


def l2_changes(runner: Runner) -> LoggedChanges:
    ledger = runner.ledger.native
    stored_names: dict[bytes, Namespace] = {}

    def named(encoded: bytes) -> tuple[bytes, Namespace]:
        stored = decode_known(encoded)
        return stored.digest, served_namespace(stored, runner.serde_name)

    def name_of(digest: bytes, chunk_hash: bytes) -> Namespace:
        if digest not in stored_names:
            stored_names.clear()
            stored_names.update(map(named, ledger.namespaces()))
        return stored_names.get(digest) or UnnamedNamespace.of(digest)

    def step(start: int, most: int) -> Listed:
        page = ledger.list(start, most)
        names = [named(encoded) for encoded in page.namespaces]
        return names, page.positions, page.hashes, page.charges_bytes, page.next_start

    return LoggedChanges(
        *("l2", runner.name, ledger, name_of, step, lambda: runner.ledger.capacity.limit_bytes or 0),
        shared=runner.config.is_shared,
    )
