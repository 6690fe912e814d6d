"""What the scheduler side keeps of each request, and the parts that its lookups and its building of steps share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache.client.lookup_client import LookupClient, RequestSession
from lmcache.clock import Clock
from lmcache.core.limits import MAX_TOKENS_PER_SESSION
from lmcache.integration.engine.inflight_prefixes import InflightPrefixes
from lmcache.integration.engine.latency_model import LatencyModel, Tier
from lmcache.integration.engine.request_state import RequestState, RequestStateMachine
from lmcache.integration.vllm.block_pins import BlockPins
from lmcache.integration.vllm.handover import is_fetched_by_another, is_handed_over
from lmcache.integration.vllm.identity import content_spans
from lmcache.integration.vllm.lora_adapters import LoadedAdapter, LoraAdapters
from lmcache.integration.vllm.partial_chunks import partial_unit_tokens
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.protocol.messages import HelloReply, LookupReply
from lmcache.protocol.tokens import pack_tokens

if TYPE_CHECKING:
    from lmcache.integration.vllm.kv_events import KVEvents


@dataclass
class ActiveLoad:
    """A hit that workers copy into the engine's blocks. Its lease is kept until all of them have reported."""

    server: HelloReply
    answer: LookupReply
    tokens: int
    tokens_not_in_l1: int  # of the hit, when it was looked up
    blocks: frozenset[int]  # that are written
    began_at: float
    failed: bool = False
    unreadable_chunks: set[int] = field(default_factory=set)  # that were not what their keys say


