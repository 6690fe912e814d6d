"""The namespaces that one instance and one cache salt make, and what is counted for the two."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.core.key import Namespace
from lmcache.l1.store import L1Store
from lmcache.protocol.messages import RegisterInstance, RegisterWorker
from lmcache.telemetry.metrics import Metrics


@dataclass(frozen=True)
class Keyspace:
    """Namespaces of one salt in the order of the wire: [rank][group], or [group] for one rank. `digests` 32 bytes each,
    `sizes` u64, packed.

    tail_chunks: per namespace, of how many chunks at the end of a hit it must have objects, 0 for all. Empty: no tails.
    `tails` are the same, u32."""

    namespaces: tuple[Namespace, ...]
    cache_salt: str
    digests: bytes
    sizes: bytes
    frame_bytes: tuple[int, ...]
    tail_chunks: tuple[int, ...]
    tails: bytes


def rank_keyspace(
    l1: L1Store, profile: RegisterInstance, worker: RegisterWorker, cache_salt: str, chunk_tokens: int
) -> Keyspace:
    namespaces = tuple(
        Namespace(profile.model_name, profile.kv_world_size, worker.kv_rank, group, layout, cache_salt)
        for group, layout in enumerate(worker.layouts)
    )
    frame_bytes = tuple(l1.frame_bytes(payload) for payload in worker.payload_bytes)
    tail_chunks = tuple(-(-tokens // chunk_tokens) for tokens in profile.tail_tokens)
    return _keyspace(cache_salt, namespaces, frame_bytes, tail_chunks if any(tail_chunks) else ())


def whole_keyspace(ranks: Sequence[Keyspace]) -> Keyspace:
    return _keyspace(
        ranks[0].cache_salt,
        tuple(namespace for rank in ranks for namespace in rank.namespaces),
        tuple(size for rank in ranks for size in rank.frame_bytes),
        tuple(chunks for rank in ranks for chunks in rank.tail_chunks),
    )


def _keyspace(
    cache_salt: str, namespaces: tuple[Namespace, ...], frame_bytes: tuple[int, ...], tail_chunks: tuple[int, ...]
) -> Keyspace:
    return Keyspace(
        namespaces,
        cache_salt,
        b"".join(namespace.digest for namespace in namespaces),
        struct.pack(f"<{len(frame_bytes)}Q", *frame_bytes),
        frame_bytes,
        tail_chunks,
        struct.pack(f"<{len(tail_chunks)}I", *tail_chunks),
    )


class TenantCounters:
    """The series of one model and salt, looked up once."""

    def __init__(self, metrics: Metrics, model_name: str, cache_salt: str) -> None:
        labels = (model_name, cache_salt)
        self.lookups = metrics.lookups.labels(*labels)
        self.requested = metrics.lookup_requested.labels(*labels)
        self.hit = metrics.lookup_hit.labels(*labels)
        self.hit_l1 = metrics.lookup_hit_l1.labels(*labels)
        self.hit_l2 = metrics.lookup_hit_l2.labels(*labels)
