"""What the native L1 core promises, rule by rule."""

from __future__ import annotations

import hashlib
import struct

import pytest

from lmcache import _native
from lmcache._native import NO_SLOT, L1Core
from lmcache.errors import ServerUnavailable
from unit.l1.results import values

KIB4 = 4096
FOREVER = 1e18


def chunk_hashes(*names: object) -> bytes:
    return b"".join(hashlib.sha256(str(name).encode()).digest() for name in names)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def as_u64(packed: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<Q", packed)]


def make_core(slots: int = 8, *, policy: str = "LRU", align_bytes: int = KIB4) -> L1Core:
    core = L1Core(slots * align_bytes, align_bytes, align_bytes, policy)
    core.set_committed(slots * align_bytes)
    return core


def named(name: str = "n") -> bytes:
    """The digest of a namespace."""
    return hashlib.sha256(name.encode()).digest()


def put(core: L1Core, namespaces: bytes, hashes: bytes, size_bytes: int = KIB4, owner: int = 1, salt: str = "") -> None:
    count = len(namespaces) // 32
    reservation, _, without_room = values(
        core.reserve(owner, namespaces, salt, u64(*[size_bytes] * count), hashes, FOREVER)
    )
    assert without_room == 0
    core.commit(reservation)


def resident(core: L1Core, namespace: bytes, *names: object) -> list[bool]:
    return [core.probe(namespace, chunk_hashes(name)) == 1 for name in names]


def test_a_reserved_object_is_invisible_until_it_is_committed() -> None:
    core = make_core()
    namespace = named()
    hashes = chunk_hashes(0, 1)
    reservation, slots, without_room = values(core.reserve(1, namespace, "", u64(KIB4), hashes, FOREVER))
    assert (reservation != 0, as_u64(slots), without_room) == (True, [KIB4, 2 * KIB4], 0)
    assert core.probe(namespace, hashes) == 0
    assert values(core.acquire(2, namespace, hashes, FOREVER)) == (0, 0, b"")
    objects, lease, records = values(core.commit(reservation))
    assert (objects, lease) == (2, 0)
    assert records == [(0, 0, KIB4, KIB4), (0, 1, 2 * KIB4, KIB4)]
    assert core.probe(namespace, hashes) == 2
    core.check()


def test_what_was_not_written_is_not_published() -> None:
    core = make_core()
    namespaces = named("a") + named("b")
    hashes = chunk_hashes(0, 1)
    reservation, slots, _ = values(core.reserve(1, namespaces, "", u64(KIB4, 2 * KIB4), hashes, FOREVER))
    offsets = as_u64(slots)
    objects, _, records = values(core.commit(reservation, bytes([1, 1, 1, 0])))
    assert objects == 3
    assert records == [(0, 0, offsets[0], KIB4), (1, 0, offsets[2], 2 * KIB4), (0, 1, offsets[1], KIB4)]
    assert core.probe(namespaces, hashes) == 1
    assert core.stats()["used_bytes"] == 4 * KIB4
    core.check()


def test_a_reservation_ends_once() -> None:
    core = make_core()
    namespace = named()
    reservation = core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0), FOREVER).reservation
    assert core.abort(reservation)
    assert values(core.commit(reservation)) == (0, 0, [])
    assert not core.abort(reservation)
    assert core.stats()["used_bytes"] == 0
    reservation = core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0), FOREVER).reservation
    assert core.commit(reservation).objects == 1
    assert values(core.commit(reservation)) == (0, 0, [])
    assert not core.abort(reservation)
    assert core.probe(namespace, chunk_hashes(0)) == 1
    core.check()


def test_staged_and_resident_objects_get_no_second_slot() -> None:
    core = make_core()
    namespace = named()
    put(core, namespace, chunk_hashes(0))
    first, slots, _ = values(core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0, 1), FOREVER))
    assert as_u64(slots) == [NO_SLOT, 2 * KIB4]
    assert values(core.reserve(2, namespace, "", u64(KIB4), chunk_hashes(0, 1), FOREVER)) == (
        0,
        u64(NO_SLOT, NO_SLOT),
        0,
    )
    second, slots, _ = values(core.reserve(2, namespace, "", u64(KIB4), chunk_hashes(2, 2), FOREVER))
    assert as_u64(slots) == [3 * KIB4, NO_SLOT]
    assert core.commit(first, b"\1\1").objects == 1
    assert core.commit(second, b"").objects == 1
    core.check()


