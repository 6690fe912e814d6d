"""Writes the chunk hashes of lookups as JSON lines, for analysis and replay offline.

Files are `lookup_hashes_YYYYMMDD_HHMMSS_NNNNNN.jsonl`: UTC and microseconds of their beginning, so names sort by age.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lmcache.clock import Clock
from lmcache.core.folders import refuse_unwritable
from lmcache.core.key_batch import ChunkHashes
from lmcache.errors import ResourceError
from lmcache.telemetry.events import LookupEvent

logger = logging.getLogger("lmcache.telemetry")

_FILE_NAME = re.compile(r"lookup_hashes_\d{8}_\d{6}_\d{6}\.jsonl")


def refuse_unusable(folder: str) -> None:
    """ResourceError where `LookupHashLog(folder)` would raise it. Does not create the folder."""
    try:
        refuse_unwritable(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: str, error: OSError) -> ResourceError:
    return ResourceError(
        f"--lookup-hash-log-dir {folder} cannot be written: {error.strerror}; choose another folder or none."
    )


class LookupHashLog:
    """A subscriber of the event bus. Rotates by age and size, and keeps the newest `max_files` files."""

    name = "lookup_hash_log"

    def __init__(
        self, folder: str, *, rotation_seconds: float, rotation_bytes: int, max_files: int, clock: Clock
    ) -> None:
        """ResourceError when the folder cannot be created or written."""
        self._folder = Path(folder)
        self._rotation_seconds = rotation_seconds
        self._rotation_bytes = rotation_bytes
        self._max_files = max_files
        self._clock = clock
        self._file: int | None = None
        self._begun_seconds = 0.0
        self._size_bytes = 0
        self._failing = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._begin_file()
        except OSError as error:
            raise _unwritable(folder, error) from None

    def handle(self, events: Sequence[LookupEvent]) -> None:
        lines = b"".join(line_of(event) for event in events)
        try:
            self._rotate_if_due()
            self._write(lines)
        except OSError as error:
            self._cut()
            if not self._failing:
                self._failing = True
                logger.error(
                    "Lookup log: %s cannot be written (%s); lookups go unrecorded", self._folder, error.strerror
                )
            return
        if self._failing:
            self._failing = False
            logger.info("Lookup log: %s can be written again", self._folder)

    def _cut(self) -> None:
        """Takes back what was written of the lines that failed. The file goes on: a new one for every try would push
        all that was recorded out of the newest `max_files`."""
        try:
            if self._file is not None:
                os.ftruncate(self._file, self._size_bytes)
        except OSError:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _rotate_if_due(self) -> None:
        too_old = self._clock.wall() - self._begun_seconds >= self._rotation_seconds
        if self._file is None or (self._size_bytes and (too_old or self._size_bytes >= self._rotation_bytes)):
            self.close()
            self._begin_file()

    def _begin_file(self) -> None:
        self._begun_seconds = self._clock.wall()
        begun = datetime.fromtimestamp(self._begun_seconds, timezone.utc)
        path = self._folder / f"lookup_hashes_{begun:%Y%m%d_%H%M%S_%f}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._file).st_size
        self._remove_oldest()

    def _write(self, lines: bytes) -> None:
        assert self._file is not None
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size_bytes += len(lines)

    def _remove_oldest(self) -> None:
        names = sorted(name for name in os.listdir(self._folder) if _FILE_NAME.fullmatch(name))
        for name in names[: -self._max_files]:
            (self._folder / name).unlink(missing_ok=True)


def line_of(event: LookupEvent) -> bytes:
    """The event as one line of JSON."""
    record: dict[str, Any] = {
        "timestamp": event.wall_seconds,
        "request_id": event.request_id,
        "model_name": event.model_name,
        "chunk_size": event.chunk_tokens,
        "seq_len": event.total_tokens,
        "dtypes": [dtype for dtype, _ in event.tensors],
        "shapes": [shape for _, shape in event.tensors],
        "chunk_hashes": ["0x" + chunk_hash.hex() for chunk_hash in ChunkHashes(event.chunk_hashes)],
        "hit_chunks": event.hit_chunks,
        "cache_salt": event.cache_salt,
    }
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
