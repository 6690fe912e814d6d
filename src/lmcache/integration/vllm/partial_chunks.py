"""The last, partial chunk of a prompt that one engine computes for another: which requests have one, and its unit.

A prompt ends anywhere, chunks do not. What lies behind the last full one is worth storing only where another engine is
about to decode exactly this prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.handover import is_handed_over
from lmcache.protocol.messages import Source


def partial_unit_tokens(groups: Sequence[CacheGroup]) -> int:
    """A partial chunk is whole blocks of all groups: a multiple of so many tokens. 0: there is none, because a group
    has what a hit's end needs at the ends of full chunks alone."""
    if any(group.tail_tokens for group in groups):
        return 0
    return math.lcm(*(group.block_tokens for group in groups))


def has_partial_chunk(request: Any, source: Source | None) -> bool:
    """Whether the partial chunk of its prompt is looked up, or stored. Tokens of a session with further input may be
    replaced."""
    return not request.resumable and (source is not None or is_handed_over(request))