def test_an_expired_reservation_keeps_its_memory_but_never_publishes() -> None:
    core = make_core()
    namespace = named()
    hashes = chunk_hashes(0, 1)
    reservation, slots, _ = values(core.reserve(7, namespace, "", u64(KIB4), hashes, 100.0))
    assert values(core.expire(99.9)) == (0, 0)
    assert values(core.expire(100.0)) == (0, 1)
    assert values(core.expire(1e9)) == (0, 0)
    assert values(core.commit(reservation)) == (0, 0, [])
    assert core.stats()["quarantined_bytes"] == 2 * KIB4
    # The key is free for another writer, the memory is not.
    other, other_slots, _ = values(core.reserve(8, namespace, "", u64(KIB4), hashes, FOREVER))
    assert not set(as_u64(slots)) & set(as_u64(other_slots))
    assert core.commit(other, b"").objects == 2
    core.check()
    assert values(core.drop_owner(7)) == (0, 1)
    assert core.stats()["quarantined_bytes"] == 0
    assert core.probe(namespace, hashes) == 2
    core.check()


def test_abort_frees_a_quarantined_reservation() -> None:
    core = make_core()
    reservation = core.reserve(7, named(), "", u64(KIB4), chunk_hashes(0), 1.0).reservation
    core.expire(2.0)
    assert core.abort(reservation)
    assert core.stats()["used_bytes"] == 0
    core.check()


def test_what_a_late_writer_was_to_write_can_be_written_elsewhere() -> None:
    core = make_core()
    namespace = named()
    late, slots, _ = values(core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0, 1), FOREVER))
    assert core.quarantine(late) and core.quarantine(late)
    put(core, namespace, chunk_hashes(0, 1))
    offsets = core.acquire(2, namespace, chunk_hashes(0, 1), FOREVER).slots
    assert not set(as_u64(offsets)) & set(as_u64(slots))
    assert values(core.commit(late, b"")) == (0, 0, [])
    core.check()
    assert core.abort(late) and not core.quarantine(late)
    assert core.stats()["quarantined_bytes"] == 0
    core.check()


def test_renewal_moves_deadlines_of_that_owner_only() -> None:
    core = make_core()
    namespace = named()
    put(core, namespace, chunk_hashes(0))
    mine = core.acquire(1, namespace, chunk_hashes(0), 10.0).lease
    other = core.acquire(2, namespace, chunk_hashes(0), 10.0).lease
    reservation = core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(1), 10.0).reservation
    assert core.renew(1, 20.0) == 2
    assert values(core.expire(10.0)) == (1, 0)
    assert not core.release(other)
    assert core.commit(reservation).objects == 1
    assert core.release(mine)
    assert core.renew(1, 30.0) == 0
    core.check()


def test_a_lease_blocks_eviction_and_ends_once() -> None:
    core = make_core(slots=2)
    namespace = named()
    put(core, namespace, chunk_hashes("a", "b"))
    lease, chunks, slots = values(core.acquire(1, namespace, chunk_hashes("a", "b"), FOREVER))
    assert (chunks, as_u64(slots)) == (2, [KIB4, 2 * KIB4])
    assert values(core.evict(KIB4)) == (0, 0)
    assert values(core.reserve(1, namespace, "", u64(KIB4), chunk_hashes("c"), FOREVER)) == (0, u64(NO_SLOT), 1)
    assert core.remove(namespace, chunk_hashes("a")) == 0
    assert core.release(lease)
    assert not core.release(lease)
    assert values(core.evict(KIB4)) == (1, KIB4)
    core.check()


def test_two_leases_on_an_object_count_separately() -> None:
    core = make_core()
    namespace = named()
    put(core, namespace, chunk_hashes(0))
    first = core.acquire(1, namespace, chunk_hashes(0), FOREVER).lease
    second = core.acquire(2, namespace, chunk_hashes(0), FOREVER).lease
    assert core.stats()["leased_objects"] == 1
    core.release(first)
    assert values(core.evict(1)) == (0, 0)
    assert values(core.drop_owner(2)) == (1, 0)
    assert not core.release(second)
    assert values(core.evict(1)) == (1, KIB4)


