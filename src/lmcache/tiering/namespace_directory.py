"""Namespaces by their digests, of objects that operators list or name. Indexes know digests; whose they are is in the
header of any frame, and in the ledgers of L2."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from lmcache.core import limits
from lmcache.core.key import SERDE_MARK, Namespace, ObjectKey, UnnamedNamespace, decode_known, stored_serde
from lmcache.l1.store import L1Store
from lmcache.l2.adapters.remote_names import identify_namespace
from lmcache.l2.runner import Runner
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.tiering.leases import FOREVER


class NamespaceDirectory:
    """Thread-safe. Remembers at most MAX_NAMESPACES_REMEMBERED."""

    def __init__(self, l1: L1Store, runners: Sequence[Runner]) -> None:
        self._l1 = l1
        self._runners = runners
        self._lock = threading.Lock()
        self._known: dict[bytes, Namespace] = {}

    def note(self, namespaces: Iterable[Namespace]) -> None:
        with self._lock:
            for namespace in namespaces:
                while len(self._known) >= limits.MAX_NAMESPACES_REMEMBERED:
                    del self._known[next(iter(self._known))]
                self._known[namespace.digest] = namespace

    def of_l1_object(self, digest: bytes, chunk_hash: bytes) -> Namespace:
        """By the header of that object where nothing else says it."""
        if (known := self._known.get(digest)) is not None:
            return known
        acquired = self._l1.core.acquire_each(STORAGE_OWNER, digest, chunk_hash, FOREVER)
        if not acquired.lease:
            return UnnamedNamespace.of(digest)
        try:
            slot = int.from_bytes(acquired.slots, "little")
            header = bytes(self._l1.memory.view(slot, limits.FRAME_HEADER_BYTES))
        finally:
            self._l1.core.release(acquired.lease)
        namespace = identify_namespace(header, digest)
        if namespace is None:
            return UnnamedNamespace.of(digest)
        self.note([namespace])
        return namespace

    def keys_of(self, names: Sequence[tuple[bytes, bytes]]) -> list[ObjectKey]:
        """The keys of pairs (digest, chunk hash). A namespace that nothing here names is an `UnnamedNamespace`."""
        found: dict[bytes, Namespace] = {}
        for digest, chunk_hash in names:
            if digest not in found:
                found[digest] = self.of_l1_object(digest, chunk_hash)
        if any(isinstance(namespace, UnnamedNamespace) for namespace in found.values()):
            self._read_ledgers()
            found = {digest: self._known.get(digest, namespace) for digest, namespace in found.items()}
        return [ObjectKey(found[digest], chunk_hash) for digest, chunk_hash in names]

    def _read_ledgers(self) -> None:
        for runner in self._runners:
            stored = [decode_known(encoded) for encoded in runner.ledger.native.namespaces()]
            self.note(served_namespace(namespace, runner.serde_name) for namespace in stored)


def stored_namespace(served: Namespace, serde: str) -> Namespace:
    """Where the serde of that name stores what requests call so; "" stores it as it is."""
    return replace(served, layout=f"{served.layout}{SERDE_MARK}{serde}") if serde else served


def served_namespace(stored: Namespace, serde: str) -> Namespace:
    """What requests call a namespace that the serde of that name has stored; others as they are."""
    if not serde or stored_serde(stored) != serde:
        return stored
    return Namespace(
        stored.model_name,
        stored.world_size,
        stored.rank,
        stored.object_group,
        stored.layout.removesuffix(f"{SERDE_MARK}{serde}"),
        stored.cache_salt,
    )
