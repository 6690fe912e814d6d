"""An L1 that goes on with the memory of a previous one, both in this process."""

from __future__ import annotations

import logging
import os
import secrets
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from lmcache import _native
from lmcache.core.frame import header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES, L1_LATE_IO_SECONDS, MIB
from lmcache.l1.store import L1Options, L1Store
from lmcache.memory.engine_memory import EngineMemory
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.memory.restart_compatibility import PAGE_OFFSET, TABLE_OFFSET, RestartCompatibility
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import batch_of, keys, namespace
from manual_clock import ManualClock
from unit.l1.results import values
from unit.service.support import Service

EPOCHS = (bytes(16), bytes(range(16)))
FOREVER = 1e18
FRAME_BYTES = 8192
COMPATIBILITY = RestartCompatibility(16 * MIB, 4096, 256, "blake3", bytes(32))


@pytest.fixture
def name() -> Iterator[str]:
    name = f"lmcache_test_{os.getpid()}_{secrets.token_hex(4)}"
    yield name
    if os.path.exists(f"/dev/shm/{name}"):
        os.unlink(f"/dev/shm/{name}")


def open_l1(name: str, start: int, compatibility: RestartCompatibility = COMPATIBILITY) -> L1Store:
    server_epoch = EPOCHS[start % 2]
    return L1Store.open(
        name,
        server_epoch,
        L1Options(
            compatibility.capacity_bytes,
            policy="LRU",
            init_bytes=compatibility.capacity_bytes,
            compatibility=compatibility,
        ),
    )


def stage(l1: L1Store, wanted: Sequence[ObjectKey], owner: int = 1) -> tuple[int, list[int]]:
    of = wanted[0].namespace
    reserved = l1.reserve(owner, batch_of(wanted, FRAME_BYTES), FOREVER)
    offsets = list(array("Q", reserved.slots))
    template = header_template(of, FRAME_BYTES - FRAME_HEADER_BYTES)
    for key, offset in zip(wanted, offsets, strict=True):
        if offset != _native.NO_SLOT:  # resident already
            _native.frame_seal(l1.address_of(offset), template, key.chunk_hash)
    return reserved.reservation, offsets


def put(l1: L1Store, wanted: Sequence[ObjectKey]) -> list[int]:
    reservation, offsets = stage(l1, wanted)
    l1.core.commit(reservation, b"")
    return offsets


def resident(l1: L1Store, wanted: Sequence[ObjectKey]) -> list[bool]:
    return [bool(l1.core.probe(key.namespace.digest, key.chunk_hash)) for key in wanted]


def test_namespaces_and_their_salts_come_from_the_frames(name: str) -> None:
    of = [Namespace("model", 2, rank, 0, "0a" * 16, salt) for rank in range(2) for salt in ("", "tenant")]
    with closing(open_l1(name, 0)) as previous:
        for rank_namespace in of:
            put(previous, keys(3, of=rank_namespace))
    with closing(open_l1(name, 1)) as l1:
        assert l1.recovered.objects == 12
        assert all(all(resident(l1, keys(3, of=rank_namespace))) for rank_namespace in of)
        assert sorted(l1.core.salt_usage()) == [("", 6 * FRAME_BYTES), ("tenant", 6 * FRAME_BYTES)]
        l1.check_idle()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 24, 40, 72, 104, 112, 256, 300, 2304, 4092, 4095])
def test_a_flipped_byte_of_a_header_is_a_miss(name: str, at: int) -> None:
    with closing(open_l1(name, 0)) as previous:
        offsets = put(previous, keys(3))
        previous.memory.view(offsets[1] + at, 1)[0] ^= 0x08
    with closing(open_l1(name, 1)) as l1:
        assert resident(l1, keys(3)) == [True, False, True]
        l1.check_idle()
        put(l1, keys(3))
        assert all(resident(l1, keys(3)))


