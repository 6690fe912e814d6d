"""The changes of a tier, found by comparing what it lists with what it listed before: for indexes that keep no record
of their changes. It takes memory for every object and time for every look, so that looks take a small part of the
time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from lmcache.clock import Clock
from lmcache.core.key import Namespace, decode_known
from lmcache.core.object_changes import ChangePage, ObjectsPage, Run
from lmcache.l1.store import L1Store
from lmcache.l2.runner import Runner
from lmcache.tiering.namespace_directory import NamespaceDirectory, served_namespace

_STEP_OBJECTS = 1024  # under a lock at a time
_STEP_RECORDS = 16_384
_SHARE = 0.05  # of the time that looks may take

_Object = tuple[Namespace, bytes]  # and its chunk hash
_Listed = list[tuple[_Object, int]]
ListStep = Callable[[int], tuple[_Listed, int]]  # objects and sizes from a number on, and the next number


class ListedChanges:
    """A `core.object_changes.ChangeSource`. Used by one thread."""

    def __init__(
        self, tier: str, backend: str, list_step: ListStep, capacity_bytes: Callable[[], int], clock: Clock
    ) -> None:
        self.tier = tier
        self.backend = backend
        self.shared = False
        self.capacity_bytes = capacity_bytes
        self._list_step = list_step
        self._clock = clock
        self._known: dict[_Object, int] = {}
        self._look_from = float("-inf")
        self._cursor = 1

    def cursor(self) -> int:
        self._known = dict(self._all())
        return self._cursor

    def changes(self, cursor: int, most: int) -> ChangePage:
        """All of them: between two looks nothing is known."""
        began = self._clock.monotonic()
        if began < self._look_from:
            return ChangePage((), cursor)
        found = dict(self._all())
        gone = [(key, size) for key, size in self._known.items() if key not in found]
        new = [(key, size) for key, size in found.items() if self._known.get(key) != size]
        self._known = found
        self._look_from = self._clock.monotonic() + (self._clock.monotonic() - began) / _SHARE
        self._cursor += 1
        return ChangePage([*_runs(gone, added=False), *_runs(new, added=True)], self._cursor)

    def objects(self, start: int, most: int) -> ObjectsPage:
        listed, next_start = self._list_step(start)
        return ObjectsPage(list(_runs(listed, added=True)), next_start)

    def _all(self) -> Iterator[tuple[_Object, int]]:
        start, more = 0, True
        while more:
            listed, start = self._list_step(start)
            yield from listed
            more = start > 0


def l1_changes(l1: L1Store, directory: NamespaceDirectory, clock: Clock) -> ListedChanges:
    def step(start: int) -> tuple[_Listed, int]:
        page = l1.core.list_objects(start, _STEP_OBJECTS, _STEP_RECORDS)
        of = {digest: directory.of_l1_object(digest, chunk_hash) for digest, chunk_hash in page.namespaces}
        listed = [((of[one.namespace_digest], one.chunk_hash), one.size_bytes) for one in page]
        return listed, page.next_start

    return ListedChanges("l1", "", step, lambda: l1.core.stats()["capacity_bytes"], clock)


def l2_changes(runner: Runner, clock: Clock) -> ListedChanges:
    def step(start: int) -> tuple[_Listed, int]:
        page = runner.ledger.native.list(start, _STEP_OBJECTS)
        of = [served_namespace(decode_known(encoded), runner.serde_name) for encoded in page.namespaces]
        hashes = [page.hashes[at : at + 32] for at in range(0, len(page.hashes), 32)]
        positions, charges = array("I", page.positions), array("Q", page.charges_bytes)
        listed = [
            ((of[position], chunk_hash), charge)
            for position, chunk_hash, charge in zip(positions, hashes, charges, strict=True)
        ]
        return listed, page.next_start

    return ListedChanges("l2", runner.name, step, lambda: runner.ledger.capacity.limit_bytes or 0, clock)


def _runs(listed: Iterable[tuple[_Object, int]], *, added: bool) -> Iterator[Run]:
    by_namespace: dict[Namespace, _Listed] = {}
    for entry in listed:
        by_namespace.setdefault(entry[0][0], []).append(entry)
    for namespace, some in by_namespace.items():
        hashes = b"".join(chunk_hash for (_, chunk_hash), _ in some)
        yield Run(namespace, hashes, array("Q", [size for _, size in some]).tobytes(), added)
