"""Packed hashes, batches of keys and their slots."""

from __future__ import annotations

import pickle
import random
import struct

import pytest

from lmcache._native import NO_SLOT
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import NO_SLOTS, ChunkHashes, KeyBatch, NamespaceSet, SlotGrid, pack_keys
from lmcache.testing.frames import namespace

HASHES = [bytes([number]) * 32 for number in range(5)]
PACKED = ChunkHashes(b"".join(HASHES))
NAMESPACES = NamespaceSet((namespace("a"), namespace("b")), (4096, 8192), (0, 2))


def grid(rows: list[list[int]]) -> SlotGrid:
    packed = b"".join(struct.pack(f"<{len(row)}Q", *row) for row in rows)
    return SlotGrid(packed, len(rows[0]))


def test_hashes_are_a_sequence_whose_slices_are_packed() -> None:
    assert list(PACKED) == HASHES and len(PACKED) == 5
    assert PACKED[1:3] == ChunkHashes(HASHES[1] + HASHES[2])
    assert (PACKED[0], PACKED[-1], PACKED[7:]) == (HASHES[0], HASHES[4], ChunkHashes())
    assert pickle.loads(pickle.dumps(PACKED)) == PACKED
    for index in (5, -6):
        with pytest.raises(IndexError, match="among 5"):
            PACKED[index]
    with pytest.raises(ValueError, match="32 bytes each"):
        ChunkHashes(bytes(33))
    with pytest.raises(ValueError, match="step"):
        PACKED[::2]


def test_a_batch_names_every_object_of_its_namespaces_and_chunks() -> None:
    batch = KeyBatch(NAMESPACES, PACKED)
    assert (batch.chunks, batch.objects, batch[1:3].objects) == (5, 10, 4)
    assert batch[1:3].key(1, 0) == ObjectKey(namespace("b"), HASHES[1])
    assert NAMESPACES.digests == namespace("a").digest + namespace("b").digest
    assert struct.unpack("<2Q", NAMESPACES.sizes) == (4096, 8192)
    assert struct.unpack("<2I", NAMESPACES.tails) == (0, 2)


def test_a_tail_needs_the_end_of_a_prefix_only() -> None:
    assert [NAMESPACES.first_needed(1, chunks) for chunks in (1, 2, 4)] == [0, 0, 2]
    assert NAMESPACES.first_needed(0, 4) == 0
    assert NamespaceSet(NAMESPACES.namespaces, NAMESPACES.frame_bytes).first_needed(1, 4) == 0


def test_slots_are_found_by_namespace_and_chunk() -> None:
    slots = grid([[1, 2, NO_SLOT], [4, NO_SLOT, 6]])
    assert (slots.namespaces, slots.chunks, slots[0, 1], slots[1, 2]) == (2, 3, 2, 6)
    assert list(slots.places()) == [(0, 0), (0, 1), (1, 0), (1, 2)]
    assert struct.unpack("<2Q", slots.row(1, 0, 2)) == (4, NO_SLOT)
    for place in ((0, 3), (2, 0), (-1, 0), (0, -1)):
        with pytest.raises(IndexError):
            slots[place]
    with pytest.raises(ValueError, match="not rows of 3 slots"):
        SlotGrid(bytes(40), 3)


def test_joined_grids_are_one_behind_the_other() -> None:
    dice = random.Random(1)
    for _ in range(200):
        namespaces, first, second = dice.randint(1, 4), dice.randint(0, 5), dice.randint(0, 5)
        rows = [[dice.randrange(1 << 40) for _ in range(first + second)] for _ in range(namespaces)]
        parts = [
            grid([row[:first] for row in rows]) if first else NO_SLOTS,
            grid([row[first:] for row in rows]) if second else NO_SLOTS,
        ]
        joined = parts[0].followed_by(parts[1])
        assert joined.packed == (grid(rows).packed if first + second else b"")
        assert joined.chunks == first + second


def test_keys_are_packed_pair_by_pair() -> None:
    keys = [ObjectKey(namespace("a"), HASHES[3]), ObjectKey(namespace("b"), HASHES[0])]
    assert pack_keys(iter(keys)) == (NAMESPACES.digests, HASHES[3] + HASHES[0])