def test_a_hit_needs_every_namespace() -> None:
    core = make_core()
    both = named("rank 0") + named("rank 1")
    put(core, both[:32], chunk_hashes(0, 1, 2))
    put(core, both[32:], chunk_hashes(0, 2))
    assert core.probe(both, chunk_hashes(0, 1, 2)) == 1
    lease, chunks, slots = values(core.acquire(1, both, chunk_hashes(0, 1, 2), FOREVER))
    assert (chunks, as_u64(slots)) == (1, [KIB4, 4 * KIB4])
    assert core.stats()["leased_objects"] == 2
    core.release(lease)


def test_a_suffix_goes_before_its_prefix() -> None:
    core = make_core(slots=6)
    namespace = named()
    put(core, namespace, chunk_hashes(*"abc"))
    put(core, namespace, chunk_hashes(*"xyz"))
    lease = core.acquire(1, namespace, chunk_hashes(*"abc"), FOREVER).lease
    core.release(lease)
    order = []
    while core.stats()["objects"]:
        before = resident(core, namespace, *"abcxyz")
        core.evict(1)
        after = resident(core, namespace, *"abcxyz")
        order += [name for name, was, still in zip("abcxyz", before, after, strict=True) if was and not still]
    assert order == ["z", "y", "x", "c", "b", "a"]


def test_touch_puts_a_prompt_that_was_stored_in_steps_into_order() -> None:
    core = make_core(slots=4)
    namespace = named()
    put(core, namespace, chunk_hashes(0, 1))
    put(core, namespace, chunk_hashes(2, 3))
    assert core.touch(namespace, chunk_hashes(0, 1, 2, 3, 4)) == 4
    core.evict(2 * KIB4)
    assert resident(core, namespace, 0, 1, 2, 3) == [True, True, False, False]


def test_reserve_makes_room_by_the_oldest_and_spares_its_own_prefix() -> None:
    core = make_core(slots=4)
    namespace = named()
    put(core, namespace, chunk_hashes("own 0", "own 1"))
    put(core, namespace, chunk_hashes("other 0", "other 1"))
    reservation, slots, without_room = values(
        core.reserve(1, namespace, "", u64(KIB4), chunk_hashes("own 0", "own 1", "own 2", "own 3", "own 4"), FOREVER)
    )
    assert (as_u64(slots)[:2], without_room) == ([NO_SLOT, NO_SLOT], 1)
    assert as_u64(slots)[4] == NO_SLOT
    assert core.commit(reservation).objects == 2
    assert resident(core, namespace, "own 0", "own 1", "own 2", "own 3") == [True] * 4
    assert core.stats()["allocation_failures"] == 1
    core.check()


def test_making_room_spares_the_chunks_other_objects() -> None:
    core = make_core(slots=4)
    first, second = named("a"), named("b")
    put(core, second, chunk_hashes("shared"))  # the oldest
    put(core, second, chunk_hashes(1, 2, 3))
    reservation, slots, _ = values(
        core.reserve(1, first + second, "", u64(KIB4, KIB4), chunk_hashes("shared"), FOREVER)
    )
    assert as_u64(slots)[1] == NO_SLOT
    core.commit(reservation)
    assert core.probe(first + second, chunk_hashes("shared")) == 1


def test_a_namespace_named_twice_gets_one_slot() -> None:
    core = make_core()
    namespace = named()
    reservation, slots, _ = values(
        core.reserve(1, namespace + namespace, "", u64(KIB4, KIB4), chunk_hashes(0), FOREVER)
    )
    assert as_u64(slots) == [KIB4, NO_SLOT]
    assert core.commit(reservation).objects == 1
    core.check()


def test_a_chunk_gets_room_in_all_namespaces_or_in_none() -> None:
    core = make_core(slots=5)
    both = named("a") + named("b")
    reservation, slots, without_room = values(
        core.reserve(1, both, "", u64(KIB4, 2 * KIB4), chunk_hashes(0, 1), FOREVER)
    )
    assert without_room == 1
    assert [offset == NO_SLOT for offset in as_u64(slots)] == [False, True, False, True]
    assert core.stats()["staged"] == 2
    core.abort(reservation)
    assert core.stats()["used_bytes"] == 0
    core.check()


def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    core = make_core(slots=8)
    namespace = named()
    put(core, namespace, chunk_hashes(*range(8)))
    lease = core.acquire(1, namespace, chunk_hashes(*range(6)), FOREVER).lease
    assert core.reserve(1, namespace, "", u64(3 * KIB4), chunk_hashes("big"), FOREVER).chunks_without_room == 1
    assert core.stats()["objects"] == 8
    core.release(lease)


