"""Probes: which of the objects that an engine names itself there are. Nothing is leased and nothing is loaded."""

from __future__ import annotations

from lmcache.core.key_batch import ChunkHashes, KeyBatch, pack_keys
from lmcache.protocol.messages import ProbeKeys, ProbeKeysReply
from lmcache.service.context import ServiceContext
from lmcache.service.instances import InstanceRegistry, TenantCounters
from lmcache.service.lookup_counts import LookupCounts
from lmcache.service.message_checks import check_deadline, check_range
from lmcache.service.named_keys import count_hashes
from lmcache.tiering.prefetch_controller import IN_L1
from lmcache.transport.deferred import Deferred

_MAX_DEADLINE_SECONDS = 60.0
_MAX_OBJECT_TOKENS = 1 << 20
_GRACE_SECONDS = 0.25  # the storage loop keeps the deadline itself; this is for one that does not answer


class KeyProbeService:
    """Handler of probe_keys."""

    def __init__(self, context: ServiceContext, registry: InstanceRegistry, counts: LookupCounts) -> None:
        self._registry = registry
        self._core = context.l1.core
        self._storage = context.storage if context.settings.has_l2 else None
        self._loop = context.loop
        self._counts = counts

    def probe_keys(self, message: ProbeKeys) -> ProbeKeysReply | Deferred:
        check_deadline(message.deadline_seconds)
        check_range("number of tokens of an object", message.object_tokens, 0, _MAX_OBJECT_TOKENS)
        count_hashes(message.hashes)
        _, worker = self._registry.worker(message.instance_id, message.worker_id)
        instance, scheduler = self._registry.scheduled(message.instance_id)
        tenant = self._registry.tenant(instance, scheduler, message.cache_salt)
        keys = KeyBatch(tenant.of_rank(worker.profile), ChunkHashes(message.hashes))
        groups, chunks = len(keys.namespaces), keys.chunks
        names = [keys.key(group, chunk) for group in range(groups) for chunk in range(chunks)]
        resident = self._core.resident_each(*pack_keys(names))
        tiers = bytearray(IN_L1 if is_resident else 0 for is_resident in resident)
        counters = tenant.counters if message.object_tokens else None
        deadline_seconds = min(message.deadline_seconds, _MAX_DEADLINE_SECONDS)
        if self._storage is None or all(tiers) or deadline_seconds <= 0:
            return self._reply(keys, tiers, counters, message.object_tokens)
        return self._ask_l2(keys, tiers, counters, message.object_tokens, deadline_seconds)

    def _ask_l2(
        self,
        keys: KeyBatch,
        tiers: bytearray,
        counters: TenantCounters | None,
        object_tokens: int,
        deadline_seconds: float,
    ) -> Deferred:
        assert self._storage is not None
        deferred = Deferred()
        answered = False

        def answer() -> None:  # on the message loop
            nonlocal answered
            if not answered:
                answered = True
                timer.cancel()
                deferred.answer(self._reply(keys, tiers, counters, object_tokens))

        timer = self._loop.call_later(deadline_seconds + _GRACE_SECONDS, answer)
        self._storage.find(keys, tiers, deadline_seconds, lambda: self._loop.post(answer))
        return deferred

    def _reply(
        self, keys: KeyBatch, tiers: bytearray, counters: TenantCounters | None, object_tokens: int
    ) -> ProbeKeysReply:
        reply = ProbeKeysReply(bytes(tiers))
        if counters is not None:
            # A chunk is as far away as the farthest of its objects, and nowhere where one of them is.
            rows = [reply.tiers[chunk :: keys.chunks] for chunk in range(keys.chunks)]
            self._counts.count_probe(
                counters, keys.namespaces, [max(row) if all(row) else 0 for row in rows], object_tokens
            )
        return reply
