"""Which servers have how much of a prompt, and where: for each number of ranks that there is, apart.

A chunk counts where a server has it of all ranks of one number of ranks, of whatever layout: where engines were changed
it may have less than is said. Servers of one model may have other numbers of ranks: each is looked at for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.core import limits
from lmcache.fleet.directory import Directory
from lmcache.fleet.messages import Key

_STEP_KEYS = 32  # of which all copies are looked at under the directory's lock
_STEP_COPIES = 32_768  # beyond, fewer keys are looked at the next time


@dataclass
class Prefix:
    """The beginning of a prompt. It is in L1 only where all of it is."""

    chunks: int
    all_in_l1: bool


def prefixes(directory: Directory, keys: Sequence[Key], ranks: int) -> tuple[dict[str, Prefix], bool]:
    """By server, the longest that it has for one number of ranks, and whether they were looked for to their end.
    `keys`: chunk by chunk, each with its ranks, which are the most that any server has."""
    chunks = len(keys) // ranks
    found: dict[tuple[str, int], Prefix] = {}  # by server and number of ranks
    at = examined = 0
    step = max(1, _STEP_KEYS // ranks)
    goes_on = True
    while goes_on and at < chunks:
        if examined > limits.MAX_FLEET_COPIES_EXAMINED:
            return _longest(found), False
        copies = directory.copies(keys[at * ranks : (at + step) * ranks])
        held: list[dict[tuple[str, int], list[int]]] = [{} for _ in range(min(step, chunks - at))]
        for index, world_size, instance_id, tier in copies:
            chunk, rank = divmod(index, ranks)
            has_ranks = held[chunk].setdefault((instance_id, world_size or ranks), [0, 0])  # bits: anywhere, in L1
            has_ranks[0] |= 1 << rank
            has_ranks[1] |= (tier == "l1") << rank
        for chunk, of_chunk in enumerate(held, at):
            goes_on = _extend(found, chunk, of_chunk)
            if not goes_on:
                break
        at += step
        examined += len(copies)
        if len(copies) > _STEP_COPIES:
            step = max(1, step * _STEP_COPIES // len(copies))
    return _longest(found), True


def _extend(found: dict[tuple[str, int], Prefix], chunk: int, held: dict[tuple[str, int], list[int]]) -> bool:
    """By that chunk, where all before it are. Whether any has become longer."""
    has_grown = False
    for name, (anywhere, in_l1) in held.items():
        all_ranks = (1 << name[1]) - 1
        if anywhere & all_ranks != all_ranks:
            continue
        prefix = found.setdefault(name, Prefix(0, True)) if not chunk else found.get(name)
        if prefix is not None and prefix.chunks == chunk:
            prefix.chunks = chunk + 1
            prefix.all_in_l1 = prefix.all_in_l1 and in_l1 & all_ranks == all_ranks
            has_grown = True
    return has_grown


def _longest(found: dict[tuple[str, int], Prefix]) -> dict[str, Prefix]:
    longest: dict[str, Prefix] = {}
    for (instance_id, _), prefix in found.items():
        known = longest.get(instance_id)
        if known is None or (prefix.chunks, prefix.all_in_l1) > (known.chunks, known.all_in_l1):
            longest[instance_id] = prefix
    return longest