@pytest.mark.parametrize("size_bytes", [9 * KIB4, 2**44, 2**64 - 1])
def test_an_object_larger_than_l1_finds_no_room(size_bytes: int) -> None:
    core = make_core(slots=8)
    namespace = named()
    put(core, namespace, chunk_hashes(0))
    assert values(core.reserve(1, namespace, "", u64(size_bytes), chunk_hashes(1, 2), FOREVER)) == (
        0,
        u64(NO_SLOT, NO_SLOT),
        2,
    )
    assert (core.stats()["objects"], core.stats()["allocation_failures"]) == (1, 2)
    core.check()


def test_fragmented_room_is_made_whole_by_evicting_on() -> None:
    core = make_core(slots=8)
    namespace = named()
    put(core, namespace, chunk_hashes(*range(8)))
    # Every second slot becomes free: half of the memory, but no two slots side by side.
    core.remove(namespace * 4, chunk_hashes(1, 3, 5, 7))
    assert core.stats()["largest_free_bytes"] == KIB4
    reservation, _, without_room = values(core.reserve(1, namespace, "", u64(4 * KIB4), chunk_hashes("big"), FOREVER))
    assert without_room == 0
    assert core.commit(reservation).objects == 1
    core.check()


def test_noop_never_evicts() -> None:
    core = make_core(slots=2, policy="noop")
    namespace = named()
    put(core, namespace, chunk_hashes(0, 1))
    assert values(core.evict(KIB4)) == (0, 0)
    assert core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(2), FOREVER).chunks_without_room == 1
    assert values(core.clear()) == (2, 2 * KIB4)


def test_temporary_objects_vanish_with_their_last_lease() -> None:
    core = make_core()
    namespace = named()
    reservation = core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0, 1), FOREVER).reservation
    objects, lease, _ = values(core.commit(reservation, b"", lease_owner=1, deadline=FOREVER, temporary=True))
    assert objects == 2
    second = core.acquire(2, namespace, chunk_hashes(0, 1), FOREVER).lease
    core.release(lease)
    assert core.probe(namespace, chunk_hashes(0, 1)) == 2
    core.release(second)
    assert resident(core, namespace, 0, 1) == [False, False]
    core.check()


def test_cleared_objects_stay_for_their_readers_but_are_not_found_again() -> None:
    core = make_core()
    namespace = named()
    put(core, namespace, chunk_hashes(0, 1))
    lease, _, slots = values(core.acquire(1, namespace, chunk_hashes(0), FOREVER))
    assert values(core.clear()) == (1, KIB4)
    assert core.probe(namespace, chunk_hashes(0)) == 0
    assert core.stats()["used_bytes"] == KIB4
    put(core, namespace, chunk_hashes(0))  # a new copy beside the one that is being read
    new_slots = core.acquire(2, namespace, chunk_hashes(0), FOREVER).slots
    assert new_slots != slots
    core.check()
    assert core.release(lease)
    assert core.probe(namespace, chunk_hashes(0)) == 1
    assert core.stats()["used_bytes"] == KIB4
    core.check()


def test_nothing_beyond_the_committed_memory_is_handed_out() -> None:
    core = L1Core(8 * KIB4, 0, KIB4, "LRU")
    namespace = named()
    assert core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0), FOREVER).chunks_without_room == 1
    core.set_committed(2 * KIB4 + 100)
    reservation, slots, without_room = values(core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0, 1, 2), FOREVER))
    assert (as_u64(slots), without_room) == ([0, KIB4, NO_SLOT], 1)
    core.commit(reservation)
    core.set_committed(KIB4)  # never shrinks
    core.set_committed(8 * KIB4)
    stats = core.stats()
    assert (stats["committed_bytes"], stats["used_bytes"], stats["free_bytes"]) == (8 * KIB4, 2 * KIB4, 6 * KIB4)
    with pytest.raises(ValueError, match="more than the capacity"):
        core.set_committed(9 * KIB4)
    core.check()


def test_slots_are_aligned_and_sizes_rounded_up() -> None:
    core = make_core(slots=4, align_bytes=65536)
    namespace = named()
    reservation, slots, _ = values(core.reserve(1, namespace, "", u64(5000), chunk_hashes(0, 1), FOREVER))
    assert as_u64(slots) == [65536, 131072]
    assert [record.size_bytes for record in core.commit(reservation).records] == [65536, 65536]


