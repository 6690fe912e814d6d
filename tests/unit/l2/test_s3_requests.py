"""The bodies of requests: lent memory, its bounds, its end."""

from __future__ import annotations

import io

import pytest

from lmcache.errors import AdapterError
from lmcache.l2.adapters.s3_requests import BufferReader, Download, Fault, Request, TooLongError
from lmcache.testing.frames import FrameMemory


def guarded() -> tuple[FrameMemory, Download]:
    """Memory of three slots, and a request that fills the second one."""
    memory = FrameMemory(3)
    for buffer in memory.buffers:
        buffer[:] = b"\xaa" * buffer.nbytes
    return memory, Download("/name", memory.buffers[1])


def is_untouched(memory: FrameMemory, *slots: int) -> bool:
    return all(bytes(memory.buffers[slot]) == b"\xaa" * memory.slot_bytes for slot in slots)


def test_a_download_fills_its_buffer_and_nothing_else() -> None:
    memory, download = guarded()
    half = memory.slot_bytes // 2
    download.on_headers(206, [("Content-Range", f"bytes 0-{memory.slot_bytes - 1}/99999")])
    download.on_body(b"1" * half, 0)
    download.on_body(b"2" * half, half)
    assert (download.received_bytes, download.object_bytes) == (memory.slot_bytes, 99999)
    assert bytes(memory.buffers[1]) == b"1" * half + b"2" * half and is_untouched(memory, 0, 2)
    with pytest.raises(TooLongError):
        download.on_body(b"3", memory.slot_bytes)
    assert is_untouched(memory, 0, 2)


@pytest.mark.parametrize("offset", [1, 4096, -1, 1 << 40])
def test_parts_out_of_order_are_no_sign_of_a_bad_object(offset: int) -> None:
    memory, download = guarded()
    with pytest.raises(AdapterError) as caught:
        download.on_body(b"x", offset)
    assert not isinstance(caught.value, TooLongError) and is_untouched(memory, 0, 1, 2)


def test_nothing_is_written_after_the_end() -> None:
    memory, download = guarded()
    download.ended(RuntimeError("cancelled"), 0, (), b"")
    with pytest.raises(AdapterError, match="nobody waits"):
        download.on_body(b"x" * 10, 0)
    assert is_untouched(memory, 0, 1, 2)
    assert download.fault == Fault(0, "RuntimeError") and download.fault.retryable


def test_small_answers_have_a_limit() -> None:
    request = Request("ListObjectsV2", "GET", "/bucket")
    request.on_body(b"abc", 0)
    with pytest.raises(TooLongError):
        request.on_body(bytes(9 << 20), 3)
    assert request.answer == b"abc"


def test_a_reader_is_a_file_until_it_is_closed() -> None:
    content = bytes(range(256)) * 64
    source, target = FrameMemory.of(content), bytearray(5000)
    reader, file = BufferReader(source), io.BytesIO(content)
    for offset, whence in ((0, io.SEEK_SET), (10, io.SEEK_CUR), (-3000, io.SEEK_END), (0, io.SEEK_END)):
        assert reader.seek(offset, whence) == file.seek(offset, whence)
        assert reader.read(100) == file.read(100)
        count = reader.readinto(memoryview(target))
        assert bytes(target[:count]) == file.read(5000)
    reader.seek(0)
    assert reader.read() == content
    reader.seek(0)
    reader.close()
    assert reader.readinto(memoryview(target)) == 0 and reader.read() == b""


def test_what_a_fault_says() -> None:
    throttled = Fault(503, "SlowDown", [("Retry-After", "1")])
    assert (str(throttled), throttled.retryable, throttled.throttled) == ("SlowDown (503)", True, True)
    assert throttled.header("retry-after") == "1" and throttled.header("date") == ""
    assert not Fault(403, "AccessDenied").retryable and not Fault(0, "TooLongError", too_long=True).retryable
