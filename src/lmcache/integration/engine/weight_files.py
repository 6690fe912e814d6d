"""A sample of the files that a model, or an adapter of it, is in: names what its weights are.

No tensor is left out: of each a page is read, so that a model of which only some tensors were trained has another name.
How many bytes that is follows from the number of tensors and from the size of the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lmcache.core.limits import MAX_WEIGHT_FILES_READ_AT_ONCE
from lmcache.core.rounding import div_ceil

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PAGE_BYTES = 4096
_WHOLE_BYTES = 64 << 10  # files up to this are read whole
_TENSOR_STRIDE_BYTES = 8 << 20  # a page of each, at least one of a tensor
_FILE_STRIDE_BYTES = 1 << 20  # the same of a file of which it is not known where its tensors lie
_MAX_NAMES_BYTES = 100 << 20

_Range = tuple[int, int]  # of bytes in a file


class _Contents(NamedTuple):
    """`names`: where a file says which tensors it has."""

    names: _Range
    tensors: list[_Range]


def weights_sample(folder: Path) -> str:
    """Samples all weight files of a model, those of subfolders too."""
    return files_sample(
        path for pattern in _WEIGHT_FILES for path in (*folder.glob(pattern), *folder.glob("*/" + pattern))
    )


def files_sample(paths: Iterable[Path]) -> str:
    """Names, sizes and a page of every tensor: notices weights that were replaced in place, also if only some were."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(MAX_WEIGHT_FILES_READ_AT_ONCE, "lmcache-weights") as threads:
        for sample in threads.map(_file_sample, sorted(paths)):
            digest.update(sample)
    return digest.hexdigest()


def _file_sample(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        descriptor = file.fileno()
        # Without it the system would read what lies behind each page, too.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size_bytes = os.fstat(descriptor).st_size
        digest.update(f"{path.name} {size_bytes}".encode())
        for start, end in _sampled_ranges(file, path, size_bytes):
            digest.update(os.pread(descriptor, end - start, start))
    return digest.digest()


def _sampled_ranges(file: BinaryIO, path: Path, size_bytes: int) -> Iterator[_Range]:
    if size_bytes <= _WHOLE_BYTES:
        yield 0, size_bytes
        return
    contents = _safetensors(file, size_bytes) if path.suffix == ".safetensors" else _archive(file, size_bytes)
    if contents is None:
        yield from _pages(0, size_bytes, _FILE_STRIDE_BYTES)
        return
    yield contents.names
    for start, end in contents.tensors:
        yield from _pages(start, end, _TENSOR_STRIDE_BYTES)


def _pages(start: int, end: int, stride_bytes: int) -> Iterator[_Range]:
    """The page in the middle of each of the equal parts, of at most `stride_bytes`, that a range is cut into."""
    # Not where a tensor begins: the first rows of an embedding are those of tokens that training seldom sees.
    count = div_ceil(end - start, stride_bytes)
    for part in range(count):
        middle = start + (end - start) * (2 * part + 1) // (2 * count)
        first = max(start, middle - _PAGE_BYTES // 2)
        yield first, min(end, first + _PAGE_BYTES)


def _safetensors(file: BinaryIO, size_bytes: int) -> _Contents | None:
    """None when it is not one."""
    header_bytes = int.from_bytes(file.read(8), "little")
    data_start = 8 + header_bytes
    if not (2 <= header_bytes <= _MAX_NAMES_BYTES and data_start <= size_bytes):
        return None
    try:
        header = json.loads(file.read(header_bytes))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        tensors = sorted((data_start + int(start), data_start + int(end)) for start, end in offsets)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    if not all(data_start <= start <= end <= size_bytes for start, end in tensors):
        return None
    return _Contents((0, data_start), tensors)


def _archive(file: BinaryIO, size_bytes: int) -> _Contents | None:
    """What PyTorch saves: a ZIP archive with a file for each tensor. None when it is not one."""
    try:
        with zipfile.ZipFile(file) as archive:
            starts = sorted(entry.header_offset for entry in archive.infolist())
            directory_start = archive.start_dir
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
    if not starts or not starts[-1] < directory_start <= size_bytes <= directory_start + _MAX_NAMES_BYTES:
        return None
    return _Contents((directory_start, size_bytes), list(itertools.pairwise([*starts, directory_start])))
