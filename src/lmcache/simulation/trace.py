"""Lookups as `--lookup-hash-log-dir` writes them, read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_OBJECT_BYTES, MAX_TOKENS_PER_SESSION, MAX_WORLD_SIZE
from lmcache.errors import ConfigError, ResourceError
from lmcache.telemetry.events import LookupEvent
from lmcache.telemetry.lookup_log import line_of

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class Lookup:
    """One logged lookup. `chunk_bytes` is what a chunk takes on all ranks, 0 where the log does not say."""

    seconds: float
    model_name: str
    cache_salt: str
    chunk_tokens: int
    hashes: bytes  # 32 a full chunk
    chunk_bytes: int = 0
    hit_chunks: int = 0  # that the server answered with

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES


def read_trace(paths: Iterable[str]) -> list[Lookup]:
    """Every lookup of the files and of the .jsonl files of the folders, in the order of time. ConfigError names what
    cannot be read; a last line that is cut off is left out."""
    lookups = [lookup for path in paths for file in _files(path) for lookup in _read(file)]
    lookups.sort(key=lambda lookup: lookup.seconds)
    return lookups


def write_trace(path: str, lookups: Iterable[Lookup]) -> None:
    """In the format of the lookup log. ResourceError when the file cannot be written."""
    try:
        with open(path, "wb") as file:
            for number, lookup in enumerate(lookups):
                event = LookupEvent(
                    wall_seconds=lookup.seconds,
                    request_id=f"r{number}",
                    model_name=lookup.model_name,
                    chunk_tokens=lookup.chunk_tokens,
                    total_tokens=lookup.chunks * lookup.chunk_tokens,
                    chunk_hashes=lookup.hashes,
                    hit_chunks=lookup.hit_chunks,
                    cache_salt=lookup.cache_salt,
                    tensors=(("uint8", [lookup.chunk_bytes]),) if lookup.chunk_bytes else (),
                )
                file.write(line_of(event))
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}.") from None


def _files(path: str) -> list[Path]:
    where = Path(path)
    if not where.exists():
        raise ConfigError(f"{path} does not exist; give a file or folder that --lookup-hash-log-dir has written.")
    files = sorted(where.glob("*.jsonl")) if where.is_dir() else [where]
    if not files:
        raise ConfigError(f"{path} has no .jsonl file; give a folder that --lookup-hash-log-dir has written.")
    return files


def _read(file: Path) -> Iterator[Lookup]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # the server is still writing it, or was killed while it did
            try:
                yield _lookup(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise ConfigError(f"{file} line {number} is no lookup ({type(error).__name__}: {error}).") from None


def _lookup(record: dict[str, Any]) -> Lookup:
    hashes = b"".join(
        bytes.fromhex(text.removeprefix("0x")).rjust(CHUNK_HASH_BYTES, b"\0") for text in record["chunk_hashes"]
    )
    if len(hashes) != CHUNK_HASH_BYTES * len(record["chunk_hashes"]):
        raise ValueError("a chunk hash is longer than 32 bytes")
    lookup = Lookup(
        float(record["timestamp"]),
        str(record["model_name"]),
        str(record.get("cache_salt", "")),
        int(record["chunk_size"]),
        hashes,
        chunk_bytes(record.get("dtypes") or [], record.get("shapes") or []),
        int(record.get("hit_chunks", 0)),
    )
    _check(lookup)
    return lookup


def _check(lookup: Lookup) -> None:
    """ValueError for what no server has logged. Files may come from elsewhere, and a replay does what they say."""
    (lookup.model_name + lookup.cache_salt).encode()
    if not math.isfinite(lookup.seconds):
        raise ValueError("the timestamp is no number of seconds")
    for subject, number, least, most in (
        ("chunk_size", lookup.chunk_tokens, 1, MAX_TOKENS_PER_SESSION),
        ("the size of a chunk", lookup.chunk_bytes, 0, MAX_OBJECT_BYTES * MAX_WORLD_SIZE),
        ("hit_chunks", lookup.hit_chunks, 0, lookup.chunks),
    ):
        if not least <= number <= most:
            raise ValueError(f"{subject} is {number}, and must be from {least} to {most}")


def chunk_bytes(dtypes: list[str], shapes: list[list[int]]) -> int:
    """Bytes of one chunk over the tensors that the log names, 0 when it names none or one of unknown size."""
    if not dtypes or len(dtypes) != len(shapes):
        return 0
    sizes = [
        _DTYPE_BYTES.get(dtype.removeprefix("torch."), 0) * math.prod(shape)
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]
    return sum(sizes) if all(sizes) else 0
