"""Decides what of a request is loaded: asks the server early, takes the answer in time, or lets the engine compute."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from lmcache.client.lookup_client import Progress
from lmcache.core.key_batch import SLOT_BYTES
from lmcache.integration.engine.inflight_prefixes import PrefixState
from lmcache.integration.engine.latency_model import Tier
from lmcache.integration.engine.request_state import RequestState
from lmcache.integration.vllm.handover import is_fetched_by_another, is_handed_over
from lmcache.integration.vllm.tracked_request import SchedulerParts, TrackedRequest

log = logging.getLogger("lmcache.vllm")

STEP_WAIT_SECONDS = 0.002  # all lookups of one scheduler step together
LOOKUP_PATIENCE_SECONDS = 0.004  # while other requests run, wait only for a lookup younger than this


class HitLookups:
    """Belongs to the scheduler's thread, which it holds up for `STEP_WAIT_SECONDS` a step at most."""

    def __init__(self, parts: SchedulerParts, *, takes_decoded: bool) -> None:
        """`takes_decoded`: a preempted request is looked up with what it has decoded."""
        self._parts = parts
        self._lookups = parts.lookups
        self._takes_decoded = takes_decoded
        self._needs_the_end = any(group.tail_tokens for group in parts.options.groups)
        self._wait_seconds = STEP_WAIT_SECONDS
        self._engine_busy = False
        self._another_fetches = False  # is known of the first request that it was to fetch

    def step_begins(self, *, busy: bool) -> None:
        """`busy`: the engine computes in this step."""
        self._wait_seconds = STEP_WAIT_SECONDS
        self._engine_busy = busy

    def ask(self, tracked: TrackedRequest) -> bool:
        """False: there is no server to ask, or its chunks do not fit."""
        session, hello = tracked.session, self._lookups.client.hello
        previous = session.server
        if hello is None or not self._parts.fits(hello):
            return False
        if not (self._look_up(tracked) if self._may_load(tracked) else self._lookups.append(session)):
            return False
        if session.server is not previous:  # it holds nothing of this request, and its chunks may be others
            self._parts.store_from(tracked, 0)
        return True

    def _may_load(self, tracked: TrackedRequest) -> bool:
        """Not what another connector fetches: that would wait for our answer, and the KV would come twice."""
        if self._another_fetches and is_fetched_by_another(tracked.request):
            return False
        return self._parts.options.loads

    def note_fetch(self, tracked: TrackedRequest) -> None:
        """After another connector may have begun to fetch. What routers and other engines tell is no sign that there is
        one."""
        if tracked.is_to_be_fetched and not is_fetched_by_another(tracked.request):
            self._another_fetches = True

    def _look_up(self, tracked: TrackedRequest) -> bool:
        # What another engine has handed over is loaded: that engine was to compute it, and not this one.
        tracked.worth_loading = True if tracked.session.source is not None else None
        recompute = not (tracked.worth_loading or self._parts.worth_loading(Tier.L2, tracked.session.token_count))
        deadline_seconds = self._parts.options.lookup_timeout_seconds
        if not self._lookups.lookup(tracked.session, recompute=recompute, deadline_seconds=deadline_seconds):
            return False
        tracked.move(RequestState.LOOKING_UP)
        return True

    def matched_tokens(self, tracked: TrackedRequest, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: not known yet."""
        if not self._may_load(tracked):
            return None if self._awaits_names(tracked) else 0
        self._parts.prefixes.on_waiting(tracked.request_id)
        progress = self._answered(tracked, request)
        if progress is Progress.ANSWERED:
            prefix = self._parts.prefixes.state_for(tracked.session, computed_tokens)
            if prefix is PrefixState.COMING:
                return None
            if prefix is PrefixState.STORED:
                self._drop_answer(tracked)
                progress = self._answered(tracked, request)
        if progress is Progress.WAITING:
            return None
        if progress is Progress.FAILED:
            return 0
        hit_tokens = self._hit_tokens(tracked)
        if self._needs_the_end and hit_tokens >= request.num_tokens:
            return 0  # computing the last token needs what is before it, not what is at the end of the hit
        external_tokens = hit_tokens - computed_tokens
        if external_tokens <= 0:
            return 0
        if tracked.worth_loading is None:
            tracked.worth_loading = self._parts.worth_loading(Tier.L1, external_tokens)
        return external_tokens if tracked.worth_loading else 0

    def take_late_answer(self, tracked: TrackedRequest) -> None:
        """Takes the answer of a lookup that nobody waits for: its hashes name what is stored, its lease is given
        back."""
        progress = self._lookups.take_answer(tracked.session)
        if progress is not Progress.WAITING:
            self._lookups.give_back(tracked.session)
            tracked.move(RequestState.RECOMPUTING)

    def _awaits_names(self, tracked: TrackedRequest) -> bool:
        """Whether a prompt that is computed for another engine waits to be named: the first step of it may be the last,
        and is to store it. Ends with the answer to the append, its deadline, or a server that answers nothing."""
        session, clock = tracked.session, self._parts.clock
        if session.append is None or not is_handed_over(tracked.request):
            return False
        started = clock.monotonic()
        progress = self._lookups.take_hashes(session, 0.0 if self._engine_busy else self._wait_seconds)
        self._wait_seconds = max(0.0, self._wait_seconds - (clock.monotonic() - started))
        return progress is Progress.WAITING and self._lookups.server_answers(session)

    def _answered(self, tracked: TrackedRequest, request: Any) -> Progress:
        """Asks, unless that was done, and takes the answer within what is left of this step's budget for waiting."""
        if tracked.state is RequestState.ANSWERED and tracked.session.server is not self._lookups.client.hello:
            self._drop_answer(tracked)
        if tracked.state is RequestState.ANSWERED:
            return Progress.ANSWERED
        if tracked.state is RequestState.IDLE:
            if self._takes_decoded:
                tracked.take_tokens(request)
            if self._too_short(tracked) or not self.ask(tracked):
                return Progress.FAILED
        return self._await_answer(tracked) if tracked.state is RequestState.LOOKING_UP else Progress.FAILED

    def _await_answer(self, tracked: TrackedRequest) -> Progress:
        session, clock = tracked.session, self._parts.clock
        started = clock.monotonic()
        wait_seconds = self._wait_seconds
        if self._engine_busy:
            wait_seconds = min(wait_seconds, session.looked_up_at + LOOKUP_PATIENCE_SECONDS - started)
        progress = self._lookups.take_answer(session, max(0.0, wait_seconds))
        waited_until = clock.monotonic()
        self._wait_seconds = max(0.0, self._wait_seconds - (waited_until - started))
        if progress is Progress.ANSWERED:
            tracked.move(RequestState.ANSWERED)
            assert session.answer is not None and session.server is not None
            self._parts.note_named(tracked, session.full_hit_chunks)
            from_l2 = session.hit_tokens - session.answer.chunks_l1 * session.server.chunk_tokens
            if session.source is None:  # else it may have waited for the store of another engine
                self._parts.note_load(Tier.L2, from_l2, waited_until - session.looked_up_at)
        elif progress is Progress.FAILED:
            tracked.move(RequestState.RECOMPUTING)
        elif not self._lookups.server_answers(session):
            log.warning("The LMCache server does not answer: request %s goes on uncached", tracked.request_id)
            tracked.move(RequestState.LATE)
            return Progress.FAILED
        return progress

    def _drop_answer(self, tracked: TrackedRequest) -> None:
        """Its lease ends with the session's next lookup, or with the session; another server has none of it. What
        another engine stores was waited for already."""
        session = tracked.session
        session.answer = None
        if session.source is not None:
            session.source = msgspec.structs.replace(session.source, wait_seconds=0.0)
        tracked.move(RequestState.IDLE)

    def _too_short(self, tracked: TrackedRequest) -> bool:
        hello = self._lookups.client.hello
        session = tracked.session
        if hello is None or session.token_count >= hello.chunk_tokens:
            return False
        return not session.partial_tokens(hello.chunk_tokens)

    def _hit_tokens(self, tracked: TrackedRequest) -> int:
        """Tokens of the answer that is held; 0 where it contradicts itself."""
        session = tracked.session
        answer, hit_tokens = session.answer, session.hit_tokens
        assert answer is not None
        slots = self._parts.options.ranks * len(self._parts.options.groups) * answer.chunks
        has_names = bool(hit_tokens) == bool(answer.chunks)
        if not has_names or hit_tokens > session.token_count or len(answer.slots) != slots * SLOT_BYTES:
            log.error("The answer to the lookup of request %s does not add up: ignored", tracked.request_id)
            return 0
        return hit_tokens
