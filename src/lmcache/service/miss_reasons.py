"""Why a chunk that nobody has is not there, as far as this server can know.

The core remembers what became of the latest objects that left L1, as fingerprints. Keys do not tell which weights or
which cache salt else they were stored under, and a tenant must not hear of another: such misses are NOT_STORED.
"""

from __future__ import annotations

from lmcache._native import Fate
from lmcache.core.key import Namespace
from lmcache.core.key_batch import NamespaceSet
from lmcache.core.outcome import MissReason
from lmcache.l1.store import L1Store

_REASONS = {
    Fate.UNKNOWN: MissReason.NOT_STORED,
    Fate.EVICTED: MissReason.EVICTED,
    Fate.OVER_QUOTA: MissReason.OVER_QUOTA,
    Fate.CLEARED: MissReason.CLEARED,
    Fate.ABANDONED: MissReason.ABANDONED,
    Fate.NO_ROOM: MissReason.NO_ROOM_TO_STORE,
    Fate.CORRUPT: MissReason.CORRUPT,
    Fate.BEING_STORED: MissReason.BEING_STORED,
}
_MAX_LAYOUTS_KEPT = 8  # of a model
_MAX_MODELS_KEPT = 64

_Shape = tuple[tuple[int, int, int, str], ...]  # of each namespace: world size, rank, group, layout


class MissReasons:
    """Belongs to the message loop."""

    def __init__(self, l1: L1Store) -> None:
        self._core = l1.core
        self._layouts: dict[str, dict[_Shape, None]] = {}  # by model; what was seen first is forgotten first

    def of(self, namespaces: NamespaceSet, chunk_hash: bytes) -> MissReason:
        """The reason of the first chunk that is missing."""
        layouts = self._note(namespaces)
        fate = self._core.fate_of(namespaces.digests, chunk_hash)
        if fate is Fate.UNKNOWN and len(layouts) > 1 and self._has_other(namespaces, layouts, chunk_hash):
            return MissReason.OTHER_LAYOUT
        return _REASONS[fate]

    def _note(self, namespaces: NamespaceSet) -> dict[_Shape, None]:
        model_name = namespaces[0].model_name
        layouts = self._layouts.get(model_name)
        if layouts is None:
            while len(self._layouts) >= _MAX_MODELS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            layouts = self._layouts[model_name] = {}
        shape = _shape(namespaces)
        if shape not in layouts:
            while len(layouts) >= _MAX_LAYOUTS_KEPT:
                del layouts[next(iter(layouts))]
            layouts[shape] = None
        return layouts

    def _has_other(self, namespaces: NamespaceSet, layouts: dict[_Shape, None], chunk_hash: bytes) -> bool:
        own, model_name, salt = _shape(namespaces), namespaces[0].model_name, namespaces.cache_salt
        for shape in layouts:
            if shape != own:
                digests = b"".join(Namespace(model_name, *fields, salt).digest for fields in shape)
                if self._core.probe(digests, chunk_hash):
                    return True
        return False


def _shape(namespaces: NamespaceSet) -> _Shape:
    return tuple((each.world_size, each.rank, each.object_group, each.layout) for each in namespaces.namespaces)
