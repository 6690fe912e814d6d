"""The name that vLLM's own connector module imports from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RequestAllocationRecord:
    """Blocks that a request was given, and the tokens that they cover."""

    req_id: str
    new_block_ids: list[int]
    new_token_ids: list[int]
