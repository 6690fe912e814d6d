from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache import _native
from lmcache.memory.mapping import map_shared

_SIZE_BYTES = 4 << 20
_ALIGN_BYTES = 2 << 20
_MAP_SHARED_VALIDATE = 0x03
_MAP_SYNC = 0x80000

_THREADS_THAT_MAP = f"""
import mmap, os, sys, threading, time
from lmcache.memory.mapping import map_shared

file = os.open(sys.argv[1], os.O_RDWR)
end = time.monotonic() + 2
refused = 0

def map_and_fail():
    global refused
    while time.monotonic() < end:
        try:
            map_shared(file, {_SIZE_BYTES}, {_ALIGN_BYTES}, {_MAP_SHARED_VALIDATE | _MAP_SYNC})
        except OSError:
            refused += 1

def map_and_use():
    while time.monotonic() < end:
        with mmap.mmap(-1, {_SIZE_BYTES}) as memory:
            memory[0] = memory[{_SIZE_BYTES - 1}] = 1

threads = [threading.Thread(target=work) for work in (map_and_fail, map_and_use, map_and_use)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert refused > 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    with path.open("wb") as opened:
        opened.truncate(_SIZE_BYTES)
    return path


@pytest.mark.parametrize("size_bytes", [4096, 5000, _SIZE_BYTES])
def test_a_mapping_is_aligned_shared_and_ends_with_its_last_view(file: Path, size_bytes: int) -> None:
    descriptor = os.open(file, os.O_RDWR)
    mapped = map_shared(descriptor, size_bytes, _ALIGN_BYTES)
    os.close(descriptor)
    address = _native.buffer_address(mapped)
    assert (address % _ALIGN_BYTES, len(mapped)) == (0, size_bytes)
    mapped[size_bytes - 1] = 7
    assert file.read_bytes()[size_bytes - 1] == 7
    assert _is_mapped(address)
    mapped.release()
    assert not _is_mapped(address)


def test_a_mapping_that_fails_takes_no_memory_of_other_threads(file: Path) -> None:
    """Files of disks refuse MAP_SYNC after the kernel has looked at the addresses."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        map_shared(descriptor, _SIZE_BYTES, _ALIGN_BYTES, _MAP_SHARED_VALIDATE | _MAP_SYNC).release()
    except OSError:
        pass
    else:
        pytest.skip("files here can be mapped with MAP_SYNC")
    finally:
        os.close(descriptor)
    ended = subprocess.run([sys.executable, "-c", _THREADS_THAT_MAP, str(file)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def _is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.startswith(f"{address:x}-") for line in lines)
