"""What a transfer engine keeps of each server that it has read from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass
class _Server(Generic[V]):
    value: V
    reads: int = 0  # under way


class KnownServers(Generic[K, V]):
    """Of `most` servers at most, beside those that are being read from: the ones read longest ago, which may have left,
    are forgotten. Thread-safe."""

    def __init__(self, learn: Callable[[K], V], forget: Callable[[V], object], most: int) -> None:
        """`forget` must not raise."""
        self._learn = learn
        self._forget = forget
        self._most = most
        self._lock = threading.Lock()
        self._servers: dict[K, _Server[V]] = {}  # the one read longest ago first

    @contextmanager
    def reading(self, key: K) -> Iterator[V]:
        """What is kept of a server while it is read from. Raises what `learn` raises."""
        with self._lock:
            server = self._servers.pop(key, None) or _Server(self._learn(key))
            self._servers[key] = server
            server.reads += 1
            idle = [known for known, other in self._servers.items() if not other.reads]
            for known in idle[: max(0, len(self._servers) - self._most)]:
                self._forget(self._servers.pop(known).value)
        try:
            yield server.value
        finally:
            with self._lock:
                server.reads -= 1