@pytest.mark.parametrize("bit", [0, 5, 31, 32, 33, 40, 61, 62, 63])
def test_a_flipped_bit_of_the_table_costs_at_most_that_object(name: str, bit: int) -> None:
    with closing(open_l1(name, 0)) as previous:
        offsets = put(previous, keys(3))
        word = TABLE_OFFSET + (offsets[1] - COMPATIBILITY.first_offset) // 4096 * 8
        previous.memory.view(word + bit // 8, 1)[0] ^= 1 << bit % 8
    with closing(open_l1(name, 1)) as l1:
        found = resident(l1, keys(3))
        assert found[0] and found[2]
        assert found[1] == (bit < 32)  # only its place in the order of uses
        l1.core.check()


def test_a_namespace_that_is_not_what_its_digest_says_is_refused(name: str) -> None:
    with closing(open_l1(name, 0)) as previous:
        put(previous, keys(1))
        (key,) = keys(1, of=namespace("other"))
        reservation, offsets = stage(previous, [key])
        lie = _native.frame_template(key.namespace.encode(), bytes(32), FRAME_BYTES - FRAME_HEADER_BYTES)
        _native.frame_seal(previous.address_of(offsets[0]), lie, key.chunk_hash)
        previous.core.commit(reservation, b"")
        reservation, offsets = stage(previous, keys(1, seed=3))
        nonsense = _native.frame_template(b"\xc1", bytes(32), FRAME_BYTES - FRAME_HEADER_BYTES)
        _native.frame_seal(previous.address_of(offsets[0]), nonsense, keys(1, seed=3)[0].chunk_hash)
        previous.core.commit(reservation, b"")
    with closing(open_l1(name, 1)) as l1:
        assert l1.recovered.objects == 1
        assert resident(l1, keys(1)) == [True]
        l1.check_idle()


def test_slots_of_running_engines_and_of_late_io_are_quarantined(name: str) -> None:
    previous = open_l1(name, 0)
    engine = EngineMemory.attach(previous.memory.path, previous.memory.size_bytes, EPOCHS[0])
    alive, dead = previous.memory.new_owner(), previous.memory.new_owner()
    engine.lock_owner(alive)
    stage(previous, keys(3, seed=1), alive)
    stage(previous, keys(4, seed=2), dead)
    stage(previous, keys(5, seed=3), STORAGE_OWNER)
    previous.close()
    with closing(open_l1(name, 1)) as l1:
        assert l1.memory.new_owner() > dead
        assert sorted(quarantined.owner for quarantined in l1.recovered.quarantined) == [STORAGE_OWNER, alive]
        assert l1.stats()["quarantined_bytes"] == 8 * FRAME_BYTES
        assert not any(resident(l1, keys(5, seed=seed))[0] for seed in (1, 2, 3))
        reservations = {quarantined.owner: quarantined.reservation for quarantined in l1.recovered.quarantined}
        assert l1.core.abort(reservations[STORAGE_OWNER])
        assert values(l1.core.drop_owner(alive)) == (0, 1)
        l1.check_idle()
    engine.close()


def test_what_a_process_of_the_previous_server_may_still_fill_stays_taken_until_it_ends(name: str) -> None:
    """However long that takes."""
    previous = open_l1(name, 0)
    stage(previous, keys(5), STORAGE_OWNER)
    previous.close()
    with closing(open_l1(name, 1)) as l1:
        service = Service(l1, ManualClock(), Metrics(), with_l2=True)
        service.locks.writer_lives = True
        service.liveness.start()
        for _ in range(3):
            service.clock.advance(L1_LATE_IO_SECONDS + 1)
            service.loop.run()
            assert l1.stats()["quarantined_bytes"] == 5 * FRAME_BYTES
    with closing(open_l1(name, 0)) as l1:  # and one server later
        assert l1.stats()["quarantined_bytes"] == 5 * FRAME_BYTES
        service = Service(l1, clock := ManualClock(), Metrics(), with_l2=True)
        service.liveness.start()
        clock.advance(L1_LATE_IO_SECONDS + 1)
        service.loop.run()
        l1.check_idle()


def test_an_engine_of_the_previous_server_attaches_only_with_the_new_epoch(name: str) -> None:
    with closing(open_l1(name, 0)) as previous:
        size_bytes = previous.memory.size_bytes
        put(previous, keys(1))
    with closing(open_l1(name, 1)) as l1:
        EngineMemory.attach(l1.memory.path, size_bytes, EPOCHS[1]).close()
        with pytest.raises(Exception, match="another server epoch"):
            EngineMemory.attach(l1.memory.path, size_bytes, EPOCHS[0])


def test_memory_that_went_missing_is_not_believed_in(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with closing(open_l1(name, 0)) as previous:
        put(previous, keys(1))
        path, size_bytes = previous.memory.path, previous.memory.size_bytes
    os.truncate(path, PAGE_OFFSET)
    os.truncate(path, size_bytes)
    with caplog.at_level(logging.WARNING, "lmcache"), closing(open_l1(name, 1)) as l1:
        assert l1.recovered.objects == 0
    assert sum("L1 starts empty" in record.message for record in caplog.records) == 1


def test_a_lazy_l1_goes_on_growing(name: str) -> None:
    compatibility = RestartCompatibility(64 * MIB, 4096, 256, "blake3", bytes(32))
    small = L1Store.open(
        name,
        EPOCHS[0],
        L1Options(compatibility.capacity_bytes, policy="LRU", init_bytes=MIB, compatibility=compatibility),
    )
    put(small, keys(8))
    small.close()
    with closing(open_l1(name, 1, compatibility)) as l1:
        assert all(resident(l1, keys(8)))
        put(l1, keys(3000, seed=1))
        assert all(resident(l1, keys(8))) and l1.stats()["evicted_objects"] == 0


def test_many_objects_are_recovered_quickly(name: str) -> None:
    """The benchmark has the figure; this has ten times that."""
    compatibility = RestartCompatibility(256 * MIB, 4096, 256, "blake3", bytes(32))
    wanted = keys(20_000)
    with closing(open_l1(name, 0, compatibility)) as previous:
        put(previous, wanted)
    began = time.monotonic()
    with closing(open_l1(name, 1, compatibility)) as l1:
        seconds = time.monotonic() - began
        assert l1.recovered.objects == len(wanted)
        assert l1.core.touch(wanted[0].namespace.digest, b"".join(key.chunk_hash for key in wanted)) == len(wanted)
    assert seconds < 10.0
