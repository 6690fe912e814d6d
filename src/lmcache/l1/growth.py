"""Puts memory behind L1 as it fills: ahead of use in the background, and inline when a reservation cannot wait."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from lmcache._native import L1Core
from lmcache.clock import Clock
from lmcache.core.limits import (
    GIB,
    L1_FIRST_STEP_BYTES,
    L1_GROW_INLINE_BYTES,
    L1_GROW_STEP_BYTES,
    L1_HEADROOM_BYTES,
    MAX_PREFAULT_THREADS,
)
from lmcache.errors import ResourceError
from lmcache.memory.server_memory import ServerMemory

logger = logging.getLogger("lmcache.l1")

# After the machine refused memory, L1 keeps what it has for a while before it asks again.
_RETRY_SECONDS = 10.0
_STOP_SECONDS = 5.0


class Growth:
    """Keeps memory behind the slots that `core` hands out, as long as there is capacity, so that it need not evict."""

    def __init__(
        self, memory: ServerMemory, core: L1Core, capacity_bytes: int, first_offset: int, clock: Clock
    ) -> None:
        self._core = core
        self._memory = memory
        self._capacity_bytes = capacity_bytes
        self._first_offset = first_offset
        self._clock = clock
        # In the background, half of the processors stay with the engines.
        self._threads = max(1, min(MAX_PREFAULT_THREADS, (os.cpu_count() or 1) // 2))
        self._recovered_bytes = 0  # what the previous server committed, in pages of whatever size
        self._touched_bytes = 0  # by the background, from the start
        self._target_bytes = 0  # what the background is to commit at least, whatever is used
        self._is_complete = False
        self._refused_until = 0.0
        self._is_refused = False  # and said so
        self._wake = threading.Event()
        self._is_stopping = False
        self._grower: threading.Thread | None = None

    def recover(self) -> int:
        """Goes on with the memory that the previous server committed; the bytes of it that are for slots."""
        self._commit(0)
        self._recovered_bytes = self._core.stats()["committed_bytes"]
        return self._recovered_bytes

    def start(self, init_bytes: int) -> None:
        """Commits a first step at once and, in the background, `init_bytes` and later whatever use asks for.

        ResourceError if not even the first step can be had.
        """
        self._target_bytes = min(init_bytes, self._capacity_bytes)
        self._commit(min(self._target_bytes, L1_FIRST_STEP_BYTES))
        self._grower = threading.Thread(target=self._grow_in_background, name="l1-grower", daemon=True)
        self._grower.start()

    def commit_all(self, checkpoint: Callable[[], object] = lambda: None) -> None:
        """Commits the whole capacity and touches every page, before it returns. ResourceError if it cannot be had.
        `checkpoint` is called between steps; what it raises ends this."""
        end_bytes = 0
        while end_bytes < self._capacity_bytes:
            checkpoint()
            end_bytes = min(end_bytes + L1_GROW_INLINE_BYTES, self._capacity_bytes)
            self._commit(end_bytes)
        begin, size_bytes = 0, self._memory.size_bytes
        while begin < size_bytes:
            checkpoint()
            step_bytes = min(L1_GROW_INLINE_BYTES, size_bytes - begin)
            self._memory.prefault(begin, step_bytes, MAX_PREFAULT_THREADS, large_pages=begin < self._recovered_bytes)
            begin += step_bytes

    def stop(self) -> None:
        """Ends the background; what is committed stays. Waits for its current step, for a while. Idempotent."""
        self._is_stopping = True
        self._wake.set()
        if self._grower is not None:
            self._grower.join(_STOP_SECONDS)

    def make_room(self, needed_bytes: int) -> int:
        """Commits what is missing, within limits, and returns the free bytes that a reservation will leave."""
        if self._is_complete:
            return L1_HEADROOM_BYTES
        stats = self._core.stats()
        free_bytes = stats["free_bytes"]
        if free_bytes < needed_bytes and self._clock.monotonic() >= self._refused_until:
            missing_bytes = min(needed_bytes - free_bytes, L1_GROW_INLINE_BYTES)
            try:
                self._commit(min(stats["committed_bytes"] + missing_bytes, self._capacity_bytes))
            except ResourceError as error:
                self._remember_refusal(error)
        return free_bytes - needed_bytes

    def note_left(self, left_bytes: int) -> None:
        """After that reservation: has the background commit more when little is left."""
        if left_bytes < L1_HEADROOM_BYTES:
            self._wake.set()

    def _commit(self, committed_bytes: int) -> None:
        try:
            self._memory.grow(self._first_offset + committed_bytes, self._threads)
            self._is_refused = False
        finally:  # as far as it went
            reached_bytes = min(self._memory.committed_bytes - self._first_offset, self._capacity_bytes)
            if reached_bytes > 0:
                self._core.set_committed(reached_bytes)
            self._is_complete = reached_bytes == self._capacity_bytes

    def _remember_refusal(self, error: ResourceError) -> None:
        self._refused_until = self._clock.monotonic() + _RETRY_SECONDS
        if not self._is_refused:
            self._is_refused = True
            logger.warning("L1 stays at %.2f GiB for now: %s", self._core.stats()["committed_bytes"] / GIB, error)

    def _grow_in_background(self) -> None:
        try:
            while self._touched_bytes < self._capacity_bytes:
                self._wake.clear()
                if self._is_stopping:  # looked at after `clear`: `stop` sets both
                    return
                if not self._grow_a_step():
                    self._wake.wait(_RETRY_SECONDS)
        except Exception:
            # Root of a thread: without it L1 still grows inline.
            logger.exception("L1 growth in the background ended")

    def _grow_a_step(self) -> bool:
        """False if there is enough for now, or if the machine has no more."""
        stats = self._core.stats()
        committed_bytes = stats["committed_bytes"]
        wanted_bytes = min(max(self._target_bytes, stats["used_bytes"] + L1_HEADROOM_BYTES), self._capacity_bytes)
        # What was committed in a hurry is touched first.
        end_bytes = min(self._touched_bytes + L1_GROW_STEP_BYTES, max(wanted_bytes, committed_bytes))
        if end_bytes == self._touched_bytes:
            return False
        if end_bytes > committed_bytes:
            if self._clock.monotonic() < self._refused_until:
                return False
            try:
                self._memory.grow(self._first_offset + end_bytes, self._threads)
            except ResourceError as error:
                self._remember_refusal(error)
                return False
        # Touched before it is handed out: the first writer of a page would otherwise wait for its clearing.
        begin = self._first_offset + self._touched_bytes if self._touched_bytes else 0
        size_bytes = self._first_offset + end_bytes - begin
        is_recovered = self._touched_bytes < self._recovered_bytes
        self._memory.prefault(begin, size_bytes, self._threads, large_pages=is_recovered)
        self._touched_bytes = end_bytes
        self._commit(end_bytes)
        return True
