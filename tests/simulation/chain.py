"""What every position of a request has in its KV."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.request import Request

VOCABULARY = 8192
_MASK = 2**64 - 1
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class Chain:
    """A value a position, which depends on all tokens and images up to there. The input of a session may take the
    place of tokens that were sampled: what was computed from those is forgotten."""

    def __init__(self, request: Request) -> None:
        lora = request.lora_request.lora_name if request.lora_request else ""
        seed = zlib.crc32(repr((request.cache_salt or "", lora)).encode())  # the same in every process
        self._states = [seed]
        self._inputs: list[int] = []

    def upto(self, tokens: Sequence[int], count: int, features: Sequence[Any] = ()) -> np.ndarray:
        inputs = list(tokens[:count])
        for feature in features:
            first, length = feature.mm_position.offset, feature.mm_position.length
            seen = zlib.crc32(feature.identifier.encode())
            for position in range(first, min(first + length, count)):
                inputs[position] = seen + position - first
        known = min(len(self._inputs), count)
        if self._inputs[:known] != inputs[:known]:
            known = next(at for at in range(known) if self._inputs[at] != inputs[at])
        del self._inputs[known:], self._states[known + 1 :]
        for value in inputs[known:]:
            self._states.append((self._states[-1] * _MULTIPLIER + value * 2 + _INCREMENT) & _MASK)
        self._inputs = inputs
        return np.array(self._states[1:], dtype=np.uint64)

    def next_token(self, count: int) -> int:
        return 2 + (self._states[count] >> 33) % (VOCABULARY - 2)


def may_follow(value: int, next_value: int) -> bool:
    """Whether some token of the vocabulary leads from the value of a position to this value of the next one."""
    token, odd = divmod((next_value - value * _MULTIPLIER - _INCREMENT) & _MASK, 2)
    return not odd and token < VOCABULARY
