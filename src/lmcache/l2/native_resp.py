"""The native client of Redis' protocol as coroutines."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from lmcache import _native
from lmcache.core.key import ObjectKey
from lmcache.l2.completions import Completions, IoResults

# Texts are bytes, an error of the server is a str.
Reply: TypeAlias = "None | int | bytes | str | list[Reply]"
Address = tuple[str, int]  # a host that begins with "/" is the path of a Unix socket
SlotRange = tuple[int, int, int]  # first and last slot, both included, position among the addresses


class Page(NamedTuple):
    """Some objects of one server, in columns. `cursor` 0: there are no more."""

    cursor: int
    keys: bytes  # 64 an object: the digest of its namespace, its chunk hash
    sizes: memoryview  # u64
    idle_seconds: memoryview  # u64


class Answer(NamedTuple):
    """`error`: an errno where no server answered."""

    error: int
    reply: Reply


class _Detailed(NamedTuple):
    values: memoryview
    errors: memoryview
    detail: object


class NativeResp:
    """Construct on the loop that uses it."""

    def __init__(self, client: _native.RespClient) -> None:
        self._client = client
        self._completions = Completions(client, _Detailed)

    @property
    def changes(self) -> int:
        """Number of failed attempts to connect, redirects and refused writes: which servers there are may have
        changed."""
        return self._client.changes()

    @property
    def connections(self) -> int:
        """Made so far."""
        return self._client.connections()

    @property
    def last_error(self) -> str:
        """What a server or a connection said last."""
        return self._client.last_error()

    def assign_nodes(self, addresses: Sequence[Address], slots: Sequence[SlotRange]) -> None:
        self._client.assign_nodes(list(addresses), list(slots))

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> IoResults:
        job = self._client.submit_store(pack(keys), list(buffers))
        return _io(await self._completions.wait(job, buffers))

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> IoResults:
        job = self._client.submit_load(pack(keys), list(buffers))
        return _io(await self._completions.wait(job, buffers))

    async def sizes(self, keys: Sequence[ObjectKey]) -> IoResults:
        return _io(await self._completions.wait(self._client.submit_sizes(pack(keys))))

    async def delete(self, packed_keys: bytes) -> IoResults:
        """Values: 1 where there was one."""
        return _io(await self._completions.wait(self._client.submit_delete(packed_keys)))

    async def scan(self, node: int, cursor: int) -> Page | int:
        """Scans the server at that position; an errno where it does not answer."""
        ended = await self._completions.wait(self._client.submit_scan(node, cursor))
        return ended.errors[0] or _page(ended.detail)

    async def sweep_parts(self, node: int, cursor: int) -> Page | int:
        """Deletes parts; those of whole objects too."""
        ended = await self._completions.wait(self._client.submit_sweep_parts(node, cursor))
        return ended.errors[0] or _page(ended.detail)

    async def sweep_orphans(self, node: int, cursor: int) -> tuple[Page | int, int]:
        """Deletes parts that belong to no object; how many."""
        ended = await self._completions.wait(self._client.submit_sweep_orphans(node, cursor))
        return ended.errors[0] or _page(ended.detail), ended.values[0]

    async def command(self, arguments: Sequence[bytes], node: int | None = None) -> Answer:
        """To the server at that position, or to the one that has the name which is the first argument."""
        ended = await self._completions.wait(self._client.submit_command(list(arguments), node))
        return Answer(ended.errors[0], ended.detail)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""
        await self._completions.close()


def pack(keys: Sequence[ObjectKey]) -> bytes:
    return b"".join([namespace.digest + chunk_hash for namespace, chunk_hash in keys])


def ask(client: _native.RespClient, arguments: Sequence[bytes], node: int, timeout_seconds: float) -> Answer:
    """Without a loop; blocks."""
    ended = client.wait(client.submit_command(list(arguments), node), timeout_seconds)
    if ended is None:
        return Answer(errno.ETIMEDOUT, None)
    _, _, errors, reply = ended
    return Answer(errors[0], reply)


def _io(ended: _Detailed) -> IoResults:
    return IoResults(ended.values, ended.errors)


def _page(detail: object) -> Page:
    assert isinstance(detail, tuple)
    return Page(*detail)
