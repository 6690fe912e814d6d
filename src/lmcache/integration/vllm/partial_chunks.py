"""The last, partial chunk of a prompt that one engine computes for another: which requests have one, and its unit.

A prompt ends anywhere, chunks do not. What lies behind the last full one is worth storing only where another engine is
about to decode exactly this prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lmcache.integration.vllm.groups import CacheGroup

SOURCE = "lmcache.mp.source"  # key of `kv_transfer_params`: which engine computed the prompt, and where it stored


def partial_unit_tokens(groups: Sequence[CacheGroup]) -> int:
    """A partial chunk is whole blocks of all groups: a multiple of so many tokens. 0: there is none, because a group
    has what a hit's end needs at the ends of full chunks alone."""
    if any(group.tail_tokens for group in groups):
        return 0
    return math.lcm(*(group.block_tokens for group in groups))


def is_computed_for_another(request: Any) -> bool:
    """Whether another engine goes on with the prompt of this request."""
    return _says(request, "do_remote_decode") is True


def is_computed_by_another(request: Any) -> bool:
    """Whether another engine has stored the prompt of this request."""
    return isinstance(_says(request, SOURCE), dict)


def has_partial_chunk(request: Any) -> bool:
    """Whether the partial chunk of its prompt is looked up, or stored. Tokens of a session with further input may be
    replaced."""
    return not request.resumable and (is_computed_for_another(request) or is_computed_by_another(request))


def _says(request: Any, key: str) -> Any:
    parameters = request.kv_transfer_params  # of a client: anything
    return parameters.get(key) if isinstance(parameters, dict) else None
