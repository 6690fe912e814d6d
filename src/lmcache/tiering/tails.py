"""Groups that need only the end of a prefix: windows of attention, recurrent states."""

from __future__ import annotations

from collections.abc import Sequence


def longest_whole(there: Sequence[Sequence[bool]], tail_chunks: Sequence[int]) -> int:
    """How many chunks the longest usable prefix has. `there`: [chunk][namespace]; `tail_chunks`: per namespace, how
    many chunks at the end of the prefix it must have, 0 for all. What lies before the first chunk counts as there."""
    runs = list(tail_chunks)  # chunks in a row that each namespace has
    longest = 0
    for chunk, of_chunk in enumerate(there):
        if not all(has or tail for has, tail in zip(of_chunk, tail_chunks, strict=True)):
            break
        runs = [run + 1 if has else 0 for run, has in zip(runs, of_chunk, strict=True)]
        if all(run >= tail for run, tail in zip(runs, tail_chunks, strict=True)):
            longest = chunk + 1
    return longest


def is_needed(chunk: int, chunks: int, tail: int) -> bool:
    """Whether a prefix of `chunks` chunks needs this chunk of a namespace with that tail."""
    return tail == 0 or chunk >= chunks - tail
