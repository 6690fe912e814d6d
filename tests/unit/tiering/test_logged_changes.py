"""What a reader of the noted changes of a tier believes is what the tier has."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmcache._native import Ledger
from lmcache.core import limits
from lmcache.core.key import SERDE_MARK, Namespace, ObjectKey
from lmcache.core.object_changes import Run
from lmcache.tiering.logged_changes import LoggedChanges, l2_changes
from seeds import SEED

SERDE = "zstd"


def stored(number: int) -> Namespace:
    """As an adapter with a serde names it."""
    return Namespace("model", 2, number % 2, 0, f"{'5e' * 16}{SERDE_MARK}{SERDE}", f"salt-{number // 2}")


def served(number: int) -> Namespace:
    return Namespace("model", 2, number % 2, 0, "5e" * 16, f"salt-{number // 2}")


def key(namespace: int, number: int) -> ObjectKey:
    return ObjectKey(stored(namespace), number.to_bytes(32, "big"))


class Reader:
    """Follows a source as the reporter does."""

    def __init__(self, source: LoggedChanges) -> None:
        self.source = source
        self.begin()

    def begin(self) -> None:
        self.held: dict[tuple[Namespace, bytes], int] = {}
        self.cursor = self.source.cursor()
        start, more = 0, True
        while more:
            page = self.source.objects(start, 7)
            self.take(page.runs)
            start, more = page.next_start, page.next_start > 0

    def follow(self) -> bool:
        """Whether changes were lost."""
        while True:
            page = self.source.changes(self.cursor, 5)
            if page.lost:
                return True
            self.take(page.runs)
            if page.next_cursor == self.cursor:
                return False
            self.cursor = page.next_cursor

    def take(self, runs: Any) -> None:
        for run in runs:
            assert isinstance(run, Run)
            sizes = array("Q", run.sizes_bytes)
            for row, size in enumerate(sizes):
                name = run.namespace, run.hashes[32 * row : 32 * row + 32]
                if run.added:
                    self.held[name] = size
                else:
                    self.held.pop(name, None)


def source_of(ledger: Ledger) -> LoggedChanges:
    capacity = SimpleNamespace(native=ledger, capacity=SimpleNamespace(limit_bytes=None))
    runner = SimpleNamespace(name="disk", serde_name=SERDE, ledger=capacity, config=SimpleNamespace(is_shared=True))
    return l2_changes(cast(Any, runner))


def truth(ledger: Ledger) -> dict[tuple[Namespace, bytes], int]:
    page = ledger.list(0, 1 << 20)
    names = [Namespace.decode(encoded) for encoded in page.namespaces]
    rows = zip(array("I", page.positions), array("Q", page.charges_bytes), strict=True)
    return {
        (
            Namespace(*(names[at].model_name, 2, names[at].rank, 0, "5e" * 16, names[at].cache_salt)),
            page.hashes[32 * row : 32 * row + 32],
        ): size
        for row, (at, size) in enumerate(rows)
    }


@pytest.mark.parametrize("remembered", [limits.MAX_NAMESPACES_REMEMBERED, 3])
def test_a_reader_has_what_the_index_has(monkeypatch: pytest.MonkeyPatch, remembered: int) -> None:
    """Also where more namespaces come and go than are remembered: then something is lost, and said to be."""
    monkeypatch.setattr(limits, "MAX_NAMESPACES_REMEMBERED", remembered)
    rng = random.Random(SEED)
    ledger = Ledger("LRU")
    reader = Reader(source_of(ledger))
    assert (reader.source.tier, reader.source.backend, reader.source.shared) == ("l2", "disk", True)
    lost = 0
    for number in range(2000):
        some = list({key(rng.randrange(40), rng.randrange(2)) for _ in range(rng.randrange(1, 9))})
        if rng.random() < 0.5:
            ledger.stored(some, [4096 * (1 + rng.randrange(3))] * len(some))
        else:
            ledger.lost(some)
        if number % 5 == 0:
            while reader.follow():
                lost += 1
                reader.begin()
            assert reader.held == truth(ledger), number
    assert bool(lost) == (remembered == 3)


def test_a_reader_that_is_behind_is_told_so() -> None:
    ledger = Ledger("LRU")
    reader = Reader(source_of(ledger))
    for number in range(3000):
        some = [key(0, chunk) for chunk in range(100)]
        (ledger.stored(some, [number + 1] * 100) if number % 2 else ledger.lost(some))
    assert reader.follow()
    reader.begin()
    assert not reader.follow() and reader.held == truth(ledger)


def test_tenants_that_come_and_go_for_ever_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is remembered, too: a reader that has begun anew needs no name of what went before it was told."""
    monkeypatch.setattr(limits, "MAX_NAMESPACES_REMEMBERED", 3)
    ledger = Ledger("LRU")
    reader = Reader(source_of(ledger))
    for number in range(10):
        ledger.stored([key(number, 1)], [4096])
        assert not reader.follow()
    for number in range(10):
        ledger.lost([key(number, 1)])
    assert reader.follow()
    reader.begin()
    for number in range(10, 50):
        ledger.stored([key(number, 1)], [4096])
        ledger.lost([key(number, 1)])
        assert not reader.follow() and not reader.held
