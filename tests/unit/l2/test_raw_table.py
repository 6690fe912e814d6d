"""Metadata pages in order."""

from __future__ import annotations

import asyncio
import errno
from array import array
from collections.abc import Sequence
from typing import cast

import pytest

from lmcache.l2.adapters import raw_table
from lmcache.l2.adapters.raw_table import OrderedPages
from lmcache.l2.completions import IoResults
from lmcache.l2.native_device import NativeDevice


class FakeDevice:
    """Records what is written; `errors` are the outcomes to come, then everything succeeds."""

    def __init__(self, errors: Sequence[int] = ()) -> None:
        self.written: list[list[tuple[int, bytes]]] = []
        self.errors = list(errors)

    async def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> IoResults:
        await asyncio.sleep(0)
        error = self.errors.pop(0) if self.errors else 0
        if not error:
            self.written.append([(offset, bytes(buffer)) for offset, buffer in zip(offsets, buffers, strict=True)])
        count = len(offsets)
        return IoResults(memoryview(array("q", [0] * count)), memoryview(array("i", [error] * count)))


def pages_on(device: FakeDevice) -> OrderedPages:
    return OrderedPages(cast(NativeDevice, device), 4096, "test")


def test_pages_are_written_in_order_and_then_said() -> None:
    async def test() -> None:
        device = FakeDevice()
        pages = pages_on(device)
        said: list[int] = []
        for number in range(5):
            last = pages.put([(number, bytes([number]) * 4096)], lambda number=number: said.append(number))
        assert await last and said == list(range(5))
        assert [step[0][0] for step in device.written] == list(range(5))
        many = [(number, bytes(4096)) for number in range(600)]
        assert await pages.put(many)
        assert [len(step) for step in device.written[5:]] == [256, 256, 88]
        assert await pages.close(1)

    asyncio.run(test())


def test_pages_that_follow_each_other_are_one_transfer() -> None:
    async def test() -> None:
        device = FakeDevice()
        pages = pages_on(device)
        said: list[int] = []

        def put(page: int, content: int) -> asyncio.Future[bool]:
            where = (page * 4096, bytes([content]) * 4096)
            return pages.put([where], lambda: said.append(content))

        for content, page in enumerate((1, 1, 2, 2, 3, 2, 7)):
            last = put(page, content)
        assert await last and said == list(range(7))
        written = [(offset // 4096, content[::4096]) for step in device.written for offset, content in step]
        assert written == [(1, bytes([1, 3, 4])), (2, bytes([5])), (7, bytes([6]))]
        assert await pages.close(1)

    asyncio.run(test())


def test_a_page_that_fails_is_tried_again_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_table, "RETRY_SECONDS", 0.001)

    async def test() -> None:
        device = FakeDevice([errno.EIO, errno.EIO])
        pages = pages_on(device)
        said: list[str] = []
        first = pages.put([(0, bytes(4096))], lambda: said.append("first"))
        second = pages.put([(1, bytes(4096))])
        assert await first is False and said == []
        assert await second is True and said == ["first"]
        assert [step[0][0] for step in device.written] == [0, 1] and pages.faults == 2
        assert await pages.close(1)

    asyncio.run(test())


def test_closing_does_not_wait_for_ever() -> None:
    async def test() -> None:
        pages = pages_on(FakeDevice([errno.EIO] * 1000))
        assert await pages.put([(0, bytes(4096))]) is False
        assert not await pages.close(0.01)

    asyncio.run(test())
