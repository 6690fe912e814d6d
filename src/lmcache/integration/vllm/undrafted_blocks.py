"""Blocks that lack the KV of what drafts, because vLLM computed them in steps without drafting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lmcache.core.rounding import div_ceil
from lmcache.integration.vllm.groups import CacheGroup


class UndraftedBlocks:
    """vLLM's first model runner drafts nothing in a step, for no request, when one of its sequences is too long for it.
    What drafts then has no KV of the tokens of that step: their blocks hold whatever was there. They are not stored,
    also when vLLM's own prefix cache gives them to other requests, until they are written anew from their first token
    on.

    Belongs to the scheduler's thread.
    """

    def __init__(self, groups: Sequence[CacheGroup], longest_tokens: int | None) -> None:
        """`longest_tokens`: of a sequence that is drafted for; None: drafting is never left out."""
        self._groups = groups
        self._longest_tokens = longest_tokens
        self._blocks: set[int] = set()

    def note_step(
        self, spans: Sequence[tuple[str, int, int]], block_table: Callable[[str], Sequence[Sequence[int]]]
    ) -> None:
        """spans: (request id, tokens that have KV before the step, and after it) of all its requests."""
        if self._longest_tokens is None:
            return
        undrafted = max((after for _, _, after in spans), default=0) > self._longest_tokens
        if not (undrafted or self._blocks):
            return
        for request_id, before, after in spans:
            for group, ids in zip(self._groups, block_table(request_id), strict=True):
                size = group.block_tokens
                if undrafted:
                    self._blocks.update(ids[before // size : div_ceil(after, size)])
                else:
                    self._blocks.difference_update(ids[div_ceil(before, size) : div_ceil(after, size)])

    def written(self, blocks: Iterable[int]) -> None:
        """A load writes them."""
        self._blocks.difference_update(blocks)

    def among(self, block_ids: Sequence[Sequence[int]], first_token: int, end_token: int) -> bool:
        """Whether tokens from `first_token` to `end_token` of a request with these blocks, group by group, lack KV."""
        return bool(self._blocks) and any(
            not self._blocks.isdisjoint(ids[first_token // size : div_ceil(end_token, size)])
            for ids, size in zip(block_ids, (group.block_tokens for group in self._groups), strict=True)
        )
