"""The sessions of all instances, what each holds, and the memory that they may take.

A call is planned first (`plan`), which may refuse it and changes nothing. `grow` then refuses it where memory is short,
or applies all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lmcache._native import L1Core
from lmcache.clock import Clock
from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode
from lmcache.service.instances import Instance
from lmcache.service.message_checks import check_name
from lmcache.service.named_keys import NamedKeys
from lmcache.service.session import LeasedPrefix, Session, session_bytes
from lmcache.service.token_chain import Growth, PromptNotes, TokenChain, TokenMessage
from lmcache.telemetry.metrics import ServiceMetrics
from lmcache.telemetry.tracing import TierTime


class Plan(NamedTuple):
    """A message with tokens that fits its session, or begins one, as named keys do. Good until the session changes."""

    instance: Instance
    request_id: str
    session: Session | None
    chain: TokenChain | NamedKeys
    growth: Growth


class SessionTable:
    """Invariant: `size_bytes` is the sum over all instances, `Instance.session_bytes` over the sessions of one.

    All instances together have `MAX_SESSION_BYTES`. An instance may take what others leave. When memory is short,
    instances with more than an equal share give up sessions, so an instance within its share is never refused. Idle
    sessions go first, the least recently used before others, then those that hold something: their engines recompute.
    """

    def __init__(
        self,
        core: L1Core,
        hasher: ChunkHasher,
        metrics: ServiceMetrics,
        clock: Clock,
        prompts: PromptNotes | None = None,
    ) -> None:
        """`prompts` is told of the plain ones: a chunk of others is more than its tokens."""
        self._core = core
        self._clock = clock
        self._hasher = hasher
        self._metrics = metrics
        self._prompts = prompts
        self._holders: dict[str, Instance] = {}  # those that have sessions
        self.size_bytes = 0

    def plan(self, instance: Instance, message: TokenMessage) -> Plan:
        session = instance.sessions.get(message.request_id)
        chain = session.chain if session is not None else None
        if isinstance(chain, TokenChain) and chain.continues(message):
            pass
        elif message.first_token == 0:
            check_name("request id", message.request_id)
            chain = TokenChain(self._hasher, message.cache_salt, message.identity)
        else:
            raise RemoteError(ErrorCode.UNKNOWN_SESSION, "The request has no session; send its tokens from 0.")
        growth = chain.plan(message.first_token, message.tokens, message.extras, message.partial_tokens)
        return Plan(instance, message.request_id, session, chain, growth)

    def plan_named(self, instance: Instance, request_id: str, keys: NamedKeys) -> Plan:
        """In place of whatever that request had."""
        check_name("request id", request_id)
        return Plan(instance, request_id, instance.sessions.get(request_id), keys, keys.growth)

    def grow(self, plan: Plan, held_bytes: int | None = None) -> Session:
        """The request's session with the planned tokens in it; now the most recently used one.

        `held_bytes`: for a lookup, what it will hold at most. What the session's last lookup held is then given up."""
        instance, session = plan.instance, plan.session
        held_after = held_bytes if held_bytes is not None else session.held_bytes if session is not None else 0
        size_bytes = session_bytes(plan.request_id, plan.growth.size_bytes, held_after)
        for owner, victim in self._victims(instance, session, size_bytes):
            self.end(owner, victim)
        if session is None:
            session = Session(plan.request_id, plan.chain)
        elif held_bytes is not None:
            self._make_idle(instance, session)
        plan.chain.grow(plan.growth)
        if self._prompts is not None and isinstance(plan.chain, TokenChain) and plan.chain.is_plain:
            self._prompts.note(*plan.chain.new_chunks(plan.growth))
        session.chain = plan.chain
        instance.sessions.pop(session.request_id, None)
        instance.sessions[session.request_id] = session
        self._holders[instance.instance_id] = instance
        session.held_bytes = held_after
        self._count(instance, session, size_bytes)
        return session

    def hold(self, instance: Instance, session: Session, held_bytes: int) -> None:
        """From now on the session's lookup or leased prefix takes that much."""
        change = held_bytes - session.held_bytes
        session.held_bytes = held_bytes
        self._count(instance, session, session.counted_bytes + change)

    def lease(self, instance: Instance, session: Session, prefix: LeasedPrefix) -> None:
        """From now on the session holds the prefix, and the engine names it by `prefix.number`."""
        session.prefix = prefix
        session.leased_at = self._clock.monotonic()
        instance.leases[prefix.number] = session
        self.hold(instance, session, prefix.keys.hashes.size_bytes + prefix.slots.size_bytes)
        self._metrics.num_submitted_retrieves.inc()

    def release(self, instance: Instance, session: Session) -> None:
        """Gives back the prefix that the session holds, if it holds one."""
        prefix, session.prefix = session.prefix, None
        if prefix is None:
            return
        self.hold(instance, session, 0)
        del instance.leases[prefix.number]
        for lease in prefix.leases:
            self._core.release(lease)
        self._metrics.num_finished_retrieves.inc()
        now_seconds = self._clock.monotonic()
        self._metrics.lease.observe(now_seconds - session.leased_at)
        if session.trace is not None:
            chunks = (("chunks", prefix.chunks), ("chunks_from_l2", prefix.chunks - prefix.l1_chunks))
            l1 = TierTime("l1", session.leased_at, now_seconds)
            session.trace.child("mp.retrieve", session.leased_at, now_seconds, chunks, (l1,))

    def end(self, instance: Instance, session: Session) -> None:
        self._make_idle(instance, session)
        if session.trace is not None:
            session.trace.end()
        del instance.sessions[session.request_id]
        self._count(instance, session, 0)
        if not instance.sessions:
            del self._holders[instance.instance_id]

    def end_all(self, instance: Instance) -> None:
        """For an instance whose scheduler side has gone."""
        for session in list(instance.sessions.values()):
            self.end(instance, session)
        assert not instance.leases

    def _make_idle(self, instance: Instance, session: Session) -> None:
        """Ends what the session's last lookup waits for or holds."""
        if session.cancel_lookup is not None:
            session.cancel_lookup()
        self.release(instance, session)

    def check(self) -> None:
        """Asserts the invariant. O(sessions), for tests."""
        for instance in self._holders.values():
            sizes = [(session.size_bytes, session.counted_bytes) for session in instance.sessions.values()]
            assert sizes
            assert all(size == counted for size, counted in sizes)
            assert sum(size for size, _ in sizes) == instance.session_bytes
        assert self.size_bytes == sum(instance.session_bytes for instance in self._holders.values())

    def _count(self, instance: Instance, session: Session, size_bytes: int) -> None:
        change = size_bytes - session.counted_bytes
        session.counted_bytes = size_bytes
        instance.session_bytes += change
        self.size_bytes += change

    # ---- memory ------------------------------------------------------------------------------------------------------
    def _victims(self, instance: Instance, own: Session | None, size_bytes: int) -> list[tuple[Instance, Session]]:
        """What has to end so that `own` (None: a new session) may have that size. RemoteError when it may not."""
        growth_bytes = size_bytes - (own.counted_bytes if own is not None else 0)
        excess = self.size_bytes + growth_bytes - limits.MAX_SESSION_BYTES
        surplus = len(instance.sessions) + (own is None) - limits.MAX_SESSIONS_PER_INSTANCE
        if excess <= 0 and surplus <= 0:
            return []
        share = limits.MAX_SESSION_BYTES // len({*self._holders, instance.instance_id})
        above = instance.session_bytes + growth_bytes - share
        victims = []
        idle = (session for session in instance.sessions.values() if session.idle and session is not own)
        while surplus > 0 or (excess > 0 and above > 0):
            victim = next(idle, None)
            if victim is None:
                raise RemoteError(ErrorCode.TOO_MANY, "Too many requests are open; end some before you begin others.")
            victims.append((instance, victim))
            surplus -= 1
            excess -= victim.counted_bytes
            above -= victim.counted_bytes
        if excess > 0:
            victims += self._from_others(instance, share, excess)
        return victims

    def _from_others(self, instance: Instance, share: int, excess: int) -> Iterator[tuple[Instance, Session]]:
        """Sessions of those that have more than their share, first of whom has most."""
        others = [other for other in self._holders.values() if other is not instance]
        for other in sorted(others, key=lambda other: other.session_bytes, reverse=True):
            left = other.session_bytes
            for victim in sorted(other.sessions.values(), key=lambda session: not session.idle):
                if excess <= 0 or left <= share:
                    break
                yield other, victim
                left -= victim.counted_bytes
                excess -= victim.counted_bytes
