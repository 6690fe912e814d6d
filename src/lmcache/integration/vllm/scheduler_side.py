"""The half of the connector that lives in vLLM's scheduler: decides what is loaded and stored, and by which blocks.

Every step asks it about waiting requests, so nothing here waits beyond a small budget a step. Rules that the rest
relies on:

- A load is announced to vLLM as asynchronous. vLLM keeps its blocks until every worker has reported the end of the
  copy, also when the request is aborted; the lease on the source is kept as long.
- The source blocks of a store are pinned in vLLM's block pool until every worker has reported that it reads them no
  more. So no preemption, abort or sliding window can hand them to another request meanwhile, and nobody has to wait
  for a copy.
"""

from __future__ import annotations

import logging
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache.clock import Clock, SystemClock
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_NAME_BYTES, MAX_TOKENS_PER_SESSION
from lmcache.integration.vllm.adapters import Adapter, Adapters
from lmcache.integration.vllm.chunk_blocks import NOT_WRITTEN, States, blocks_to_store, group_load, restores_states
from lmcache.integration.vllm.costs import Costs, Stopwatch, Tier
from lmcache.integration.vllm.decoded import DecodedChunks, lost_tokens, take_tokens
from lmcache.integration.vllm.groups import CacheGroup
from lmcache.integration.vllm.identity import is_cacheable, request_identity
from lmcache.integration.vllm.lookup import Asker, Progress, Question
from lmcache.integration.vllm.makers import Ahead, Makers
from lmcache.integration.vllm.orders import LoadOrder, StepOrders, StoreOrder, WorkerReport
from lmcache.integration.vllm.pins import Pins
from lmcache.protocol.tokens import pack_tokens

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.integration.vllm.worker_side import WorkerSide
    from lmcache.protocol.messages import HelloReply

log = logging.getLogger("lmcache.vllm")

STEP_WAIT_SECONDS = 0.002  # all lookups of one scheduler step together
NO_SERVER = b""  # workers report a load that names it as failed
LOOKUP_PATIENCE_SECONDS = 0.004  # while other requests run, wait only for a lookup younger than this
STORES_END_SECONDS = 5.0  # what a reset of the engine's caches waits for stores that read blocks
_STORES_LOOK_SECONDS = 0.1
_GENERATION_BYTES = 16


@dataclass
class _Request:
    question: Question
    request: Any  # vLLM's
    prompt_tokens: int
    adapter: Adapter | None = None  # that the question's identity names
    stored_chunks: int = 0  # stored, being stored, or not to be stored
    chunks_in_l1: int = 0  # of the hit that is being loaded
    hit_chunks: int = 0
    loading_lease: int = 0
    loading_from: HelloReply | None = None  # the server life of the lease
    loading_blocks: frozenset[int] = frozenset()
    loading: bool = False
    load_failed: bool = False
    load_began: float = 0.0
    load_tokens: int = 0
    worth_loading: bool | None = None  # the hit that is held; None: not decided
    unreadable: set[int] = field(default_factory=set)  # chunks of the load that were not what their keys say
    finished: bool = False


