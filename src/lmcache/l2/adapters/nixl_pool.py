"""The slots of a NIXL pool and the directory beside them, as the adapter sees them. One implementation keeps files, the
other objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache.l2.adapters.nixl_agent import Agent


class Pool(Protocol):
    """Everything but `open` and `close` is called on the threads of `Lanes`, with their agents, and blocks; `record`
    and `flush` always on the same one. An entry is recorded after its frame, and erased before its slot is used again
    where the backend lets that be."""

    @property
    def id(self) -> bytes:
        """16 bytes that are in every entry of this pool."""
        ...

    @property
    def slots(self) -> int: ...

    @property
    def files(self) -> Sequence[int]:
        """Descriptors by slot, where slots are files."""
        ...

    @property
    def objects(self) -> Sequence[str]:
        """Names by position, those of the slots first, where slots are objects."""
        ...

    @property
    def buffered_fallbacks(self) -> int:
        """Files that are not opened past the page cache although that was asked for."""
        ...

    def open(self) -> None:
        """Before there is an agent. ResourceError where it cannot be used."""
        ...

    def read_directory(self, agent: Agent) -> memoryview:
        """The entries of all slots; sets `id`. ResourceError where there is no way to the backend."""
        ...

    def read_header(self, agent: Agent, slot: int) -> bytes:
        """The first 4096 bytes of a slot, or fewer. OSError where they cannot be read; ENOENT: there is none."""
        ...

    def write(self, agent: Agent, slots: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        """0 or an errno each."""
        ...

    def read(self, agent: Agent, slots: Sequence[int], targets: Sequence[memoryview]) -> list[int]:
        """0 or an errno each; ENOENT: the slot is not there any more. What was not filled is no frame."""
        ...

    def record(self, agent: Agent, slots: Sequence[int], entries: bytes) -> None:
        """In this order. OSError where it is not certain that they were written."""
        ...

    def mark_used(self, agent: Agent, slots: Sequence[int], used_ns: int) -> None:
        """In prefix order, the first the latest. May be lost: where it cannot be written that is no fault. Waits for no
        other call."""
        ...

    def give_back(self, agent: Agent, slots: Sequence[int]) -> None:
        """The room of slots that nobody uses, but for a page where the backend deletes nothing. What they held cannot
        be read any more. OSError where that is not certain."""
        ...

    def flush(self, agent: Agent) -> None:
        """Before the end: what may be lost is written. OSError where it is."""
        ...

    def close(self, *, remove: bool) -> None:
        """`remove`: nothing of it stays, as far as the backend can delete. Idempotent, also before `open`."""
        ...
