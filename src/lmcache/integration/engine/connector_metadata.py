"""What the scheduler side tells the workers to do in a step, and what they report back. Plain data, free of vLLM."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupLoad:
    """The chunks of one group that a load copies: `first_chunk` up to the hit's end.

    blocks: i64, one per block of those chunks, -1 for a block that the engine holds already or does not keep.
    """

    first_chunk: int
    blocks: bytes

    def written_blocks(self, chunk: int, end_chunk: int) -> list[int]:
        """The blocks that one of the chunks is written to; the last chunk is `end_chunk` - 1."""
        blocks = array("q", self.blocks)
        per_chunk = len(blocks) // (end_chunk - self.first_chunk)
        first = (chunk - self.first_chunk) * per_chunk
        return [block for block in blocks[first : first + per_chunk] if block >= 0]


@dataclass(frozen=True)
class LoadOrder:
    """Copy leased slots into a request's blocks. `slots` and `hashes` are those of the lookup's answer, uncut.

    all_or_nothing: blocks before one that failed are of no use to the engine, which has not what they build on.
    first_rank: the rank with which `slots` begins."""

    request_id: str
    server_epoch: bytes
    cache_salt: str
    hit_chunks: int
    hashes: bytes
    slots: bytes
    groups: tuple[GroupLoad, ...]
    lease: int = 0
    all_or_nothing: bool = False
    first_rank: int = 0


@dataclass(frozen=True)
class StoreOrder:
    """Copy whole blocks of consecutive chunks into L1. blocks: i64 [chunk][block] per group.

    wanted: one byte per [group][chunk], 0 where the engine has nothing to store (null blocks); empty: it has all.
    """

    job: int
    server_epoch: bytes
    cache_salt: str
    hashes: bytes
    blocks: tuple[bytes, ...]
    wanted: bytes = b""
    request_id: str = ""


@dataclass
class ConnectorMetadata:
    """The orders of one step, for every worker."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    impossible_loads: list[LoadOrder] = field(default_factory=list)  # the engine waits for them: reported as failed
    await_stores: bool = False  # the step ends when their source blocks have been read
    idle: bool = False  # the engine runs no forward pass in this step


@dataclass
class WorkerReport:
    """`ended_stores`: jobs whose source blocks are no longer read, counted over the workers that report it.
    `settled_stores`: jobs that the server knows the end of, or never will, counted alike.
    `unreadable`: chunks whose frame was not what its key says, by request."""

    ended_stores: Counter[int] = field(default_factory=Counter)
    unreadable: Mapping[str, frozenset[int]] = field(default_factory=dict)
    settled_stores: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        request_ids = {*self.unreadable, *other.unreadable}
        nothing: frozenset[int] = frozenset()
        return WorkerReport(
            self.ended_stores + other.ended_stores,
            {name: self.unreadable.get(name, nothing) | other.unreadable.get(name, nothing) for name in request_ids},
            self.settled_stores + other.settled_stores,
        )
