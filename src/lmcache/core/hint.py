"""Which server has what a request is about to look for, said by whoever sent the request there before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hint:
    """`address` is HOST:PORT where that server answers its peers, `epoch` the start of it that stored (b"": any).
    `wait_seconds`: how long an answer may wait for chunks that are being stored there."""

    address: str
    epoch: bytes = b""
    wait_seconds: float = 0.0