def test_memory_is_counted_by_salt() -> None:
    core = make_core()
    alice, nobody = named("1") + named("2"), named("3")
    put(core, alice, chunk_hashes(0), salt="alice")
    put(core, nobody, chunk_hashes(0, 1, 2))
    assert sorted(core.salt_usage()) == [("", 3 * KIB4), ("alice", 2 * KIB4)]
    assert (core.usage_of("alice"), core.usage_of("bob")) == (2 * KIB4, 0)
    core.remove(alice, chunk_hashes(0, 0))
    assert core.salt_usage() == [("", 3 * KIB4)]


def test_a_namespace_is_known_while_it_has_objects() -> None:
    core = make_core()

    def known() -> tuple[int, int]:
        core.check()
        stats = core.stats()
        return stats["namespaces"], stats["salts"]

    for number in range(100):
        assert core.probe(named(str(number)), chunk_hashes(0)) == 0
        assert core.acquire(1, named(str(number)), chunk_hashes(0), FOREVER).lease == 0
    assert known() == (0, 0)
    reservation = core.reserve(1, named("a") + named("b"), "x", u64(KIB4, KIB4), chunk_hashes(0), FOREVER).reservation
    assert known() == (2, 1)
    core.commit(reservation, b"\1\0")  # nothing of b was written
    assert known() == (1, 1)
    lease = core.acquire(1, named("a"), chunk_hashes(0), FOREVER).lease
    core.clear()
    assert known() == (1, 1)  # it is still being read
    core.release(lease)
    assert known() == (0, 0)
    late = core.reserve(1, named("a"), "x", u64(KIB4), chunk_hashes(0), 1.0).reservation
    core.expire(2.0)
    assert known() == (1, 1)  # its writer may still write
    core.abort(late)
    assert known() == (0, 0)


def test_objects_are_listed_in_pages() -> None:
    core = make_core()
    namespace = named()
    put(core, namespace, chunk_hashes(*range(5)))
    core.remove(namespace, chunk_hashes(1))
    core.reserve(1, namespace, "", u64(KIB4), chunk_hashes("staged"), FOREVER)
    first = core.list_objects(0, 3)
    second = core.list_objects(first.next_start, 3)
    assert (len(first), len(second), second.next_start) == (3, 1, 0)
    listed = [*first, *second]
    assert {(found.namespace_digest, found.size_bytes) for found in listed} == {(namespace, KIB4)}
    assert sorted(found.chunk_hash for found in listed) == sorted(chunk_hashes(i) for i in (0, 2, 3, 4))


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    core = make_core()
    namespace = named()
    reservation = core.reserve(1, namespace, "", u64(KIB4), chunk_hashes(0, 1), FOREVER).reservation
    with pytest.raises(ValueError, match="32 bytes"):
        core.probe(namespace, b"short")
    with pytest.raises(ValueError, match="at least one namespace"):
        core.probe(b"", chunk_hashes(0))
    with pytest.raises(ValueError, match="one size for each namespace"):
        core.reserve(1, namespace, "", u64(KIB4, KIB4), chunk_hashes(2), FOREVER)
    with pytest.raises(ValueError, match="more than 0"):
        core.reserve(1, namespace, "", u64(0), chunk_hashes(2), FOREVER)
    with pytest.raises(ValueError, match="one byte for each"):
        core.commit(reservation, b"\1")
    with pytest.raises(ValueError, match="namespaces must"):
        core.probe(b"123", chunk_hashes(0))
    with pytest.raises(ValueError, match="bytes-like"):
        core.probe(namespace, "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy"):
        L1Core(KIB4, 0, KIB4, "FIFO")
    with pytest.raises(ValueError, match="power of two"):
        L1Core(KIB4, 0, 3000, "LRU")
    with pytest.raises(ValueError, match="multiple of align_bytes"):
        L1Core(KIB4, 100, KIB4, "LRU")
    with pytest.raises(ValueError, match="at least align_bytes"):
        L1Core(100, 0, KIB4, "LRU")
    assert core.commit(reservation).objects == 2
    core.check()


def test_buffers_may_be_slices_that_are_not_aligned() -> None:
    core = make_core()
    namespace = named()
    reservation = core.reserve(
        1, memoryview(b"x" + namespace)[1:], "", memoryview(b"x" + u64(KIB4))[1:], bytearray(chunk_hashes(0)), FOREVER
    ).reservation
    assert core.commit(reservation, memoryview(b"x\1")[1:]).objects == 1


