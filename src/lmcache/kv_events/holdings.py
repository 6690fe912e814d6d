"""Which chunks a medium has whole: of all ranks of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from lmcache.core import limits
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.object_changes import ChangeSource

# For each chunk (32 bytes) a byte: 1 if it is in all of these namespaces.
Holds = Callable[[Sequence[Namespace], bytes], bytes]
Ranks = tuple[Namespace, ...]  # of one object group, the first rank first


@dataclass(frozen=True)
class Tier:
    """L1, or an adapter. `medium`: CPU or STORAGE."""

    medium: str
    source: ChangeSource
    holds: Holds


class Model(NamedTuple):
    """What events name together: an object group of the ranks of a model."""

    name: str
    world_size: int
    group: int


class Holdings:
    """A chunk is there when some tier of the medium has it of every rank, in layouts that belong together: the same one
    for all, or those with which the ranks of an engine registered. `note_ranks` is for any thread, the rest for one.

    Remembers the latest MAX_RANK_LAYOUTS of a model, and MAX_NAMESPACES_REMEMBERED ranks. What is forgotten counts as
    not there until something is stored in it."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers
        self._told: deque[Ranks] = deque(maxlen=limits.MAX_INSTANCES)
        self._known: dict[Model, dict[Ranks, None]] = {}  # the oldest first
        self._known_ranks = 0

    def note_ranks(self, ranks: Sequence[Sequence[Namespace]]) -> None:
        """All of an engine, [rank][group]."""
        for group in zip(*ranks, strict=True):
            if len({namespace.layout for namespace in group}) > 1:
                self._told.append(group)

    def learn(self) -> bool:
        """Whether something was noted for which chunks are there that were not before."""
        is_new = False
        while self._told:
            ranks = self._told.popleft()
            is_new |= ranks not in self._known.get(model_of(ranks[0]), ())
            self._know(ranks)
        return is_new

    def note(self, namespace: Namespace) -> None:
        """Something was stored in it."""
        known = [ranks for ranks in self._known.get(model_of(namespace), ()) if namespace in ranks]
        if not known and 0 < namespace.world_size <= limits.MAX_WORLD_SIZE:
            known = [tuple(replace(namespace, rank=rank) for rank in range(namespace.world_size))]
        for ranks in known:
            self._know(ranks)

    def has(self, medium: str, namespace: Namespace, hashes: bytes) -> list[bool]:
        """For each chunk, in whichever layouts of that model."""
        found = bytes(len(hashes) // CHUNK_HASH_BYTES)
        for ranks in self._known.get(model_of(namespace), ()):
            for tier in self.tiers:
                if tier.medium == medium:
                    found = bytes(map(max, found, tier.holds(ranks, hashes)))
        return [bool(byte) for byte in found]

    def _know(self, ranks: Ranks) -> None:
        known = self._known.pop(model_of(ranks[0]), {})
        if known.pop(ranks, ranks) is not None:
            self._known_ranks += len(ranks)
        known[ranks] = None
        self._known[model_of(ranks[0])] = known
        if len(known) > limits.MAX_RANK_LAYOUTS:
            self._forget(known)
        while self._known_ranks > limits.MAX_NAMESPACES_REMEMBERED:
            model, oldest = next(iter(self._known.items()))
            self._forget(oldest)
            if not oldest:
                del self._known[model]

    def _forget(self, known: dict[Ranks, None]) -> None:
        ranks = next(iter(known))
        del known[ranks]
        self._known_ranks -= len(ranks)


def model_of(namespace: Namespace) -> Model:
    return Model(namespace.model_name, namespace.world_size, namespace.object_group)
