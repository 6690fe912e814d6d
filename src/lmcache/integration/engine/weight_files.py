"""A sample of the files that a model, or an adapter of it, is in: names what its weights are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from lmcache.core.rounding import div_ceil

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PAGE_BYTES = 4096
_PAGES = 8192  # of one model
_LEAST_PAGES_PER_FILE = 16
_STRIDE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100 << 20


def weights_sample(folder: Path) -> str:
    """Of all weight files of a model, those of subfolders too."""
    return files_sample(
        path for pattern in _WEIGHT_FILES for path in (*folder.glob(pattern), *folder.glob("*/" + pattern))
    )


def files_sample(paths: Iterable[Path]) -> str:
    """Names, sizes and a page of every tensor: notices weights that were replaced in place, also if only some were."""
    digest = hashlib.sha256()
    files = sorted(paths)
    pages = max(_LEAST_PAGES_PER_FILE, _PAGES // max(1, len(files)))
    for path in files:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size_bytes}".encode())
            for offset in _sampled_offsets(file, path, size_bytes, pages):
                file.seek(offset)
                digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()


def _sampled_offsets(file: BinaryIO, path: Path, size_bytes: int, pages: int) -> Iterator[int]:
    count = min(pages, max(_LEAST_PAGES_PER_FILE, size_bytes // _STRIDE_BYTES))
    yield from (size_bytes * page // count for page in range(count))
    if path.suffix == ".safetensors":
        tensors = _tensors(file, size_bytes)
        step = div_ceil(len(tensors), pages) if tensors else 1
        # Not where a tensor begins: the first rows of an embedding are those of tokens that training seldom sees.
        yield from (max(start, (start + end - _PAGE_BYTES) // 2) for start, end in tensors[::step])


def _tensors(file: BinaryIO, size_bytes: int) -> list[tuple[int, int]]:
    """Where each tensor lies in a safetensors file; none when it is not one."""
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(file.read(header_bytes))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        places = sorted((8 + header_bytes + int(start), 8 + header_bytes + int(end)) for start, end in offsets)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return [(start, end) for start, end in places if start < end <= size_bytes]
