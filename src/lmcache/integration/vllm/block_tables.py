"""The blocks of running requests, for engines that hand over their block pool but not their block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockTables:
    """Kept up with what each step says of new blocks. Belongs to the scheduler's thread.

    Only for models whose groups keep every block of a request: that an engine put the null block in the place of one
    that it no longer needs, no step says.
    """

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], ...]] = {}  # by request: the block ids of each group

    def __call__(self, request_id: str) -> Sequence[Sequence[int]]:
        """Block ids of each group; of a request that was not scheduled, none."""
        return self._tables.get(request_id, ())

    def follow(self, scheduler_output: Any) -> None:
        """Takes the blocks of a step: all of a request that is new or comes back from a preemption, else those that
        were added."""
        for request_id in scheduler_output.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(map(list, new.block_ids))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = tuple(map(list, added or ()))
            elif added is not None and request_id in self._tables:
                for ids, more in zip(self._tables[request_id], added, strict=True):
                    ids.extend(more)
