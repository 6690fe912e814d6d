"""The namespaces of stored objects: the name of the chain is a part of each (docs/formats/serde.md).

So objects of another chain, or of none, are other objects: nobody asks for them, and several servers with different
chains can share a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from lmcache import _native
from lmcache.core.key import SERDE_MARK, Namespace, ObjectKey

_NAMESPACES_KEPT = 256


class StoredNamespaces:
    def __init__(self, serde: str) -> None:
        """`serde` is the name of the chain."""
        self._serde = serde
        self._mark = f"{SERDE_MARK}{serde}"
        self._stored = lru_cache(_NAMESPACES_KEPT)(self._stored_namespace)
        self.templates = lru_cache(_NAMESPACES_KEPT)(self._templates)

    def stored_keys(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """The keys under which objects are stored."""
        stored = self._stored
        return [ObjectKey(stored(namespace), chunk_hash) for namespace, chunk_hash in keys]

    def _stored_namespace(self, served: Namespace) -> Namespace:
        return replace(served, layout=f"{served.layout}{self._mark}")

    def _templates(self, stored: Namespace) -> bytes:
        """Headers of the served and of the stored namespace, one behind the other."""
        served = replace(stored, layout=stored.layout.removesuffix(self._mark))
        return _native.frame_template(served.encode(), served.digest, 0) + _native.frame_template(
            stored.encode(), stored.digest, 0, self._serde
        )
