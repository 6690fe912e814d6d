"""The page that a server leaves to the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcache.core.limits import MIB
from lmcache.memory.restart_compatibility import PAGE_BYTES, RestartCompatibility

COMPATIBILITY = RestartCompatibility(64 * MIB, 4096, 256, "blake3", bytes(range(32)))


def page_of(compatibility: RestartCompatibility) -> bytes:
    return compatibility.pack().ljust(PAGE_BYTES, b"\0")


def test_the_page_is_pinned() -> None:
    fields = [
        "4c4d432d4c31540a",  # magic
        "01000000",  # version
        "01000000",  # version of frames
        "0000000400000000",  # capacity
        "0010000000000000",  # alignment
        "00010000",  # tokens of a chunk
        "00000000",
        "626c616b653300000000000000000000",  # algorithm
        bytes(range(32)).hex(),  # sample
        "aafde71a",  # checksum
    ]
    assert COMPATIBILITY.pack().hex() == "".join(fields)
    assert COMPATIBILITY.difference(page_of(COMPATIBILITY)) == ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(COMPATIBILITY, capacity_bytes=128 * MIB), "it is an L1 of 128 MiB, not of 64"),
        (replace(COMPATIBILITY, align_bytes=8192), "its objects are aligned to 8192 bytes, not to 4096"),
        (replace(COMPATIBILITY, chunk_tokens=128), "its chunks have 128 tokens, not 256"),
        (replace(COMPATIBILITY, hash_algorithm="builtin"), "its chunks are named by builtin, not by blake3"),
        (
            replace(COMPATIBILITY, hash_sample=bytes(32)),
            "blake3 named its chunks differently (another PYTHONHASHSEED?)",
        ),
    ],
)
def test_what_differs_is_named(other: RestartCompatibility, reason: str) -> None:
    assert COMPATIBILITY.difference(page_of(other)) == reason


def test_damage_and_other_formats_are_distinguished() -> None:
    page = bytearray(page_of(COMPATIBILITY))
    page[20] ^= 1
    assert COMPATIBILITY.difference(bytes(page)) == "its description is damaged"
    assert COMPATIBILITY.difference(bytes(PAGE_BYTES)) == "it was not made with --l1-persist"
    assert COMPATIBILITY.difference(b"") == "it was not made with --l1-persist"


@pytest.mark.parametrize(
    ("capacity", "align", "offset"), [(8192, 4096, 12288), (64 * MIB, 4096, 8192 + 131072), (64 * MIB, MIB, MIB)]
)
def test_slots_begin_behind_the_table(capacity: int, align: int, offset: int) -> None:
    assert replace(COMPATIBILITY, capacity_bytes=capacity, align_bytes=align).first_offset == offset
