"""Scan-resistant: what was never used again goes before what was. The rules are those of native eviction_order.h."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_SHARE = 0.1  # of `small`, as published
_FEWEST_GHOSTS = 8


class _Known(NamedTuple):
    size: int
    used: int  # position in the order of all uses


class _Queue(Generic[K]):
    """Oldest use first."""

    def __init__(self) -> None:
        self.known: OrderedDict[K, _Known] = OrderedDict()
        self.held_bytes = 0

    def put(self, key: K, known: _Known, *, last: bool = True) -> None:
        self.known[key] = known
        self.known.move_to_end(key, last=last)
        self.held_bytes += known.size

    def take(self, key: K) -> _Known:
        known = self.known.pop(key)
        self.held_bytes -= known.size
        return known


class S3FIFO(Generic[K]):
    """`small` holds what was never used again, `main` what was, both by last use, so that a suffix goes before its
    prefix. small gives first while it is above its share; main gives only what is older than all of small. A key that
    comes back after it was evicted goes to main, and its former queue gets more room."""

    def __init__(self) -> None:
        self._small: _Queue[K] = _Queue()
        self._main: _Queue[K] = _Queue()
        self._share = FIRST_SHARE  # of all bytes
        self._ghosts: OrderedDict[K, bool] = OrderedDict()  # was in main; oldest first
        self._chosen: set[K] = set()  # by the last `victims`
        self._uses = 0
        self._oldest_use = 0

    def add(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            queue = self._queue_of(key)
            if queue is not None:
                queue.take(key)
            else:
                queue = self._enter(key, size)
            queue.put(key, _Known(size, self._next_use()))

    def _enter(self, key: K, size: int) -> _Queue[K]:
        was_in_main = self._ghosts.pop(key, None)
        if was_in_main is None:
            return self._small
        step = size / max(size, self._small.held_bytes + self._main.held_bytes)
        self._share = min(1.0, max(0.0, self._share + (-step if was_in_main else step)))
        return self._main

    def add_older(self, keys: Sequence[K], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            if self._queue_of(key) is None:
                self._oldest_use -= 1
                self._small.put(key, _Known(size, self._oldest_use), last=False)

    def touch(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            queue = self._queue_of(key)
            if queue is not None:
                self._main.put(key, queue.take(key)._replace(used=self._next_use()))

    def remove(self, key: K) -> None:
        queue = self._queue_of(key)
        if queue is None:
            return
        queue.take(key)
        if key in self._chosen:
            self._chosen.discard(key)
            self._ghosts[key] = queue is self._main
            self._ghosts.move_to_end(key)
            while len(self._ghosts) > max(_FEWEST_GHOSTS, len(self._small.known) + len(self._main.known)):
                self._ghosts.popitem(last=False)

    def victims(self, wanted_bytes: int) -> list[K]:
        small, main = iter(self._small.known.items()), iter(self._main.known.items())
        in_small, in_main = next(small, None), next(main, None)
        small_bytes = self._small.held_bytes
        share_bytes = self._share * (small_bytes + self._main.held_bytes)
        chosen: list[K] = []
        while wanted_bytes > 0 and (in_small or in_main):
            if in_small and (not in_main or small_bytes > share_bytes or in_small[1].used < in_main[1].used):
                key, known = in_small
                small_bytes -= known.size
                in_small = next(small, None)
            else:
                assert in_main is not None
                key, known = in_main
                in_main = next(main, None)
            chosen.append(key)
            wanted_bytes -= known.size
        self._chosen = set(chosen)
        return chosen

    def _queue_of(self, key: K) -> _Queue[K] | None:
        if key in self._main.known:
            return self._main
        return self._small if key in self._small.known else None

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses
