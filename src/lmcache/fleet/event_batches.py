"""Batches of events as they travel: columns in msgpack where the coordinator takes them, else JSON whose entries the
native core writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from lmcache import _native
from lmcache.core.key import CHUNK_HASH_BYTES, Namespace, UnnamedNamespace
from lmcache.core.limits import MAX_FLEET_EVENT_ENTRIES, REPORTED_ENTRIES, REPORTED_OBJECTS
from lmcache.core.object_changes import ChangeSource, Run
from lmcache.fleet.messages import EventsRequest, Objects, ResyncMark
from lmcache.http.client import JSON_TYPE

MSGPACK_TYPE = "application/msgpack"

_DECODER = msgspec.json.Decoder(EventsRequest)
_PACKED_DECODER = msgspec.msgpack.Decoder(EventsRequest)
_FIRST_PACKED = 0x80  # of the first bytes of msgpack's maps; JSON begins with a character of ASCII

_ENTRY_END = b"}"


def is_named(namespace: Namespace) -> bool:
    """Others cannot be asked for by model and salt, and are not told."""
    return not isinstance(namespace, UnnamedNamespace)


Fields = dict[str, Any]  # of a batch


class Stream:
    """Numbers the batches of one incarnation of a server."""

    def __init__(self, instance_id: str, incarnation: int) -> None:
        self.instance_id = instance_id
        self.incarnation = incarnation
        self.seq = 0
        self.packs = False  # the coordinator takes columns, in msgpack

    @property
    def most_objects(self) -> int:
        """Of a batch."""
        return MAX_FLEET_EVENT_ENTRIES if self.packs else REPORTED_ENTRIES

    @property
    def most_objects_sent(self) -> int:
        """Of a request."""
        return REPORTED_OBJECTS if self.packs else REPORTED_ENTRIES

    def changes(self, source: ChangeSource, run: Run, timestamp: float) -> Fields:
        namespace = run.namespace
        told: Fields = {"namespace": namespace.digest.hex(), "world_size": namespace.world_size}
        if self.packs:
            told["objects"] = _columns(run)
        else:
            entries = _native.listing_text(run.hashes, run.sizes_bytes, _texts(namespace))
            told["entries"] = msgspec.Raw(b"[" + entries + b"]")
        return self._batch(source, "store" if run.added else "delete", timestamp, **told)

    def capacity(self, source: ChangeSource, timestamp: float) -> Fields:
        return self._batch(source, "config", timestamp, capacity_bytes=source.capacity_bytes())

    def mark(self, mark: ResyncMark, source: ChangeSource, timestamp: float) -> Fields:
        """Marks a resync of all tiers."""
        return self._batch(source, "config", timestamp, resync=mark)

    def _batch(self, source: ChangeSource, kind: str, timestamp: float, **told: Any) -> Fields:
        self.seq += 1
        return {
            "instance_id": self.instance_id,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "event_type": kind,
            "tier": source.tier,
            "backend": source.backend,
            "entries": (),
            "shared": source.shared,
            "ts": timestamp,
            "capacity_bytes": 0,
            **told,
        }

    def request(self, batches: Sequence[Fields]) -> tuple[bytes, str]:
        """The body of a request, and its media type."""
        if self.packs:
            return msgspec.msgpack.encode({"batches": batches}), MSGPACK_TYPE
        return msgspec.json.encode({"batches": batches}), JSON_TYPE


def _columns(run: Run) -> Objects:
    namespace = run.namespace
    return Objects(
        *(namespace.model_name, namespace.rank, namespace.object_group, namespace.cache_salt, run.hashes),
        run.sizes_bytes if run.added else b"",
    )


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


def decode_events(body: bytes) -> EventsRequest:
    """JSON or msgpack. Fields that are not known are passed over: other servers may have more. msgspec.DecodeError
    where it is no list of batches."""
    try:
        events = (_PACKED_DECODER if body and body[0] >= _FIRST_PACKED else _DECODER).decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
    if any(batch.objects is not None and not batch.objects.fits for batch in events.batches):
        raise msgspec.ValidationError("columns of `objects` do not fit each other")
    return events
