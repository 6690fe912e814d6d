"""What a search of Redis found, in columns, and the names of its namespaces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lmcache.clock import Clock, wall_ns
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, ObjectKey, UnnamedNamespace
from lmcache.core.limits import (
    FRAME_HEADER_BYTES,
    MAX_L2_LISTED_NAMESPACES,
    MAX_L2_LISTED_OBJECTS,
    MAX_L2_LISTED_PAGES,
)
from lmcache.errors import AdapterError
from lmcache.l2.adapters.remote_names import RemoteNames, identify_namespace
from lmcache.l2.adapters.scan_order import FoundObjects
from lmcache.l2.native_resp import NativeResp, Page

MAX_TRIES = 64  # objects of a namespace that are asked for its name
MANIFEST_BYTES = 64
_MAGIC = b"LMCPARTS"
_WRITE_ID = slice(32, 48)


class ScanCursor:
    """Where one SCAN of a server is. A server without fault names each cursor once, and 0 as the last."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._pages = 0
        self._seen = 0  # the cursor of the last page whose number is a power of two (Brent's search for a cycle)
        self.next = 0
        self.ended = False

    def follow(self, cursor: int) -> None:
        """AdapterError where the cursors go round, or do not end."""
        self._pages += 1
        self.next, self.ended = cursor, cursor == 0
        if self.ended:
            return
        if cursor == self._seen:
            raise AdapterError(f"{self._server} answers SCAN with the cursor {cursor} again, which would never end")
        if self._pages >= MAX_L2_LISTED_PAGES:
            raise AdapterError(f"{self._server} answers SCAN without an end: it was left after {self._pages} pages")
        if self._pages & (self._pages - 1) == 0:
            self._seen = cursor


class Objects(FoundObjects):
    """In the order in which they were found. An object may be found twice."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.digests: dict[bytes, int] = {}  # of namespaces, and their positions
        self.first: list[list[bytes]] = []  # of each namespace the first hashes, at most MAX_TRIES

    def add(self, page: Page) -> bool:
        """False when no more are taken. Those of too many namespaces are left out: each is asked for its name."""
        now_ns = wall_ns(self._clock)
        keys, half = page.keys, CHUNK_HASH_BYTES
        for row, start in enumerate(range(0, len(keys), 2 * half)):
            digest, chunk_hash = keys[start : start + half], keys[start + half : start + 2 * half]
            position = self.digests.get(digest)
            if position is None:
                if len(self.first) >= MAX_L2_LISTED_NAMESPACES:
                    continue
                position = self.digests[digest] = len(self.first)
                self.first.append([])
            if len(self.first[position]) < MAX_TRIES:
                self.first[position].append(chunk_hash)
            self.append(position, chunk_hash, page.sizes[row], now_ns - page.idle_seconds[row] * 10**9)
        return len(self.positions) < MAX_L2_LISTED_OBJECTS

    def youngest_first(self, namespaces: Sequence[Namespace]) -> array[int]:
        """Their rows in the order that an inventory wants."""
        return self.order_rows(
            {at for at, namespace in enumerate(namespaces) if isinstance(namespace, UnnamedNamespace)}
        )


async def namespaces_of(objects: Objects, client: NativeResp, prefix: str) -> list[Namespace]:
    """By their positions."""
    names = RemoteNames(prefix)
    found: list[Namespace] = []
    for digest, hashes in zip(objects.digests, objects.first, strict=True):
        unnamed: Namespace = UnnamedNamespace.of(digest)
        found.append(unnamed)
        for chunk_hash in hashes:
            beginning = await _beginning(client, names, ObjectKey(unnamed, chunk_hash))
            namespace = identify_namespace(beginning, digest)
            if namespace is not None:
                found[-1] = namespace
                break
    return found


async def _beginning(client: NativeResp, names: RemoteNames, key: ObjectKey) -> bytes:
    """The first bytes of a frame; those of its first part, where it is stored in parts."""
    (name,) = names.names([key])
    beginning = await _get_range(client, name)
    if len(beginning) != MANIFEST_BYTES or not beginning.startswith(_MAGIC):
        return beginning
    parts = f"{names.prefix}/v1-parts/{key.namespace.digest.hex()}/{key.chunk_hash.hex()}"
    return await _get_range(client, f"{parts}/{beginning[_WRITE_ID].hex()}/0")


async def _get_range(client: NativeResp, name: str) -> bytes:
    """b"" where there is none."""
    answer = await client.command([b"GETRANGE", name.encode(), b"0", str(FRAME_HEADER_BYTES - 1).encode()])
    return answer.reply if isinstance(answer.reply, bytes) else b""
