"""Batches of events as they travel: JSON whose entries the native core writes."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from lmcache import _native
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, UnnamedNamespace
from lmcache.core.object_changes import ChangeSource, Run
from lmcache.fleet.messages import ResyncMark

_ENTRY_END = b"}"


def is_named(namespace: Namespace) -> bool:
    """Others cannot be asked for by model and salt, and are not told."""
    return not isinstance(namespace, UnnamedNamespace)


class Stream:
    """Numbers the batches of one incarnation of a server."""

    def __init__(self, instance_id: str, incarnation: int) -> None:
        self.instance_id = instance_id
        self.incarnation = incarnation
        self.seq = 0

    def changes(self, source: ChangeSource, run: Run, timestamp: float) -> bytes:
        entries = _native.listing_text(run.hashes, run.sizes_bytes, _texts(run.namespace))
        kind = "store" if run.added else "delete"
        namespace = run.namespace
        return self._batch(source, kind, timestamp, entries, namespace.digest.hex(), namespace.world_size)

    def capacity(self, source: ChangeSource, timestamp: float) -> bytes:
        return self._batch(source, "config", timestamp, capacity_bytes=source.capacity_bytes())

    def mark(self, mark: ResyncMark, source: ChangeSource, timestamp: float) -> bytes:
        """Marks a resync of all tiers."""
        return self._batch(source, "config", timestamp, mark=mark)

    def _batch(
        self,
        source: ChangeSource,
        kind: str,
        timestamp: float,
        entries: bytes = b"",
        namespace: str = "",
        world_size: int = 0,
        capacity_bytes: int = 0,
        mark: ResyncMark = "",
    ) -> bytes:
        self.seq += 1
        fields = {
            "instance_id": self.instance_id,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "event_type": kind,
            "tier": source.tier,
            "backend": source.backend,
            "entries": msgspec.Raw(b"[" + entries + b"]"),
            "shared": source.shared,
            "ts": timestamp,
            "capacity_bytes": capacity_bytes,
            "namespace": namespace,
            "resync": mark,
            "world_size": world_size,
        }
        return msgspec.json.encode(fields)


def request_body(batches: list[bytes]) -> bytes:
    return b'{"batches":[' + b",".join(batches) + b"]}"


@lru_cache(4096)
def _texts(namespace: Namespace) -> tuple[bytes, bytes, bytes]:
    """What surrounds hash and size of an entry."""
    scope = {
        "model_name": namespace.model_name,
        "kv_rank": namespace.rank,
        "object_group_id": namespace.object_group,
        "cache_salt": namespace.cache_salt,
    }
    between = b'",' + msgspec.json.encode(scope)[1:] + b',"size_bytes":'
    return b'{"key":{"chunk_hash_hex":"', between, _ENTRY_END


def split(run: Run, most: int) -> list[Run]:
    """Runs of at most `most` objects."""
    count = len(run.hashes) // CHUNK_HASH_BYTES
    if count <= most:
        return [run]
    return [
        Run(
            run.namespace,
            run.hashes[at * CHUNK_HASH_BYTES : (at + most) * CHUNK_HASH_BYTES],
            run.sizes_bytes[at * 8 : (at + most) * 8],
            run.added,
        )
        for at in range(0, count, most)
    ]
