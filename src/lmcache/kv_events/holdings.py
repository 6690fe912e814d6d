"""Which chunks a medium has whole: of all ranks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache.core.key import CHUNK_HASH_BYTES, Namespace
from lmcache.core.limits import MAX_NAMESPACES_REMEMBERED
from lmcache.core.object_changes import ChangeSource

# For each chunk (32 bytes) a byte: 1 if it is in all of these namespaces.
Holds = Callable[[Sequence[Namespace], bytes], bytes]


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
    """A chunk is there when some tier of the medium has it of every rank, in the layout in which that rank stored
    last, or in the one that is asked about."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._ranks: dict[Model, dict[int, Namespace]] = {}

    def note(self, namespace: Namespace) -> None:
        """Something was stored in it."""
        model = model_of(namespace)
        if model not in self._ranks and len(self._ranks) >= MAX_NAMESPACES_REMEMBERED:
            del self._ranks[next(iter(self._ranks))]
        self._ranks.setdefault(model, {})[namespace.rank] = namespace

    def has(self, medium: str, namespace: Namespace, hashes: bytes) -> list[bool]:
        """For each chunk."""
        latest = self._ranks.get(model_of(namespace), {})
        own = {**latest, namespace.rank: namespace}
        found = bytes(len(hashes) // CHUNK_HASH_BYTES)
        for ranks in (own,) if own == latest else (own, latest):
            if len(ranks) == namespace.world_size:
                for tier in self._tiers:
                    if tier.medium == medium:
                        held = tier.holds(list(ranks.values()), hashes)
                        found = bytes(map(max, found, held))
        return [bool(byte) for byte in found]


def model_of(namespace: Namespace) -> Model:
    return Model(namespace.model_name, namespace.world_size, namespace.object_group)
