"""The native file threads as coroutines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache import _native
from lmcache.core.key import ObjectKey
from lmcache.l2.completions import Completions, IoResults, ranges


class FileMover(Protocol):
    """What moves the files of a folder. The results of a batch are element for element."""

    @property
    def buffered_fallbacks(self) -> int:
        """Transfers through the page cache although O_DIRECT was asked for."""
        ...

    async def write(
        self, paths: Sequence[str], temporary_paths: Sequence[str], buffers: Sequence[memoryview]
    ) -> IoResults:
        """Publishes files in order and ends at the first that fails, so that what is there is a prefix."""
        ...

    async def read_frames(self, base: str, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> IoResults: ...

    async def stat(self, paths: Sequence[str]) -> IoResults: ...

    async def unlink(self, paths: Sequence[str]) -> IoResults: ...

    async def remove_empty(self, folders: Sequence[str]) -> IoResults: ...

    async def close(self) -> None: ...


class NativeFiles:
    """Construct on the loop that uses it. `queue_depth` above 0: io_uring moves the content (OSError where it is
    refused), the threads do the rest."""

    def __init__(
        self, threads: int, *, use_odirect: bool, block_bytes: int, read_ahead_bytes: int = 0, queue_depth: int = 0
    ) -> None:
        self._io = _native.FileIO(threads, use_odirect, block_bytes, read_ahead_bytes, queue_depth)
        self._completions = Completions(self._io, IoResults)

    @property
    def buffered_fallbacks(self) -> int:
        return self._io.buffered_fallbacks()

    async def write(
        self, paths: Sequence[str], temporary_paths: Sequence[str], buffers: Sequence[memoryview]
    ) -> IoResults:
        addresses, sizes = ranges(buffers)
        return await self._completions.wait(self._io.submit_write(paths, temporary_paths, addresses, sizes))

    async def read_frames(self, base: str, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> IoResults:
        """Reads frames of the folder `base`. EBADMSG where a file is not the whole frame of its key."""
        names = b"".join([namespace.digest + chunk_hash for namespace, chunk_hash in keys])
        return await self._completions.wait(self._io.submit_read_frames(base, list(buffers), names))

    async def stat(self, paths: Sequence[str]) -> IoResults:
        return await self._completions.wait(self._io.submit_stat(paths))

    async def unlink(self, paths: Sequence[str]) -> IoResults:
        return await self._completions.wait(self._io.submit_unlink(paths))

    async def remove_empty(self, folders: Sequence[str]) -> IoResults:
        """And the folder above each, where that is empty then."""
        return await self._completions.wait(self._io.submit_remove_empty(folders))

    async def close(self) -> None:
        """Waits for everything submitted. Idempotent."""
        await self._completions.close()
