"""Memory that clients make the server hold, limited for all of them together."""

from __future__ import annotations

from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class Backlog(Generic[Holder]):
    """Bytes of each holder. Invariant: `size_bytes` is their sum."""

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._held: dict[Holder, int] = {}  # in the order in which they began to hold something

    def set(self, holder: Holder, size_bytes: int) -> None:
        if not size_bytes:
            self.size_bytes -= self._held.pop(holder, 0)
            return
        self.size_bytes += size_bytes - self._held.get(holder, 0)
        self._held[holder] = size_bytes

    def surplus(self) -> Holder | None:
        """While there is too much: who has held some for the longest time. What honest clients make is soon gone."""
        return next(iter(self._held)) if self.size_bytes > self._limit_bytes else None
