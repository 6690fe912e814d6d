"""What the listing of a bucket tells: objects as columns, their namespaces, their age."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Mapping, Sequence

from lmcache.core.key import Namespace, UnnamedNamespace
from lmcache.core.limits import FRAME_HEADER_BYTES, MAX_L2_LISTED_NAMESPACES
from lmcache.l2.adapter import ObjectColumns
from lmcache.l2.adapters.remote_names import RemoteNames, identify_namespace
from lmcache.l2.adapters.s3_xml import Listed
from lmcache.l2.adapters.scan_order import FoundObjects

SLICE_OBJECTS = 4096
TRIALS = 4  # objects of a namespace whose headers are read before its name is given up
AT_ONCE = 64  # namespaces


class BucketContents(FoundObjects):
    """Objects of names in this scheme; others are neither read nor counted."""

    def __init__(self, names: RemoteNames, told: Mapping[bytes, Namespace] | None = None) -> None:
        """`told`: namespaces by their digests, of an earlier scan: their objects are not read again."""
        super().__init__()
        self._names = names
        self._told = told or {}
        self._namespaces: list[Namespace] = []
        self._position: dict[bytes, int] = {}  # of a digest in `_namespaces`
        self._untold: dict[bytes, list[bytes]] = {}  # digests of unnamed namespaces, and objects to read them from

    def add(self, listed: Sequence[Listed]) -> None:
        parse = self._names.parse
        for name, size_bytes, modified_ns in listed:
            if (parsed := parse(name)) is None:
                continue
            digest, chunk_hash = parsed
            position = self._position.get(digest)
            if position is None:
                if len(self._namespaces) >= MAX_L2_LISTED_NAMESPACES:
                    continue  # each is read for its name: what it holds counts only when it is asked for
                position = self._position[digest] = len(self._namespaces)
                namespace = self._told.get(digest)
                self._namespaces.append(namespace or UnnamedNamespace.of(digest))
                if namespace is None:
                    self._untold[digest] = []
            trials = self._untold.get(digest)
            if trials is not None and len(trials) < TRIALS and size_bytes > FRAME_HEADER_BYTES:
                trials.append(chunk_hash)
            self.append(position, chunk_hash, size_bytes, modified_ns)

    def candidates(self) -> list[str]:
        """Names of objects whose headers `identify` wants next; none when there is nothing left to try."""
        some = [digest for digest, trials in self._untold.items() if trials][:AT_ONCE]
        return [f"{self._names.folder(digest)}{self._untold[digest].pop().hex()}" for digest in some]

    def identify(self, name: str, header: memoryview) -> None:
        parsed = self._names.parse(name)
        assert parsed is not None, "it was made by candidates()"
        digest = parsed[0]
        if (namespace := identify_namespace(header, digest)) is not None:
            self._namespaces[self._position[digest]] = namespace
            del self._untold[digest]

    def told(self) -> dict[bytes, Namespace]:
        """The named ones, by their digests."""
        return {
            digest: self._namespaces[position]
            for digest, position in self._position.items()
            if digest not in self._untold
        }

    @staticmethod
    def header_buffer() -> memoryview:
        return memoryview(mmap.mmap(-1, FRAME_HEADER_BYTES))

    def youngest_first(self) -> array[int]:
        """The rows in the order that an inventory wants."""
        return self.order_rows({self._position[digest] for digest in self._untold})

    def told_as(self, order: array[int], newer_than_ns: int) -> Iterator[tuple[ObjectColumns, bool]]:
        """What was stored after that time as newer, then the others."""
        return self.slices(self._namespaces, order, newer_than_ns, SLICE_OBJECTS)
