"""Each eviction policy, and the accounts, on a ledger of a few objects. Random calls are in test_ledger_model.py."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from lmcache._native import Ledger as NativeLedger
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.salt_limits import SaltLimits
from lmcache.l2.accounting import CapacityReservation, Ledger
from lmcache.l2.adapter import Capacity, ObjectColumns
from seeds import SEED
from unit.l2.support import eviction_order

SIZE = 10


def key(letter: str) -> ObjectKey:
    """An upper-case letter belongs to the salt `big`, the others to `small`."""
    salt = "big" if letter.isupper() else "small"
    return ObjectKey(Namespace("model", 1, 0, 0, "0" * 32, salt), letter.encode().ljust(32, b"\0"))


def keys(letters: str) -> list[ObjectKey]:
    return [key(letter) for letter in letters]


def letters(wanted: Sequence[ObjectKey]) -> str:
    return "".join(chr(key.chunk_hash[0]) for key in wanted)


class Letters:
    """A ledger of objects named by letters, SIZE bytes each, with room for 20."""

    def __init__(self, policy: str, **limits: int) -> None:
        self.limits = SaltLimits()
        for salt, limit_bytes in limits.items():
            self.limits.set(salt, limit_bytes)
        self.ledger = Ledger(policy, lambda: 0, self.limits)
        self.ledger.capacity = Capacity(20 * SIZE)

    def store(self, names: str) -> None:
        self.ledger.native.stored(keys(names), [SIZE] * len(names))

    def find(self, names: str, *, newer: bool = False) -> None:
        self.ledger.found([(key, SIZE) for key in keys(names)], newer=newer)

    def touch(self, names: str) -> None:
        self.ledger.touch(keys(names))

    def order(self) -> str:
        return letters(eviction_order(self.ledger))

    def choose(self, count: int, most: int = 1000) -> str:
        return letters(self.ledger.victims(count * SIZE, most).keys)

    def evict(self, count: int) -> str:
        victims = self.ledger.victims(count * SIZE, 1000)
        assert self.ledger.evicted(victims.keys) == victims.size_bytes
        return letters(victims.keys)


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_suffixes_go_before_prefixes_and_the_found_behind_the_known(policy: str) -> None:
    objects = Letters(policy)
    objects.store("ab")
    objects.find("xay")  # youngest first; a is known and keeps its place
    objects.find("z")
    assert objects.order() == "zyxba"
    objects.ledger.lost(keys("xx"))
    objects.touch("?")
    assert objects.order() == "zyba"
    objects.ledger.check()


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_what_others_stored_meanwhile_is_found_before_the_known(policy: str) -> None:
    objects = Letters(policy)
    objects.store("ab")
    objects.find("xay", newer=True)  # youngest first; a is known and keeps its place
    objects.find("z", newer=True)
    assert objects.order() == "bayxz"
    objects.ledger.check()


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_as_many_bytes_as_wanted_and_no_more_objects_than_asked_for(policy: str) -> None:
    objects = Letters(policy)
    objects.store("abcd")
    for wanted_bytes, expected in ((0, ""), (1, "d"), (10, "d"), (11, "dc"), (1000, "dcba")):
        victims = objects.ledger.victims(wanted_bytes, 1000)
        assert letters(victims.keys) == expected and victims.size_bytes == SIZE * len(expected)
        objects.ledger.not_evicted(victims.keys)
    assert objects.choose(4, most=2) == "dc"
    assert objects.choose(4) == "ba", "a victim is chosen once"


def test_lru_takes_the_oldest() -> None:
    objects = Letters("LRU")
    objects.store("abc")
    objects.store("xy")
    assert objects.order() == "cbayx"
    objects.touch("ab")
    assert objects.order() == "cyxba"
    objects.store("c")
    assert objects.order() == "yxbac"


def test_isolated_lru_takes_from_who_has_most_for_its_limit() -> None:
    objects = Letters("IsolatedLRU", big=40, small=20)
    objects.store("ABCD")
    objects.store("abc")
    assert objects.order()[0] == "c"  # 30 of 20 against 40 of 40
    objects.ledger.lost(keys("ab"))
    assert objects.order()[0] == "D"  # 10 of 20 against 40 of 40
    objects.limits.set("small", 5)
    assert objects.order()[0] == "c"  # 10 of 5


def test_isolated_lru_takes_first_from_who_has_no_limit() -> None:
    objects = Letters("IsolatedLRU", big=10)
    objects.store("abc")
    objects.store("ABCD")
    assert objects.order() == "cbaDCBA"
    objects.limits.remove("big")
    objects.limits.set("small", 10)
    assert objects.order() == "DCBAcba"


def test_s3fifo_keeps_what_is_reused_through_a_scan() -> None:
    objects = Letters("S3FIFO")
    objects.store("abcdefgh")
    objects.touch("abcd")
    objects.store("ABCDEFGH")  # nobody asks for these again
    assert objects.evict(10) == "hgfeHGFEDC"
    objects.touch("a")
    assert objects.evict(6) == "dcbBAa"  # what is left of the others has its share


def test_s3fifo_keeps_for_longer_what_it_sent_away_too_early() -> None:
    objects = Letters("S3FIFO")
    objects.store("xyz")
    assert objects.evict(2) == "zy"
    objects.store("xyz")
    objects.store("0123456789")
    # y and z had come back: they count as reused, and what is new may keep as much more.
    assert objects.order() == "x987654zy3210"


def test_noop_gives_nothing() -> None:
    objects = Letters("noop")
    objects.store("abc")
    objects.find("d")
    objects.touch("a")
    objects.ledger.lost(keys("a"))
    assert objects.order() == "" and len(objects.ledger) == 3


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="LRU, IsolatedLRU, S3FIFO or noop"):
        NativeLedger("lfu")


def test_what_could_not_be_deleted_keeps_its_place() -> None:
    objects = Letters("LRU")
    objects.store("abcdef")
    victims = objects.ledger.victims(4 * SIZE, 1000).keys
    assert letters(victims) == "fedc" and objects.order() == "ba"
    assert all(objects.ledger.known(victims)) and objects.ledger.are_leaving(victims)
    assert objects.ledger.evicted(keys("d")) == SIZE
    objects.ledger.not_evicted(keys("fec"))
    assert objects.order() == "fecba"
    assert objects.ledger.used_bytes == 5 * SIZE
    objects.ledger.check()


def test_what_is_stored_while_it_is_deleted_is_there() -> None:
    objects = Letters("LRU")
    objects.store("abc")
    victims = objects.ledger.victims(SIZE, 1).keys
    objects.store("c")
    assert not objects.ledger.are_leaving(victims)
    assert objects.ledger.evicted(victims) == 0
    assert objects.order() == "bac"
    objects.ledger.check()


def test_what_is_read_goes_when_it_is_read_no_more() -> None:
    objects = Letters("LRU")
    objects.store("abcd")
    hold = objects.ledger.hold(keys("cd?"))
    assert objects.order() == "ba"
    objects.ledger.lost(keys("c"))
    assert not objects.ledger.known(keys("c"))[0]
    objects.store("c")  # again, while the previous one is still read
    objects.ledger.check()
    assert objects.order() == "ba"
    objects.ledger.let_go(hold)
    objects.ledger.let_go(hold)
    assert objects.order() == "dbac"
    assert objects.ledger.stats().read_objects == 0


def test_what_was_lost_while_it_was_read_takes_nothing() -> None:
    objects = Letters("LRU")
    objects.store("ab")
    hold = objects.ledger.hold(keys("ab"))
    objects.ledger.lost(keys("ab"))
    assert objects.ledger.used_bytes == 0 and len(objects.ledger) == 0
    objects.ledger.check()
    objects.ledger.let_go(hold)
    assert objects.ledger.stats().namespaces == 0
    objects.ledger.check()


def test_charges_are_in_units_with_what_each_object_and_folder_costs() -> None:
    ledger = Ledger("LRU", lambda: 1000)
    ledger.capacity = Capacity(20_000, 512, 256, folder_bytes=4096)
    assert ledger.lacking_bytes(keys("ab"), 2 * 768) == 0
    assert ledger.lacking_bytes(keys("ab"), 8000) == 3 * 4096 + 1000 + 8000 - 20_000
    reservation = CapacityReservation(ledger)
    reservation.reserve(keys("ab"), 2 * 768)
    assert (ledger.stats().reserved_bytes, ledger.stats().folders) == (2 * 768, 3)
    reservation.stored(keys("a"), [512])
    assert (ledger.used_bytes, ledger.stats().reserved_bytes) == (768, 768)
    reservation.give_back()
    reservation.give_back()
    assert ledger.stats().reserved_bytes == 0
    assert ledger.held_bytes == 768 + 2 * 4096 + 1000
    assert ledger.lacking_bytes(keys("A"), 768) == 0  # a folder of another namespace, and one in it
    assert ledger.held_bytes / 20_000 == ledger.fraction
    ledger.lost(keys("a"))
    assert ledger.held_bytes == 1000
    ledger.check()


def test_a_scan_tells_what_it_has_not_seen() -> None:
    objects = Letters("LRU")
    objects.store("abcdef")
    scan = objects.ledger.begin_scan()
    objects.find("ba")
    objects.store("cx")
    assert sorted(letters([key for page in objects.ledger.pages(2, unseen_by=scan) for key in page])) == ["d", "e", "f"]
    assert sorted(letters([key for page in objects.ledger.pages(2) for key in page])) == list("abcdefx")


def test_what_is_in_a_folder_that_is_passed_over_is_not_listed() -> None:
    objects = Letters("LRU")
    objects.store("abcdefA")
    ledger, scan = objects.ledger, objects.ledger.begin_scan()
    small, big = (key(letter).namespace.digest for letter in "aA")
    ledger.seen(small, b"".join(key.chunk_hash for key in keys("bx")))
    passed_over = {small: 1 << ord("e") | 1 << ord("A"), bytes(32): (1 << 256) - 1}
    listed = [key for page in ledger.pages(2, unseen_by=scan, passed_over=passed_over) for key in page]
    assert sorted(letters(listed)) == ["A", "a", "c", "d", "f"]
    everything = [key for page in ledger.pages(2, passed_over={big: 1 << ord("A")}) for key in page]
    assert sorted(letters(everything)) == list("abcdef")


def test_what_was_passed_over_is_unseen_however_many_scans_there_were() -> None:
    """Their numbers come round again after 256."""
    objects = Letters("LRU")
    objects.store("a")
    ledger, folder = objects.ledger, {key("a").namespace.digest: 1 << ord("a")}
    for _ in range(2):
        for _ in range(255):
            assert not any(ledger.pages(2, unseen_by=ledger.begin_scan(), passed_over=folder))
        scan = ledger.begin_scan()
        assert letters([key for page in ledger.pages(2, unseen_by=scan) for key in page]) == "a"


def test_memory_is_given_back_with_the_last_object_of_a_namespace() -> None:
    ledger = Ledger("LRU", lambda: 0)
    for salt in map(str, range(1000)):
        wanted = [ObjectKey(Namespace("model", 1, 0, 0, "0" * 32, salt), bytes(32))]
        ledger.native.stored(wanted, [SIZE])
        ledger.lost(wanted)
    stats = ledger.stats()
    assert (stats.objects, stats.namespaces) == (0, 0)
    ledger.check()


def test_whatever_size_is_found_is_charged_one_tebibyte_at_most() -> None:
    ledger = NativeLedger("LRU")
    ledger.set_capacity(limit_bytes=None, unit_bytes=4096, object_overhead_bytes=256, folder_bytes=0)
    most = ((1 << 40) - 1) // 4096 * 4096 + 256
    ledger.found(keys("abc"), [1, 2 << 40, (1 << 64) - 1])
    assert ledger.stats().used_bytes == 4096 + 256 + 2 * most
    ledger.check()


@pytest.mark.parametrize(
    ("wanted", "sizes", "sentence"),
    [
        ([(1, 2, 3)], [1], "ObjectKey"),
        ([(key("a").namespace, b"short")], [1], "32 bytes"),
        (keys("a"), [], "one size for each key"),
    ],
)
def test_bad_arguments_change_nothing(wanted: list[ObjectKey], sizes: list[int], sentence: str) -> None:
    ledger = NativeLedger("LRU")
    with pytest.raises(ValueError, match=sentence):
        ledger.stored(wanted, sizes)
    assert ledger.stats().objects == 0
    ledger.check()


@pytest.mark.parametrize("policy", ["LRU", "IsolatedLRU", "S3FIFO"])
def test_an_object_takes_110_bytes_at_most(policy: str) -> None:
    """With hundreds of thousands of them, also right after a table has grown."""
    ledger = Ledger(policy, lambda: 0, SaltLimits())
    ledger.capacity = Capacity(1 << 50)
    namespace, page, objects, rng = key("a").namespace, 1 << 16, 0, random.Random(SEED)
    for _ in range(5):
        hashes = rng.randbytes(32 * page)
        sizes = array("Q", [SIZE]) * page
        ledger.found(ObjectColumns([namespace], array("I", [0]) * page, hashes, sizes, array("I", range(page))))
        objects += page
        stats = ledger.native.stats()
        assert stats.objects == objects and stats.memory_bytes <= 110 * objects
