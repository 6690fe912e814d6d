"""What a server can tell of its tiers: their changes in order, and all that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmcache.core.key import Namespace


@dataclass(frozen=True)
class Run:
    """Objects of one namespace that came, or went, one after the other: 32 bytes of `hashes` and 8 of `sizes_bytes`
    (u64) each."""

    namespace: Namespace
    hashes: bytes
    sizes_bytes: bytes
    added: bool = True


@dataclass(frozen=True)
class ChangePage:
    """Changes behind a cursor, in their order, and the cursor behind them. `lost`: there were others between them,
    which nobody knows any more."""

    runs: Sequence[Run] = field(default=())
    next_cursor: int = 0
    lost: bool = False


@dataclass(frozen=True)
class ObjectsPage:
    """Some of what there is. `next_start` is where the next page begins; 0: that was the last one."""

    runs: Sequence[Run]
    next_start: int


class ChangeSource(Protocol):
    """One tier of a server. Called by the reporter's thread alone; no call waits for long."""

    @property
    def tier(self) -> str:
        """l1 or l2."""
        ...

    @property
    def backend(self) -> str:
        """The name of the adapter; "" for L1."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other servers may have the same backend."""
        ...

    def capacity_bytes(self) -> int:
        """0: there is no limit."""
        ...

    def cursor(self) -> int:
        """Behind every change so far. What a listing that begins now does not show comes behind it."""
        ...

    def changes(self, cursor: int, most: int) -> ChangePage: ...

    def objects(self, start: int, most: int) -> ObjectsPage:
        """From `start` on, which is 0 at first. What comes or goes meanwhile may be missed: it is a change."""
        ...