class SchedulerSide:
    def __init__(
        self,
        client: Client,
        *,
        instance_id: str,
        groups: Sequence[CacheGroup],
        ranks: int,
        workers: int,
        loads: bool = True,
        stores: bool = True,
        save_decode: bool = False,
        load_or_recompute: bool = True,
        media_have_names: bool = True,
        await_stores: bool = False,
        worker_here: Callable[[], WorkerSide | None] = lambda: None,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`ranks` hold distinct KV; `workers` report, of which several may hold the same KV. `loads`: hits are used;
        `stores`: what is computed is stored. `save_decode`: chunks that decoding fills, too. `load_or_recompute`: a hit
        that would be slower than computing is not loaded. `media_have_names`: requests with images ... are cached.
        `await_stores`: a step ends when its stores have read their blocks, because it may be the last one.
        `worker_here`: the only worker, if it lives in this process."""
        self._clock = clock or SystemClock()
        self._client = client
        self._groups = tuple(groups)
        self._needs_the_end = any(group.tail_tokens for group in groups)
        self._ranks = ranks
        self._media_have_names = media_have_names
        self._uses_hits, self._stores = loads, stores
        self._asker = Asker(client, instance_id, self._clock)
        self._pins = Pins(workers, self._clock)
        self._makers = Makers(workers, self._clock)
        self._decoded = DecodedChunks(self._asker, self._pins) if save_decode and stores else None
        self._costs = Costs() if load_or_recompute else None
        self._stopwatch = Stopwatch(self._clock)
        self._requests: dict[str, _Request] = {}
        self._storing: dict[str, _Request] = {}  # those that have, or may get, chunks that are not stored yet
        self._loads: list[LoadOrder] = []
        self._step_wait_seconds = STEP_WAIT_SECONDS
        self._engine_busy = False
        self._block_table: Any = None
        self._await_stores = await_stores
        self._worker_here = worker_here
        self._random_bytes = random_bytes
        self._adapters = Adapters()
        self._generation = b""  # of the weights; those that the engine started with have none

    def bind(self, block_pool: Any, block_table: Any) -> None:
        """`block_table(request id)` gives the block ids of each group."""
        self._pins.bind(block_pool)
        self._block_table = block_table

    # ---- questions ---------------------------------------------------------------------------------------------------
    def on_new_request(self, request: Any) -> None:
        """Asks early, so that the answer is here when the request is scheduled."""
        prompt = request.prompt_token_ids
        cacheable = is_cacheable(request, media_have_names=self._media_have_names)
        if request.request_id in self._requests or not cacheable:
            return
        salt = request.cache_salt or ""
        if (
            len(prompt) > MAX_TOKENS_PER_SESSION
            or len(request.request_id.encode()) > MAX_NAME_BYTES
            or len(salt.encode()) > MAX_NAME_BYTES
        ):
            return
        hello = self._client.hello
        if hello is not None and not self._fits(hello):
            return
        short = hello is not None and len(prompt) < hello.chunk_tokens
        if short and self._decoded is None:
            return
        adapter = self._adapter(request)
        if request.lora_request is not None and adapter is None:
            return
        question = Question(
            request.request_id,
            salt,
            self._identity(request, adapter),
            pack_tokens(prompt),
            tuple(request.mm_features),
        )
        state = self._requests[request.request_id] = _Request(question, request, len(prompt), adapter)
        if self._decoded is not None:
            self._storing[request.request_id] = state
        if not short:
            self._ask(state)

    def _adapter(self, request: Any) -> Adapter | None:
        """None: the request has none, or it is not known which."""
        lora = request.lora_request
        return self._adapters.named(lora) if lora is not None else None

    def _identity(self, request: Any, adapter: Adapter | None) -> bytes:
        content = adapter.content if adapter is not None else None
        return request_identity(request, content or "", self._generation)

    def _computed_as_named(self, state: _Request) -> bool:
        """Whether the engine had what the request was named by, as far as its adapter goes."""
        lora = state.request.lora_request
        return lora is None or (state.adapter is not None and self._adapters.unchanged(lora, state.adapter))

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond `computed_tokens` that will be loaded, asynchronously); (None, False): not known yet."""
        state = self._requests.get(request.request_id)
        if state is None or state.load_failed or state.loading or request.skip_reading_prefix_cache:
            return 0, False
        question = state.question
        if lost_tokens(question, request):
            self._forget(question.request_id, state)
            return 0, False
        if not self._uses_hits:
            return 0, False
        self._makers.pauses(question.request_id)
        progress = self._answered(state, request)
        if progress is Progress.ANSWERED:
            ahead = self._makers.ahead_of(question, computed_tokens)
            if ahead is Ahead.COMING:
                return None, False
            if ahead is Ahead.STORED:
                question.reply = None
                progress = self._answered(state, request)
        if progress is Progress.WAITING:
            return None, False
        if progress is Progress.FAILED:
            return 0, False
        hit_tokens = self._hit_tokens(state)
        if self._needs_the_end and hit_tokens >= request.num_tokens:
            return 0, False  # computing the last token needs what is before it, not what is at the end of the hit
        external_tokens = hit_tokens - computed_tokens
        if external_tokens <= 0:
            return 0, False
        if state.worth_loading is None:
            state.worth_loading = self._worth_loading(Tier.L1, external_tokens)
        if not state.worth_loading:
            return 0, False
        return external_tokens, True

    def _answered(self, state: _Request, request: Any) -> Progress:
        """Asks, unless that was done, and takes the answer within what is left of this step's budget for waiting."""
        question = state.question
        if question.reply is not None and question.hello is not self._client.hello:
            question.reply = None  # its server is gone
        if question.given_up:
            return Progress.FAILED
        if question.reply is not None:
            return Progress.ANSWERED
        if question.pending is None:
            if self._decoded is not None:
                take_tokens(question, request)  # of a request that was preempted while it decoded
            if self._too_short(question) or not self._ask(state):
                return Progress.FAILED
        progress = self._settle(question)
        if progress is Progress.FAILED:
            question.given_up = True
        return progress

    def _too_short(self, question: Question) -> bool:
        hello = self._client.hello
        return hello is not None and len(question.tokens) // 4 < hello.chunk_tokens

    def _fits(self, hello: HelloReply) -> bool:
        """Where the server's chunks are not whole blocks the workers take no orders, and have said why."""
        return all(hello.chunk_tokens % group.block_tokens == 0 for group in self._groups)

    def _ask(self, state: _Request) -> bool:
        former, hello = state.question.hello, self._client.hello
        if hello is None or not self._fits(hello):
            return False
        if not self._ask_for_hits(state) if self._uses_hits else not self._asker.append(state.question):
            return False
        if state.question.hello is not former:  # a server that holds nothing of this request, perhaps in other chunks
            self._store_from(state, 0)
        return True

    def _ask_for_hits(self, state: _Request) -> bool:
        state.worth_loading = None
        recompute = not self._worth_loading(Tier.L2, len(state.question.tokens) // 4)
        return self._asker.ask(state.question, recompute=recompute)

    def _store_from(self, state: _Request, chunk: int) -> None:
        if self._stores:
            state.stored_chunks = chunk
            self._storing[state.question.request_id] = state

    @property
    def _alone(self) -> bool:
        """Whether one request is there at most: then waiting is its own time, and nothing else distorts a measure."""
        return len(self._requests) <= 1

    def _worth_loading(self, tier: Tier, tokens: int) -> bool:
        """While others run, a load is waited for beside their work, which computing would take time from."""
        return self._costs is None or not self._alone or self._costs.worth_loading(tier, tokens)

    def _settle(self, question: Question) -> Progress:
        """Within what is left of this step's budget for waiting."""
        started = self._clock.monotonic()
        wait_seconds = self._step_wait_seconds
        if self._engine_busy:
            wait_seconds = min(wait_seconds, question.sent_at + LOOKUP_PATIENCE_SECONDS - started)
        progress = self._asker.settle(question, max(0.0, wait_seconds))
        now = self._clock.monotonic()
        self._step_wait_seconds = max(0.0, self._step_wait_seconds - (now - started))
        reply = question.reply
        if progress is Progress.ANSWERED and reply is not None and question.hello is not None:
            from_l2 = (reply.chunks - reply.chunks_l1) * question.hello.chunk_tokens
            if self._costs is not None and self._alone and from_l2 > 0:
                self._costs.loaded(Tier.L2, from_l2, now - question.sent_at)
        return progress

    def _hit_tokens(self, state: _Request) -> int:
        reply, hello = state.question.reply, state.question.hello
        assert reply is not None and hello is not None
        slots = self._ranks * len(self._groups) * reply.chunks
        if (
            reply.chunks * hello.chunk_tokens > len(state.question.tokens) // 4
            or len(reply.hashes) < reply.chunks * CHUNK_HASH_BYTES
            or len(reply.slots) != slots * 8
        ):
            log.error("The answer to the lookup of request %s does not add up: ignored", state.question.request_id)
            return 0
        return reply.chunks * hello.chunk_tokens

    # ---- loads -------------------------------------------------------------------------------------------------------
    def after_allocation(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        state = self._requests.get(request.request_id)
        if state is None:
            return
        question, reply = state.question, state.question.reply
        if reply is not None:
            state.stored_chunks = max(state.stored_chunks, reply.chunks)
        if question.hello is not None and self._stores:
            self._makers.begins(question, state.stored_chunks, state.prompt_tokens // question.hello.chunk_tokens)
        if reply is None:
            return
        assert question.hello is not None
        if external_tokens <= 0:
            self._asker.give_back(question, recomputed=state.worth_loading is False)
            return
        chunk_tokens = question.hello.chunk_tokens
        start_token = reply.chunks * chunk_tokens - external_tokens
        loads = [
            group_load(group, ids, start_token, reply.chunks, chunk_tokens, self._pins.null_block_id)
            for group, ids in zip(self._groups, block_ids, strict=True)
        ]
        self._loads.append(
            LoadOrder(
                question.request_id,
                question.boot_token if restores_states(self._groups, loads) else NO_SERVER,
                question.cache_salt,
                reply.chunks,
                reply.hashes,
                reply.slots,
                tuple(loads),
                reply.lease,
            )
        )
        state.loading = True
        state.load_began, state.load_tokens = self._clock.monotonic(), external_tokens
        state.hit_chunks, state.chunks_in_l1 = reply.chunks, reply.chunks_l1
        state.loading_lease, state.loading_from = reply.lease, question.hello
        state.loading_blocks = frozenset(
            block for load in loads for block in array("q", load.blocks) if block != NOT_WRITTEN
        )
        question.reply = None

    def tokens_not_in_l1(self, request_id: str) -> int:
        """Of the hit that a request is loading, how many tokens L1 did not have when it was asked."""
        state = self._requests.get(request_id)
        if state is None or not state.loading or state.question.hello is None:
            return 0
        return (state.hit_chunks - state.chunks_in_l1) * state.question.hello.chunk_tokens

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step_orders(self, scheduler_output: Any) -> StepOrders:
        orders = StepOrders(loads=self._loads, await_stores=self._await_stores)
        self._loads = []
        self._step_wait_seconds = STEP_WAIT_SECONDS
        self._engine_busy = scheduler_output.total_num_scheduled_tokens > 0
        self._stopwatch.step_begins(scheduler_output.total_num_scheduled_tokens)
        if self._decoded is not None:
            orders.stores += self._decoded.orders(idle=not self._engine_busy)
        offered = scheduler_output.kv_connector_block_state
        offers = offered.boundary_state_offloads if offered is not None else {}
        if self._storing:
            for request_id, computed_tokens in _computed_after_step(scheduler_output):
                state = self._storing.get(request_id)
                if state is None:
                    continue
                states = {(group, tokens): block for group, block, tokens in offers.get(request_id, ())}
                try:
                    order = self._store_order(request_id, state, computed_tokens, states)
                except Exception:  # the root of one request's store: it must not cost the engine its step
                    log.exception("Request %s is not stored", request_id)
                    self._storing.pop(request_id, None)
                    self._makers.ends(request_id)
                    continue
                self._makers.runs(request_id, computed_tokens, state.stored_chunks)
                if order is not None:
                    orders.stores.append(order)
        return orders

    def _store_order(self, request_id: str, state: _Request, computed_tokens: int, states: States) -> StoreOrder | None:
        """The chunks that this step completes, with their blocks pinned."""
        question = state.question
        if not question.hashes:
            self._settle_names(question)
        # Of what is decoded only known tokens count: drafts may be rejected, placeholders stand for nothing yet.
        known_tokens = state.prompt_tokens
        if self._decoded is not None:
            known_tokens = state.request.num_tokens
            self._decoded.learn(question, state.request, min(computed_tokens, known_tokens))
        if not question.hashes or question.hello is None or question.hello is not self._client.hello:
            return None
        chunk_tokens = question.hello.chunk_tokens
        first = state.stored_chunks
        end = min(computed_tokens, known_tokens) // chunk_tokens
        end = min(end, len(question.hashes) // CHUNK_HASH_BYTES)
        blocks_per_chunk = sum(group.blocks_in(chunk_tokens) for group in self._groups)
        if end > first:  # what has no room now may have it in a later step
            end = first + self._pins.room((end - first) * blocks_per_chunk) // blocks_per_chunk
        if self._decoded is None and end >= known_tokens // chunk_tokens:
            del self._storing[request_id]
        if end <= first or not self._computed_as_named(state):
            return None
        state.stored_chunks = end
        null = self._pins.null_block_id
        stored = blocks_to_store(
            self._groups, self._block_table(request_id), range(first, end), chunk_tokens, null, states
        )
        if stored is None:
            return None
        job = self._pins.pin(stored.blocks)
        if job is None:
            return None
        self._makers.stores(request_id, job, first)
        hashes = question.hashes[first * CHUNK_HASH_BYTES : end * CHUNK_HASH_BYTES]
        packed = tuple(group.tobytes() for group in stored.blocks)
        return StoreOrder(job, question.boot_token, question.cache_salt, hashes, packed, stored.wanted)

    def _settle_names(self, question: Question) -> None:
        if question.pending is not None:
            self._asker.settle(question)
        elif question.appending is not None:
            self._asker.settle_append(question)

    def step_ended(self, output: Any) -> None:
        """Takes what the workers reported. A load has ended when all have said so; failures may come earlier."""
        if self._costs is not None:
            self._costs.computed(*self._stopwatch.step_ends())
        self._take(output.kv_connector_worker_meta or WorkerReport())
        if output.invalid_block_ids:
            for loading in self._requests.values():
                if loading.loading and not loading.loading_blocks.isdisjoint(output.invalid_block_ids):
                    loading.load_failed = True
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is not None and state.loading:
                self._load_ended(request_id, state, request_id in output.failed_recving)

    def _take(self, report: WorkerReport) -> None:
        self._pins.ended(report.ended_stores)
        self._makers.stored(report.settled_stores)
        for request_id, chunks in report.unreadable.items():
            if request_id in self._requests:
                self._requests[request_id].unreadable |= chunks

    def _load_ended(self, request_id: str, state: _Request, failed: bool) -> None:
        state.loading = False
        state.load_failed |= failed
        if self._costs is not None and self._alone and not (state.load_failed or state.unreadable or state.finished):
            self._costs.loaded(Tier.L1, state.load_tokens, self._clock.monotonic() - state.load_began)
        self._asker.release(state.loading_lease, state.loading_from, state.unreadable)
        if state.unreadable:  # the server drops those; what is computed in their place is stored
            self._store_from(state, min(state.unreadable))
            state.unreadable = set()
        if state.finished:
            self._forget(request_id, state)

    # ---- the end -----------------------------------------------------------------------------------------------------
    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """`block_ids` of every group go back to the engine as soon as this returns, but for those pinned here."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        state.finished = True
        if state.loading:
            return
        try:
            if self._decoded is not None:
                self._keep_tail(self._decoded, state, block_ids)
        finally:
            self._forget(request.request_id, state)

    def _keep_tail(self, decoded: DecodedChunks, state: _Request, block_ids: Sequence[Sequence[int]]) -> None:
        """The last token was sampled from the KV of those before it and has none of its own."""
        request, hello = state.request, self._client.hello
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if hello is None or tokens // hello.chunk_tokens <= state.stored_chunks or not self._computed_as_named(state):
            return
        groups = [
            (hello.chunk_tokens // group.block_tokens, ids) for group, ids in zip(self._groups, block_ids, strict=True)
        ]
        decoded.keep(state.question, request, state.stored_chunks, tokens, groups)

    def _forget(self, request_id: str, state: _Request) -> None:
        del self._requests[request_id]
        self._storing.pop(request_id, None)
        self._makers.ends(request_id)
        self._asker.end(state.question)

    # ---- other weights -----------------------------------------------------------------------------------------------
    def await_pins(self) -> None:
        """Before the engine resets its own cache: gives back what is pinned, as far as that needs no step. An engine
        without requests may run none."""
        if self._decoded is not None:
            self._decoded.drop_tails()
        worker = self._worker_here()
        until = self._clock.monotonic() + STORES_END_SECONDS
        while worker is not None and self._pins.held:
            storing = worker.storing
            self._take(worker.report() or WorkerReport())
            if not storing or self._clock.monotonic() >= until:
                return
            worker.await_store_read(_STORES_LOOK_SECONDS)

    def reset(self) -> bool:
        """The weights may be others from now on. What was stored before is not found any more, and what was computed
        before is not stored: all keys bear a name that nobody else has.

        False while blocks of before are in use. They, and what is computed from them, may be of former weights, so
        nothing is cached until a reset finds none."""
        self._asker.suspended = True
        self._generation = self._random_bytes(_GENERATION_BYTES)
        for request_id, state in self._requests.items():
            self._makers.ends(request_id)
            state.adapter = self._adapter(state.request)
            is_known = state.request.lora_request is None or state.adapter is not None
            identity = (
                self._identity(state.request, state.adapter) if is_known else self._random_bytes(_GENERATION_BYTES)
            )
            state.question = self._asker.renamed(state.question, identity)
            state.stored_chunks = 0
        if not self._pins.pool_is_empty:
            log.warning(
                "KV of former weights may be in use, because requests run or stores have not ended: nothing is cached "
                "until reset_prefix_cache(reset_connector=True) succeeds"
            )
            return False
        self._asker.suspended = False
        log.info("The caches are reset: from now on KV is stored and looked up under a new name of the weights")
        return True

    @property
    def has_pins(self) -> bool:
        return self._pins.held

    @property
    def pins_end_soon(self) -> bool:
        return self._pins.end_soon

    def close(self) -> None:
        self._asker.close()


def _computed_after_step(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """(request id, tokens whose KV the engine holds once this step has run) of every scheduled request."""
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed_tokens + scheduled[request_id]


assert sys.byteorder == "little", "block ids and slots travel as the machine's own 64-bit integers"
