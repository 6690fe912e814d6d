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
    """Namespaces in the order of the wire: [rank][group], or [group] for one rank. `ids` u32, `sizes` u64, packed."""

    namespaces: tuple[Namespace, ...]
    ids: bytes
    sizes: bytes
    frame_bytes: tuple[int, ...]
    by_id: dict[int, Namespace]


def rank_keyspace(l1: L1Store, profile: RegisterInstance, worker: RegisterWorker, cache_salt: str) -> Keyspace:
    namespaces = tuple(
        Namespace(profile.model_name, profile.kv_world_size, worker.kv_rank, group, layout, cache_salt)
        for group, layout in enumerate(worker.layouts)
    )
    return _keyspace(l1, namespaces, tuple(l1.frame_bytes(payload) for payload in worker.payload_bytes))


def whole_keyspace(l1: L1Store, ranks: Sequence[Keyspace]) -> Keyspace:
    return _keyspace(
        l1,
        tuple(namespace for rank in ranks for namespace in rank.namespaces),
        tuple(size for rank in ranks for size in rank.frame_bytes),
    )


def _keyspace(l1: L1Store, namespaces: tuple[Namespace, ...], frame_bytes: tuple[int, ...]) -> Keyspace:
    ids = [l1.namespace_id(namespace) for namespace in namespaces]
    return Keyspace(
        namespaces,
        struct.pack(f"<{len(ids)}I", *ids),
        struct.pack(f"<{len(frame_bytes)}Q", *frame_bytes),
        frame_bytes,
        dict(zip(ids, namespaces, strict=True)),
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