def test_nothing_to_do_is_no_error() -> None:
    core = make_core()
    namespace = named()
    assert core.probe(namespace, b"") == 0
    assert values(core.acquire(1, namespace, b"", FOREVER)) == (0, 0, b"")
    assert values(core.reserve(1, namespace, "", u64(KIB4), b"", FOREVER)) == (0, b"", 0)
    assert values(core.commit(12345, b"")) == (0, 0, [])
    assert values(core.drop_owner(5)) == (0, 0)
    assert len(core.list_objects(0, 10)) == core.list_objects(0, 10).next_start == 0


def put_at(core: L1Core, namespace: bytes, *names: object) -> None:
    for name in names:
        put(core, namespace, chunk_hashes(name))


def test_a_namespace_with_a_tail_needs_only_the_end_of_the_prefix() -> None:
    core = make_core(16)
    whole, window = named("whole"), named("window")
    put_at(core, whole, 0, 1, 2, 3, 4)
    put_at(core, window, 1, 2, 4)
    namespaces, hashes = whole + window, chunk_hashes(0, 1, 2, 3, 4, 5)
    for tail, chunks, held in ((0, 0, 0), (1, 5, 6), (2, 3, 5), (3, 0, 0)):
        lease, found, offsets = values(core.acquire(7, namespaces, hashes, FOREVER, tails=u32(0, tail)))
        assert (found, core.stats()["leased_objects"]) == (chunks, held), tail
        assert bool(lease) == bool(chunks)
        if lease:
            of_window = as_u64(offsets)[chunks:]
            assert [offset == NO_SLOT for offset in of_window] == [True] * (chunks - tail) + [False] * tail
            core.check()
            core.release(lease)
    assert core.touch(namespaces, hashes, tails=u32(0, 1)) == 5
    core.check()
    with pytest.raises(ValueError, match="tails"):
        core.acquire(7, namespaces, hashes, FOREVER, tails=u32(1))


def test_a_short_prefix_needs_as_much_of_a_tail_as_there_is() -> None:
    core = make_core()
    whole, window = named("whole"), named("window")
    put_at(core, whole, 0, 1)
    put_at(core, window, 0, 1)
    assert core.acquire(7, whole + window, chunk_hashes(0, 1), FOREVER, tails=u32(0, 5)).chunks == 2


def test_slots_are_reserved_where_they_are_wanted() -> None:
    core = make_core()
    namespaces = named("a") + named("b")
    wanted = bytes([1, 0, 0, 1])
    reservation, slots, without_room = values(
        core.reserve(1, namespaces, "", u64(KIB4, KIB4), chunk_hashes(0, 1), FOREVER, wanted=wanted)
    )
    assert ([slot == NO_SLOT for slot in as_u64(slots)], without_room) == ([False, True, True, False], 0)
    assert core.commit(reservation).objects == 2
    assert (
        core.reserve(1, namespaces, "", u64(KIB4, KIB4), chunk_hashes(0, 1), FOREVER, wanted=bytes(4)).reservation == 0
    )
    with pytest.raises(ValueError, match="wanted"):
        core.reserve(1, namespaces, "", u64(KIB4, KIB4), chunk_hashes(0, 1), FOREVER, wanted=b"\1")
    core.check()


def test_a_closed_core_refuses_every_call_and_touches_its_table_no_more() -> None:
    table = bytearray(8 * 8)
    core = L1Core(8 * KIB4, 0, KIB4, "LRU", slot_table=_native.buffer_address(table))
    core.set_committed(8 * KIB4)
    names, hashes = bytes(32), chunk_hashes("a")
    reservation = core.reserve(1, names, "", u64(KIB4), hashes, FOREVER).reservation
    core.commit(reservation)
    core.close()
    core.close()
    before = bytes(table)
    assert any(before)
    for call in (
        lambda: core.clear(),
        lambda: core.evict(1 << 20),
        lambda: core.enforce_limits(),
        lambda: core.set_limit("", 1),
        lambda: core.remove(names, hashes),
        lambda: core.reserve(1, names, "", u64(KIB4), chunk_hashes("b"), FOREVER),
        lambda: core.acquire(1, names, hashes, FOREVER),
        lambda: core.release(1),
        lambda: core.stats(),
        lambda: core.drop_owner(1),
        lambda: core.expire(FOREVER),
    ):
        with pytest.raises(ServerUnavailable, match="shutting down"):
            call()
    assert bytes(table) == before