class TrackedRequest(RequestStateMachine):
    """One request of the engine, from `on_new_request` until it has ended and its load has.

    With `lookahead_tokens` the session's tokens are those behind so many: a chunk that ends after n tokens has a name
    when n + `lookahead_tokens` tokens are known."""

    def __init__(
        self, request: Any, session: RequestSession, adapter: LoadedAdapter | None, lookahead_tokens: int = 0
    ) -> None:
        super().__init__(session.request_id)
        self.lookahead_tokens = lookahead_tokens
        self.request = request
        self.session = session
        self.adapter = adapter  # that the session's identity names
        self.prompt_tokens = session.token_count  # up to which chunks of the prompt have names
        self.stored_chunks = 0  # full ones: stored, being stored, or not to be stored
        self.stores_partial = False  # the partial chunk behind them is still to be stored
        self.worth_loading: bool | None = None  # the answer that is held; None: not decided
        self.load: ActiveLoad | None = None
        self.noted_at: HelloReply | None = None  # the server by whose chunks the next one counts
        self.noted_chunks = 0  # that KV events know of
        self.held_tokens: tuple[int, int] = (-1, 0)  # the step it was last looked at in, and what the engine had then
        self.was_in_step = False  # since the engine gave it blocks: before, an asynchronous load may be filling them
        self.is_to_be_fetched = is_fetched_by_another(request)  # as it came
        self._compared: tuple[Any, ...] = ()  # the state of the engine's request when its tokens were last compared

    def take_tokens(self, request: Any) -> None:
        """Adds what has been decoded so far, or put in by a streaming session, to the tokens that the server gets."""
        session = self.session
        known = session.token_count + self.lookahead_tokens
        if known < request.num_tokens <= MAX_TOKENS_PER_SESSION:
            session.tokens += pack_tokens(list(request.all_token_ids[known:]))
            session.contents = content_spans(request.mm_features, self.lookahead_tokens)
            session.partial_unit_tokens = 0  # it was the prompt's

    def tokens_were_replaced(self, request: Any) -> bool:
        """Whether tokens that the server has, or will get, are no longer the request's. Further input of a streaming
        session may replace what was decoded; vLLM 0.32 replaces computed tokens only when the session stops while it is
        preempted.

        All tokens are compared once after each step that the request was in and each input that it got, because
        nothing else changes them."""
        if not request.resumable:
            return False
        version = (request.num_tokens, request.num_prompt_tokens, request.arrival_time, self.session.token_count)
        if version == self._compared:
            return False
        first = self.lookahead_tokens
        if pack_tokens(list(request.all_token_ids[first : first + self.session.token_count])) != self.session.tokens:
            return True
        self._compared = version
        return False

    def was_scheduled(self) -> None:
        self._compared = ()
        self.was_in_step = False

    def stored_tokens(self, chunk_tokens: int) -> int:
        """How many tokens of the prompt, a partial chunk included, are stored or being stored."""
        session = self.session
        chunks = min(self.stored_chunks, self.prompt_tokens // chunk_tokens)
        has_all = session.partial is not None and not self.stores_partial and chunks == len(session.hashes)
        return chunks * chunk_tokens + (session.partial.tokens if has_all and session.partial is not None else 0)


@dataclass
class SchedulerParts:
    """What the parts of one scheduler side share."""

    options: SchedulerOptions
    lookups: LookupClient
    pins: BlockPins
    prefixes: InflightPrefixes
    latency: LatencyModel
    clock: Clock
    adapters: LoraAdapters = field(default_factory=LoraAdapters)
    requests: dict[str, TrackedRequest] = field(default_factory=dict)
    events: KVEvents | None = None  # None: the engine tells no router what it has
    storing: dict[str, TrackedRequest] = field(default_factory=dict)  # that have, or may get, chunks to store

    def __post_init__(self) -> None:
        self.block_tokens = math.lcm(*(group.block_tokens for group in self.options.groups))
        self.partial_unit_tokens = partial_unit_tokens(self.options.groups)

    @property
    def is_alone(self) -> bool:
        """Whether there is one request at most: then waiting is its own time, and nothing else distorts a measure."""
        return len(self.requests) <= 1

    def worth_loading(self, tier: Tier, tokens: int) -> bool:
        """While others run, a load is waited for beside their work, which computing would take time from."""
        return not self.options.load_or_recompute or not self.is_alone or self.latency.worth_loading(tier, tokens)

    def note_load(self, tier: Tier, tokens: int, seconds: float) -> None:
        if self.is_alone and tokens > 0:
            self.latency.loaded(tier, tokens, seconds)

    def fits(self, hello: HelloReply) -> bool:
        """Whether the server's chunks are whole blocks. Where they are not the workers take no orders, and log why."""
        return hello.chunk_tokens % self.block_tokens == 0

    def note_named(self, tracked: TrackedRequest, end_chunk: int, *, stored: bool = False) -> None:
        """For KV events: the first chunks of a request are at the server, or will be once they are `stored`."""
        if self.events is not None:
            self.events.note(tracked, end_chunk)
            if stored:
                self.events.expect(tracked.session.cache_salt, tracked.session.hashes[end_chunk - 1])

    def store_from(self, tracked: TrackedRequest, chunk: int) -> None:
        if self.options.stores:
            tracked.stored_chunks = chunk
            tracked.stores_partial = is_handed_over(tracked.request)
            self.storing[tracked.request_id] = tracked

    def computed_as_named(self, tracked: TrackedRequest) -> bool:
        """Whether the engine had what the request was named by, as far as its LoRA adapter goes."""
        lora, adapter = tracked.request.lora_request, tracked.adapter
        return lora is None or (adapter is not None and self.adapters.unchanged(lora, adapter))

    def announce(self, tracked: TrackedRequest) -> None:
        """The request has blocks: others wait for what it computes and stores."""
        session = tracked.session
        if (
            session.server is not None
            and self.options.stores
            and tracked.request_id in self.storing
            and self.computed_as_named(tracked)
        ):
            end_chunk = tracked.prompt_tokens // session.server.chunk_tokens
            self.prefixes.on_scheduled(session, tracked.stored_chunks, end_chunk)

    def stores_no_more(self, tracked: TrackedRequest) -> None:
        """Nothing more of the request is stored, so nobody waits for it."""
        tracked.session.partial = None
        self.storing.pop(tracked.request_id, None)
        self.prefixes.on_ended(tracked.request_id)

    def forget(self, tracked: TrackedRequest) -> None:
        """The request is over: the server forgets its session, and every lease."""
        tracked.move(RequestState.ENDED)
        del self.requests[tracked.request_id]
        self.stores_no_more(tracked)
        self.lookups.end(tracked.session)
