"""An L2 backend of many objects that takes no room: it announces their names as a search of a disk would, and makes the
frames of the few prompts that are asked for."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Sequence

from lmcache import _native
from lmcache.core.chunking import ChunkHasher
from lmcache.core.frame import header_template
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter, Capacity, Inventory, ObjectColumns
from lmcache.protocol.tokens import pack_tokens

CHUNK_TOKENS = 16
PROMPT_CHUNKS = 500
PAYLOAD_BYTES = 4096
FRAME_BYTES = 2 * PAYLOAD_BYTES
NAMESPACE = Namespace("bench", 1, 0, 0, "0" * 32)
SLICE_OBJECTS = 4096


def prompt(number: int, chunks: int = PROMPT_CHUNKS) -> bytes:
    """Packed tokens of a prompt, no chunk of which another one has."""
    return pack_tokens([number] + [7] * (chunks * CHUNK_TOKENS - 1))


def hashes_of(number: int) -> bytes:
    hasher = ChunkHasher("blake3", CHUNK_TOKENS)
    return hasher.extend(hasher.root(b""), prompt(number))


class AnnouncingAdapter(Adapter):
    def __init__(self, objects: int, prompts: int) -> None:
        """The youngest of `objects` are the chunks of the prompts 0 to `prompts` - 1."""
        self._objects = objects
        self._asked = b"".join(map(hashes_of, range(prompts)))
        starts = range(0, len(self._asked), CHUNK_HASH_BYTES)
        self._known = {self._asked[start : start + CHUNK_HASH_BYTES] for start in starts}
        self._search: asyncio.Task[None] | None = None

    @property
    def capacity(self) -> Capacity:
        return Capacity(2 * self._objects * FRAME_BYTES, 4096)

    async def open(self, inventory: Inventory) -> None:
        self._search = asyncio.create_task(self._announce(inventory))

    async def _announce(self, inventory: Inventory) -> None:
        asked, announced = self._asked, 0
        while announced < self._objects:
            count = min(SLICE_OBJECTS, self._objects - announced)
            youngest, asked = asked[: count * CHUNK_HASH_BYTES], asked[count * CHUNK_HASH_BYTES :]
            hashes = youngest + os.urandom(count * CHUNK_HASH_BYTES - len(youngest))
            sizes, rows = array("Q", [FRAME_BYTES]) * count, array("I", range(count))
            inventory.found(ObjectColumns([NAMESPACE], array("I", [0]) * count, hashes, sizes, rows))
            announced += count
            await asyncio.sleep(0)
        inventory.complete()

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        return [StoreOutcome.FULL] * len(keys)

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        template = header_template(NAMESPACE, PAYLOAD_BYTES)
        held = [key.namespace == NAMESPACE and key.chunk_hash in self._known for key in keys]
        for key, buffer, known in zip(keys, buffers, held, strict=True):
            if known:
                _native.frame_seal(_native.buffer_address(buffer), template, key.chunk_hash)
        return [LoadOutcome.LOADED if known else LoadOutcome.MISSING for known in held]

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [FRAME_BYTES if key.chunk_hash in self._known else None for key in keys]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        return [True] * len(keys)

    async def clear(self) -> tuple[int, int]:
        return 0, 0

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
