"""Damage to what a server holds in L1."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from lmcache import _native

_ALIGNMENT = 4096  # of frames, whose headers are as long
_DAMAGED_BYTE = 999  # of the payload


def spoil_frames(shm_name: str, frames: Sequence[int]) -> int:
    """Flips a payload byte of the frames at these positions, in order of address; how many frames there are."""
    magic = _native.frame_template(b"", bytes(32), 0)[:8]
    with (Path("/dev/shm") / shm_name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        starts = [at for at in range(_ALIGNMENT, len(memory), _ALIGNMENT) if memory[at : at + 8] == magic]
        for index in frames:
            memory[starts[index] + _ALIGNMENT + _DAMAGED_BYTE] ^= 1
    return len(starts)
