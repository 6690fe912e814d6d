"""Lookups: tokens in, leased slots out.

L1 is asked first, and what it has is leased at once. What another engine is storing for this request is waited for. The
missing suffix is requested from the storage loop; the answer waits until that is final or the deadline has passed. A
lease that arrives after its lookup has ended is released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache._native import Fate
from lmcache.core import limits
from lmcache.core.hint import Hint
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import SLOT_BYTES, ChunkHashes, KeyBatch, NamespaceSet, SlotGrid
from lmcache.core.outcome import MissReason
from lmcache.core.rounding import div_ceil
from lmcache.errors import RemoteError
from lmcache.protocol.messages import (
    Append,
    AppendReply,
    Empty,
    EndSession,
    ErrorCode,
    Lookup,
    LookupKeys,
    LookupReply,
    Release,
    Source,
)
from lmcache.service.context import ServiceContext
from lmcache.service.handover_waits import HandoverWaits
from lmcache.service.instances import Instance, InstanceRegistry, Scheduler, TenantCounters
from lmcache.service.lookup_counts import LookupCounts
from lmcache.service.message_checks import check_deadline, check_source
from lmcache.service.miss_reasons import MissReasons
from lmcache.service.named_keys import NamedKeys
from lmcache.service.session import LeasedPrefix, Session
from lmcache.service.session_table import SessionTable
from lmcache.service.token_chain import Growth, TokenChain
from lmcache.telemetry.event_bus import EventBus
from lmcache.telemetry.events import LookupEvent
from lmcache.telemetry.tracing import TierTime, Trace
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult
from lmcache.transport.deferred import Deferred
from lmcache.transport.timers import Timer

log = logging.getLogger("lmcache.service")

MAX_LOOKUP_DEADLINE_SECONDS = 600.0
_GRACE_SECONDS = 0.25  # the storage loop keeps the deadline itself; this is for one that does not answer


class _Query(NamedTuple):
    """A lookup that was accepted."""

    instance: Instance
    session: Session
    counters: TenantCounters | None  # None: no lookup of a request's tokens, and not counted as one
    # Of the session when the lookup came, and of the partial chunk behind them; it may have grown when it is answered.
    hashes: bytes
    total_chunks: int  # that a hit may have
    namespaces: NamespaceSet | None  # None: not every rank has registered
    resumed: bool
    started: float
    owner: int  # of the leases
    recompute: bool = False
    source: Source | None = None  # that is not waited for yet, or has another server
    partial_tokens: int = 0  # of the last chunk; 0: it is a full one


@dataclass
class _PendingLookup:
    """A lookup that waits for chunks that are being stored, or loaded from L2."""

    query: _Query
    keys: KeyBatch  # of the longest hit that is possible
    l1_prefix: LeasedPrefix | None
    deferred: Deferred = field(default_factory=Deferred)
    timer: Timer | None = None
    stop: Callable[[], object] = lambda: None
    ended: bool = False

    @property
    def l1_chunks(self) -> int:
        return self.l1_prefix.chunks if self.l1_prefix is not None else 0


class LookupService:
    """Handlers of lookup, lookup_keys, append, release and end_session."""

    def __init__(
        self, context: ServiceContext, registry: InstanceRegistry, sessions: SessionTable, counts: LookupCounts
    ) -> None:
        self._registry = registry
        self._server_epoch = context.settings.server_epoch
        self._handovers = HandoverWaits(context, registry)
        self._sessions = sessions
        self._l1 = context.l1
        self._storage = context.storage if context.settings.has_l2 else None
        self._loop = context.loop
        self._events = context.events
        self._metrics = context.metrics
        self._clock = context.clock
        self._chunk_tokens = context.hasher.chunk_tokens
        self._lease_ttl_seconds = context.settings.lease_ttl_seconds
        self._counts = counts
        self._tracer = context.tracer
        self._reasons = MissReasons(context.l1)

    def publish(self) -> None:
        """Brings metrics that are read up to date. Any thread."""
        self._counts.publish()

    # ---- handlers ----------------------------------------------------------------------------------------------------
    def lookup(self, message: Lookup) -> LookupReply | Deferred:
        check_deadline(message.deadline_seconds)
        if message.source is not None:
            check_source(message.source)
        started = self._clock.monotonic()
        instance, scheduler = self._registry.scheduled(message.instance_id)
        plan = self._sessions.plan(instance, message)
        # A window or a state ends with a full chunk, so their hits do.
        has_room = plan.growth.chunks < limits.MAX_CHUNKS_PER_CALL
        partial_tokens = message.partial_tokens if has_room and not any(scheduler.profile.tail_tokens) else 0
        if plan.growth.chunks > limits.MAX_CHUNKS_PER_CALL:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A lookup covers at most {limits.MAX_CHUNKS_PER_CALL} chunks.")
        tenant = self._registry.tenant(instance, scheduler, message.cache_salt)
        namespaces = tenant.of_all_ranks()
        total = self._total_chunks(plan.growth, namespaces) + bool(partial_tokens)
        slots = total * len(namespaces) if namespaces is not None else 0
        if slots > limits.MAX_SLOTS_PER_CALL:
            raise RemoteError(
                ErrorCode.TOO_LARGE, f"A lookup covers at most {limits.MAX_SLOTS_PER_CALL} chunks times namespaces."
            )
        # While it waits its hashes are held twice, once for the engine and once for the storage loop.
        session = self._sessions.grow(plan, 2 * total * CHUNK_HASH_BYTES + slots * SLOT_BYTES)
        if self._tracer is not None and not session.trace_is_drawn:
            session.trace_is_drawn = True
            session.trace = self._tracer.begin(message.request_id, message.trace_parent)
        hashes = self._named(session, partial_tokens)
        query = _Query(
            *(instance, session, tenant.counters, hashes, total, namespaces, message.resumed, started),
            *(scheduler.owner, message.recompute, message.source, partial_tokens),
        )
        if namespaces is None or not total:
            reason = MissReason.INSTANCE_INCOMPLETE if total else MissReason.TOO_SHORT
            return self._answer(query, None, 0, reason)
        keys = KeyBatch(namespaces, ChunkHashes(query.hashes)[:total])
        return self._lease(query, keys, message.deadline_seconds)

    def lookup_keys(self, message: LookupKeys) -> LookupReply | Deferred:
        """Counted by the probe that went before."""
        check_deadline(message.deadline_seconds)
        started = self._clock.monotonic()
        _, worker = self._registry.worker(message.instance_id, message.worker_id)
        instance, scheduler = self._registry.scheduled(message.instance_id)
        named_keys = NamedKeys(message.cache_salt, message.hashes)
        namespaces = self._registry.tenant(instance, scheduler, message.cache_salt).of_rank(worker.profile)
        plan = self._sessions.plan_named(instance, message.request_id, named_keys)
        slots = named_keys.chunks * len(namespaces)
        session = self._sessions.grow(plan, 2 * named_keys.size_bytes + slots * SLOT_BYTES)
        query = _Query(
            *(instance, session, None, named_keys.hashes, named_keys.chunks, namespaces, False, started),
            owner=scheduler.owner,
        )
        keys = KeyBatch(namespaces, ChunkHashes(named_keys.hashes))
        return self._lease(query, keys, message.deadline_seconds)

    def _lease(
        self, query: _Query, keys: KeyBatch, deadline_seconds: float, deferred: Deferred | None = None
    ) -> LookupReply | Deferred:
        """Answers with the prefix that L1 has, or waits for the rest first. `deferred`: what a lookup that has waited
        already was answered with."""
        lease_deadline = self._clock.monotonic() + self._lease_ttl_seconds
        prefix = self._acquire(query.owner, keys, lease_deadline)
        chunks = prefix.chunks if prefix is not None else 0
        if chunks == keys.chunks:
            return self._answer(query, prefix, chunks, None)
        pending = _PendingLookup(query, keys, prefix, deferred or Deferred())
        if query.source is not None and self._await_source(pending, query.source, deadline_seconds):
            return pending.deferred
        if self._storage is None:
            return self._answer(query, prefix, chunks, MissReason.NOT_STORED)
        if query.recompute or deadline_seconds <= 0:
            reason = MissReason.RECOMPUTE_FASTER if query.recompute else MissReason.L2_DEADLINE
            return self._answer(query, prefix, chunks, reason)
        request = PrefetchRequest(
            owner=query.owner,
            lease_deadline=lease_deadline,
            keys=keys,
            first_chunk=chunks,
            deadline_seconds=min(deadline_seconds, MAX_LOOKUP_DEADLINE_SECONDS),
            hint=self._hint(keys, query.source) if query.source is not None else None,
        )
        return self._load(pending, request)

    def _total_chunks(self, growth: Growth, namespaces: NamespaceSet | None) -> int:
        """How many chunks a hit may have."""
        if namespaces is None or not namespaces.tail_chunks:
            return growth.chunks
        # The engine computes the last token itself, from a window or a state that ends before it.
        return min(growth.chunks, max(0, growth.token_count - 1) // self._chunk_tokens)

    def _named(self, session: Session, partial_tokens: int) -> bytes:
        """The hashes of the session's full chunks, then that of the partial chunk of so many tokens."""
        chain = session.chain
        return chain.hashes + (chain.partial_hash(partial_tokens) if isinstance(chain, TokenChain) else b"")

    def _acquire(self, owner: int, keys: KeyBatch, lease_deadline: float) -> LeasedPrefix | None:
        acquired = self._l1.acquire(owner, keys, lease_deadline)
        if not acquired.lease:
            return None
        slots = SlotGrid(acquired.slots, acquired.chunks)
        return LeasedPrefix(keys[: acquired.chunks], slots, (acquired.lease,), acquired.chunks)

    def append(self, message: Append) -> AppendReply:
        instance, scheduler = self._registry.scheduled(message.instance_id)
        plan = self._sessions.plan(instance, message)
        partial_tokens = message.partial_tokens if plan.growth.new_chunks < limits.MAX_CHUNKS_PER_CALL else 0
        if plan.growth.new_chunks > limits.MAX_CHUNKS_PER_CALL:
            raise RemoteError(ErrorCode.TOO_LARGE, f"A call covers at most {limits.MAX_CHUNKS_PER_CALL} chunks.")
        self._registry.tenant(instance, scheduler, message.cache_salt)
        session, first_chunk = self._sessions.grow(plan), plan.growth.first_chunk
        hashes = self._named(session, partial_tokens)
        return AppendReply(first_chunk, hashes[first_chunk * CHUNK_HASH_BYTES :], partial_tokens)

    def release(self, message: Release) -> Empty:
        instance, _ = self._registry.scheduled(message.instance_id)
        session = instance.leases.get(message.lease)
        if session is None or session.prefix is None:
            return Empty()
        prefix = session.prefix
        unreadable = sorted(set(message.unreadable_chunks))
        if unreadable and not 0 <= unreadable[0] <= unreadable[-1] < prefix.chunks:
            raise RemoteError(ErrorCode.BAD_REQUEST, f"The lease has {prefix.chunks} chunks; positions begin with 0.")
        self._sessions.release(instance, session)
        if message.recomputed:
            self._counts.count_miss(MissReason.RECOMPUTE_FASTER)
        if message.loaded_tokens and not unreadable:
            held_seconds = self._clock.monotonic() - session.leased_at
            self._counts.count_loaded(prefix, message.loaded_tokens, message.prefill_seconds, held_seconds)
        if unreadable:
            self._remove_unreadable(prefix, unreadable)
        return Empty()

    def end_session(self, message: EndSession) -> Empty:
        instance, scheduler = self._registry.scheduled(message.instance_id)
        session = instance.sessions.get(message.request_id)
        if session is not None:
            self._sessions.end(instance, session)
            if isinstance(session.chain, TokenChain):
                self._touch(instance, scheduler, session.chain)
        return Empty()

    def _touch(self, instance: Instance, scheduler: Scheduler, chain: TokenChain) -> None:
        """Chunks stored while the request ran get their place in the order: suffix evicted before prefix."""
        namespaces = self._registry.tenant(instance, scheduler, chain.cache_salt).of_all_ranks()
        slots = chain.chunks * len(namespaces) if namespaces is not None else 0
        if namespaces is not None and chain.chunks <= limits.MAX_CHUNKS_PER_CALL and slots <= limits.MAX_SLOTS_PER_CALL:
            self._l1.core.touch(namespaces.digests, chain.hashes, tails=namespaces.tails)

    def _remove_unreadable(self, prefix: LeasedPrefix, unreadable: list[int]) -> None:
        log.error(
            "%d of %d chunks in L1 did not verify while an engine copied them; they are removed",
            len(unreadable),
            prefix.chunks,
        )
        self._metrics.l1_read_failure.inc(len(unreadable))
        self._metrics.corrupt_frames.labels("l1").inc(len(unreadable))
        hashes = b"".join([prefix.keys.hashes[chunk] for chunk in unreadable])
        for namespace in prefix.keys.namespaces.namespaces:
            self._l1.core.remove(namespace.digest * len(unreadable), hashes, fate=Fate.CORRUPT)

    # ---- waiting for an engine that stores ---------------------------------------------------------------------------
    def _await_source(self, pending: _PendingLookup, source: Source, deadline_seconds: float) -> bool:
        """False: there is nothing to wait for at this server."""
        if source.server_epoch != self._server_epoch:
            return False
        announced = pending.keys[: min(pending.keys.chunks, self._announced_chunks(source))]
        seconds = min(source.wait_seconds, deadline_seconds, limits.MAX_HANDOVER_WAIT_SECONDS)
        give_up_at = self._clock.monotonic() + deadline_seconds

        def on_end() -> None:
            if pending.ended:
                return
            pending.ended, pending.query.session.cancel_lookup = True, None
            try:
                self._go_on(pending, give_up_at - self._clock.monotonic())
            finally:  # not before: somebody who needs room could take it in between
                self._release_l1_prefix(pending)

        stop = self._handovers.begin(announced, source.instance_id, seconds, on_end)
        if stop is None:
            return False
        pending.stop = stop
        pending.query.session.cancel_lookup = lambda: self._cancel(pending)
        return True

    def _go_on(self, pending: _PendingLookup, deadline_seconds: float) -> None:
        """From L1 again, which has more now, or as much as it will have."""
        try:
            query = pending.query._replace(source=None)
            reply: LookupReply | Deferred | RemoteError = self._lease(
                query, pending.keys, deadline_seconds, pending.deferred
            )
        except RemoteError as refusal:
            reply = refusal
        except Exception:  # the root of a request that has waited
            log.exception("A lookup that had waited failed")
            reply = RemoteError(ErrorCode.INTERNAL, "The lookup failed; see the server's log.")
        if not isinstance(reply, Deferred):
            pending.deferred.answer(reply)

    def _hint(self, keys: KeyBatch, source: Source) -> Hint | None:
        """For peers. None where the source has this server, or one that no server can ask. One that has not announced
        all is not waited for: it knows no positions, and would wait for what nobody stores."""
        if source.server_epoch == self._server_epoch or not source.peer_address:
            return None
        is_whole = self._announced_chunks(source) >= keys.chunks
        wait_seconds = min(source.wait_seconds, limits.MAX_HANDOVER_WAIT_SECONDS) if is_whole else 0.0
        return Hint(source.peer_address, source.server_epoch, wait_seconds)

    def _announced_chunks(self, source: Source) -> int:
        return div_ceil(source.tokens, self._chunk_tokens)

    # ---- waiting for L2 ----------------------------------------------------------------------------------------------
    def _load(self, pending: _PendingLookup, request: PrefetchRequest) -> Deferred:
        assert self._storage is not None

        def on_done(result: PrefetchResult) -> None:  # on the storage loop
            self._loop.post(lambda: self._finish(pending, result))

        pending.query.session.cancel_lookup = lambda: self._cancel(pending)
        pending.timer = self._loop.call_later(request.deadline_seconds + _GRACE_SECONDS, lambda: self._give_up(pending))
        try:
            pending.stop = self._storage.prefetch(request, on_done)
        except BaseException:  # gives back what the request holds; its root logs
            self._end(pending)
            self._release_l1_prefix(pending)
            raise
        return pending.deferred

    def _finish(self, pending: _PendingLookup, result: PrefetchResult) -> None:
        if pending.ended:
            if result.lease:
                self._l1.core.release(result.lease)
            return
        self._end(pending)
        query, prefix = pending.query, pending.l1_prefix
        if result.lease:
            slots = result.slots if prefix is None else prefix.slots.followed_by(result.slots)
            leases = (result.lease,) if prefix is None else (*prefix.leases, result.lease)
            prefix = LeasedPrefix(pending.keys[: slots.chunks], slots, leases, pending.l1_chunks)
        reason = None
        if pending.l1_chunks + result.chunks < query.total_chunks:
            reason = result.miss_reason or MissReason.NOT_STORED
        pending.deferred.answer(self._answer(query, prefix, pending.l1_chunks, reason, result.times))

    def _give_up(self, pending: _PendingLookup) -> None:
        """The deadline passed and the storage loop has not answered: L1 alone decides."""
        if pending.ended:
            return
        self._end(pending)
        pending.stop()
        self._metrics.timeouts.inc()
        reply = self._answer(pending.query, pending.l1_prefix, pending.l1_chunks, MissReason.L2_DEADLINE)
        pending.deferred.answer(reply)

    def _cancel(self, pending: _PendingLookup) -> None:
        self._end(pending)
        pending.stop()
        self._release_l1_prefix(pending)
        pending.deferred.answer(
            RemoteError(ErrorCode.CANCELLED, "The request was ended or looked up again before this lookup was final.")
        )

    def _end(self, pending: _PendingLookup) -> None:
        pending.ended = True
        pending.query.session.cancel_lookup = None
        self._sessions.hold(pending.query.instance, pending.query.session, 0)
        if pending.timer is not None:
            pending.timer.cancel()

    def _release_l1_prefix(self, pending: _PendingLookup) -> None:
        if pending.l1_prefix is not None:
            self._l1.core.release(pending.l1_prefix.number)

    # ---- answering ---------------------------------------------------------------------------------------------------
    def _answer(
        self,
        query: _Query,
        prefix: LeasedPrefix | None,
        l1_chunks: int,
        reason: MissReason | None,
        l2_times: Sequence[TierTime] = (),
    ) -> LookupReply:
        """Hands the prefix to the session, counts, and builds the reply. `l1_chunks` of the prefix were in L1."""
        if prefix is not None:
            self._sessions.lease(query.instance, query.session, prefix)
        else:
            self._sessions.hold(query.instance, query.session, 0)
        hit_chunks = prefix.chunks if prefix is not None else 0
        if reason is MissReason.NOT_STORED and query.namespaces is not None:
            missing = query.hashes[hit_chunks * CHUNK_HASH_BYTES : (hit_chunks + 1) * CHUNK_HASH_BYTES]
            reason = self._reasons.of(query.namespaces, missing)
        self._counts.count(
            query.session,
            query.counters,
            query.namespaces,
            query.total_chunks,
            hit_chunks,
            l1_chunks,
            reason,
            resumed=query.resumed,
            partial_tokens=query.partial_tokens,
        )
        if query.session.trace is not None:
            self._trace(query.session.trace, query, hit_chunks, reason, l2_times)
        if self._events is not None and self._events.active and isinstance(query.session.chain, TokenChain):
            self._publish(self._events, query, query.session.chain, hit_chunks)
        miss_reason = reason.value if reason is not None else ""
        number, slots = (prefix.number, prefix.slots.packed) if prefix is not None else (0, b"")
        return LookupReply(
            *(hit_chunks, l1_chunks, number, query.hashes, slots, miss_reason),
            partial_tokens=query.partial_tokens,
        )

    def _trace(
        self, trace: Trace, query: _Query, hit_chunks: int, reason: MissReason | None, l2_times: Sequence[TierTime]
    ) -> None:
        now_seconds = self._clock.monotonic()
        attributes = (
            ("requested_chunks", query.total_chunks),
            ("hit_chunks", hit_chunks),
            ("miss_reason", reason.value if reason is not None else ""),
        )
        l1_ended = min((time.started for time in l2_times), default=now_seconds)
        l1 = TierTime("l1", query.started, max(query.started, l1_ended))
        trace.child("mp.lookup_prefetch", query.started, now_seconds, attributes, (l1, *l2_times))

    def _publish(self, events: EventBus, query: _Query, chain: TokenChain, hit_chunks: int) -> None:
        """Publishes the full chunks alone, as readers of the log take each hash for one."""
        full_chunks = len(query.hashes) // CHUNK_HASH_BYTES - bool(query.partial_tokens)
        scheduler, ranks = query.instance.scheduler, query.instance.by_rank()
        events.publish(
            LookupEvent(
                wall_seconds=self._clock.wall(),
                request_id=query.session.request_id,
                model_name=scheduler.profile.model_name if scheduler is not None else "",
                chunk_tokens=self._chunk_tokens,
                total_tokens=chain.token_count,
                chunk_hashes=query.hashes[: full_chunks * CHUNK_HASH_BYTES],
                hit_chunks=min(hit_chunks, full_chunks),
                cache_salt=chain.cache_salt,
                tensors=tuple(tensor for _, rank in sorted(ranks.items()) for tensor in rank.tensors),
            )
        )
