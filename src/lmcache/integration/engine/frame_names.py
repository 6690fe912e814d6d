"""The namespaces of one worker's frames, by cache salt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache import _native
from lmcache.core.key import Namespace
from lmcache.core.layout import KVLayout

_MAX_SALTS_KEPT = 256


@dataclass(frozen=True)
class WorkerIdentity:
    instance_id: str
    worker_id: int
    model_name: str
    kv_ranks: int
    kv_rank: int
    stores: bool
    lossy_serde: str = ""  # what the engine accepts to load, beside exact KV


@dataclass(frozen=True)
class FrameName:
    """What names the frames of one object group: the namespace's digest, and a header that lacks hash and checksums."""

    digest: bytes
    template: bytes


class FrameNames:
    """Thread-safe."""

    def __init__(self, identity: WorkerIdentity, names: Sequence[str], layouts: Sequence[KVLayout]) -> None:
        """`names`: of the layouts, in namespaces."""
        self._identity = identity
        self._layouts = tuple(zip(names, layouts, strict=True))
        self._lock = threading.Lock()
        self._names: OrderedDict[str, tuple[FrameName, ...]] = OrderedDict()

    def of(self, salt: str) -> tuple[FrameName, ...]:
        """One per object group."""
        names = self._names.get(salt)
        if names is None:
            names = tuple(self._name(group, *layout, salt) for group, layout in enumerate(self._layouts))
            with self._lock:
                self._names[salt] = names
                if len(self._names) > _MAX_SALTS_KEPT:
                    self._names.popitem(last=False)
        return names

    def _name(self, group: int, layout_name: str, layout: KVLayout, salt: str) -> FrameName:
        identity = self._identity
        namespace = Namespace(identity.model_name, identity.kv_ranks, identity.kv_rank, group, layout_name, salt)
        template = _native.frame_template(namespace.encode(), namespace.digest, layout.payload_bytes)
        return FrameName(namespace.digest, template)
