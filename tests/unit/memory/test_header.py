from __future__ import annotations

import pytest

from lmcache.memory.header import HEADER_BYTES, MAGIC, Header, is_ours

EPOCH = bytes(range(16))


def test_header_page_is_pinned() -> None:
    page = Header(size_bytes=0x123456789000, server_epoch=EPOCH, pid=77).pack()
    assert len(page) == HEADER_BYTES
    fields = [
        "4c4d432d4c310d0a",  # magic
        "01000000",  # version
        "00100000",  # header bytes
        "0090785634120000",  # file size
        "000102030405060708090a0b0c0d0e0f",  # server epoch
        "4d00000000000000",  # process id
        "6f491b6f",  # checksum
        "00000000",
    ]
    assert page[:56].hex() == "".join(fields)
    assert Header.unpack(page) == Header(0x123456789000, EPOCH, 77)


@pytest.mark.parametrize("position", [0, 8, 12, 16, 24, 40, 48])
def test_any_changed_field_is_noticed(position: int) -> None:
    page = bytearray(Header(size_bytes=1 << 30, server_epoch=EPOCH, pid=1).pack())
    page[position] ^= 1
    assert Header.unpack(bytes(page)) is None


def test_short_or_foreign_pages_are_no_header() -> None:
    assert Header.unpack(b"") is None
    assert Header.unpack(bytes(HEADER_BYTES)) is None
    assert not is_ours(bytes(HEADER_BYTES))
    assert is_ours(MAGIC + b"some later version")
