from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from lmcache import _native
from lmcache.core import limits


def test_constants_agree_with_the_python_ones() -> None:
    assert _native.NO_SLOT == 2**64 - 1
    assert _native.FRAME_HEADER_BYTES == limits.FRAME_HEADER_BYTES


def test_features_are_those_the_kernel_reports() -> None:
    features = _native.cpu_features()
    assert set(features) == {"avx2", "avx512f", "avx512bw", "vpclmulqdq", "sse42", "neon", "arm_crc32"}
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            break
    flag_of = {
        "avx2": "avx2",
        "avx512f": "avx512f",
        "avx512bw": "avx512bw",
        "vpclmulqdq": "vpclmulqdq",
        "sse42": "sse4_2",
        "neon": "asimd",
        "arm_crc32": "crc32",
    }
    assert features == {name: flag in flags for name, flag in flag_of.items()}


def test_the_copy_path_is_the_best_that_the_cpu_has() -> None:
    features = _native.cpu_features()
    if features["avx512f"]:
        expected = "clmul" if features["vpclmulqdq"] else "avx512"
    elif features["avx2"]:
        expected = "avx2"
    elif features["neon"] and features["arm_crc32"]:
        expected = "neon"
    else:
        expected = "portable"
    assert _native.copy_path() == expected


def test_prefault_keeps_content() -> None:
    with mmap.mmap(-1, 4 << 20) as memory:
        memory[5], memory[-1] = 7, 8
        _native.prefault(_native.buffer_address(memory), len(memory), 2, large_pages=True)
        assert memory[4:7] == b"\x00\x07\x00"
        assert memory[-1] == 8


def test_prefault_of_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        _native.prefault(4096, 4096, 1)  # page 1 is never mapped
    assert caught.value.errno in (errno.ENOMEM, errno.EFAULT)


def test_buffer_address_takes_any_contiguous_buffer() -> None:
    data = bytearray(100)
    whole = _native.buffer_address(data)
    assert _native.buffer_address(memoryview(data)[10:]) == whole + 10
    with pytest.raises(ValueError, match="contiguous"):
        _native.buffer_address(memoryview(data)[::2])
    with pytest.raises(ValueError, match="bytes-like"):
        _native.buffer_address("text")  # type: ignore[arg-type]
