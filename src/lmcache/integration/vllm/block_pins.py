"""Keeps the blocks that a store reads out of the engine's hands until it has been read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from lmcache.clock import Clock
from lmcache.integration.engine.completion_barrier import CompletionBarrier
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.vllm")

MAX_PINNED_FRACTION = 0.5  # of the engine's blocks; beyond it stores wait for others to end
_SOON_SECONDS = 0.5


class BlockPins:
    """Reference counts in vLLM's block pool, one job per store. Belongs to the scheduler's thread."""

    def __init__(self, workers: int, clock: Clock) -> None:
        self._workers = workers
        self._clock = clock
        self._pool: Any = None
        self._jobs: CompletionBarrier[list[Any]] = CompletionBarrier(workers)  # blocks
        self._next_job = 1
        self._pinned_blocks = 0
        self._lag_warnings = LogLimiter()
        self._since = 0.0
        self.null_block_id = 0

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool
        self.null_block_id = block_pool.null_block.block_id

    @property
    def held(self) -> bool:
        return bool(self._jobs)

    @property
    def pool_is_empty(self) -> bool:
        """Whether no block is in use, by a request or by a store."""
        return bool(self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() <= 1)  # the null block always is

    @property
    def end_soon(self) -> bool:
        """Whether waiting for pins beats preempting a request: there are some, and they are young."""
        return bool(self._jobs) and self._clock.monotonic() - self._since < _SOON_SECONDS

    def room(self, wanted_blocks: int) -> int:
        """How many of these blocks may be pinned now."""
        room = int(MAX_PINNED_FRACTION * len(self._pool.blocks)) - self._pinned_blocks
        if room < wanted_blocks and self._lag_warnings.due():
            log.warning("Stores lag behind the engine: the end of some prompts may not be stored (said once)")
        return min(wanted_blocks, max(0, room))

    def pin(self, groups: Iterable[Iterable[int]]) -> int | None:
        """Pins the blocks of every group, each once; the job's number, or None when too many are pinned already."""
        null = self.null_block_id
        ids = dict.fromkeys(block for group in groups for block in group if block != null)
        blocks = [self._pool.blocks[block] for block in ids]
        if self.room(len(blocks)) < len(blocks):
            return None
        self._pool.touch(blocks)
        if not self._jobs:
            self._since = self._clock.monotonic()
        job = self._next_job
        self._next_job += 1
        self._jobs.add(job, blocks)
        self._pinned_blocks += len(blocks)
        return job

    def ended(self, reports: Mapping[int, int]) -> None:
        """Takes how many more workers have stopped reading, by job; the last report of a job gives its blocks back."""
        for _, blocks in self._jobs.ended(reports):
            self._pinned_blocks -= len(blocks)
            # The pool evicts in this order, and a prefix is worth more than what follows it.
            self._pool.free_blocks(reversed(blocks))
            self._since = self._clock.monotonic()

    def check_idle(self) -> None:
        """AssertionError if a block is pinned."""
        assert not self._jobs and not self._pinned_blocks, f"{len(self._jobs)} stores pin {self._pinned_blocks} blocks"

    def drop(self, number: int) -> None:
        """Ends a job that no worker has an order for."""
        self.ended({number: self._workers})
