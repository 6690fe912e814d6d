"""The half of the connector in vLLM's scheduler: decides what is loaded and stored, and by which blocks.

It is asked about waiting requests in every step, so nothing here waits beyond a small budget a step. Rules that the
rest relies on:

- A load is announced to vLLM as asynchronous. vLLM keeps its blocks until every worker has reported the end of the
  copy, also when the request is aborted; the lease on the source is kept as long.
- The source blocks of a store are pinned in vLLM's block pool until every worker has reported that it reads them no
  more. So no preemption, abort or sliding window can hand them to another request meanwhile, and nobody has to wait
  for a copy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.lookup_client import LookupClient, RequestSession
from lmcache.core.limits import MAX_NAME_BYTES, MAX_TOKENS_PER_SESSION
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, WorkerReport
from lmcache.integration.engine.inflight_prefixes import InflightPrefixes
from lmcache.integration.engine.latency_model import LatencyModel, StepTimer
from lmcache.integration.engine.request_state import InvalidTransition, RequestState
from lmcache.integration.vllm.block_pins import BlockPins
from lmcache.integration.vllm.decode_store import DecodeStore
from lmcache.integration.vllm.handover import handover, is_handed_over, source_of
from lmcache.integration.vllm.hit_lookups import HitLookups
from lmcache.integration.vllm.identity import content_spans, is_cacheable, request_identity
from lmcache.integration.vllm.lora_adapters import LoadedAdapter
from lmcache.integration.vllm.partial_chunks import has_partial_chunk
from lmcache.integration.vllm.scheduler_options import SchedulerOptions
from lmcache.integration.vllm.step_builder import BlockTable, StepBuilder
from lmcache.integration.vllm.trace_context import trace_parent
from lmcache.integration.vllm.tracked_request import SchedulerParts, TrackedRequest
from lmcache.integration.vllm.undrafted_blocks import UndraftedBlocks
from lmcache.integration.vllm.versions import failed_requests
from lmcache.protocol.tokens import pack_tokens

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.integration.engine.worker_side import WorkerSide
    from lmcache.integration.vllm.kv_events import KVEvents

log = logging.getLogger("lmcache.vllm")

STORES_END_SECONDS = 5.0  # what a reset of the engine's caches waits for stores that read blocks
_STORES_LOOK_SECONDS = 0.1
_GENERATION_BYTES = 16

assert sys.byteorder == "little", "block ids and slots travel as the machine's own 64-bit integers"


class SchedulerSide:
    def __init__(
        self,
        client: Client,
        instance_id: str,
        options: SchedulerOptions,
        *,
        local_worker: Callable[[], WorkerSide | None] = lambda: None,
        events: KVEvents | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> None:
        """`local_worker`: the only worker, if it is in this process. `events`: what routers are told."""
        clock = environment.clock
        self._clock = clock
        self._client = client
        self._options = options
        self._local_worker = local_worker
        self._random_bytes = environment.random_bytes
        self._generation = b""  # of the weights; those that the engine started with have none
        self._parts = SchedulerParts(
            options,
            lookups=LookupClient(client, instance_id, environment),
            pins=BlockPins(options.workers, clock),
            prefixes=InflightPrefixes(options.workers, clock),
            latency=LatencyModel(),
            clock=clock,
            events=events,
        )
        self.requests = self._parts.requests  # by id, from their arrival until nothing is kept of them
        self._step_timer = StepTimer(clock)
        keeps_decoded = options.save_decode and options.stores
        self._decoded = self._decode_store() if keeps_decoded else None
        self._hits = HitLookups(self._parts, takes_decoded=keeps_decoded)
        undrafted = UndraftedBlocks(options.groups, options.longest_drafted_tokens)
        self._steps = StepBuilder(self._parts, self._hits, self._decoded, undrafted)

    def bind(self, block_pool: Any, block_table: BlockTable) -> None:
        """`block_table(request id)` gives the block ids of each group."""
        self._parts.pins.bind(block_pool)
        if self.events is not None:
            self.events.bind(block_pool)
        self._steps.bind(block_table)

    def _decode_store(self) -> DecodeStore:
        parts = self._parts
        return DecodeStore(
            parts.lookups, parts.pins, lambda tracked, end_chunk: parts.note_named(tracked, end_chunk, stored=True)
        )

    # ---- lookups -----------------------------------------------------------------------------------------------------
    def on_new_request(self, request: Any) -> None:
        """Asks early, so that the answer is here when the request is scheduled."""
        if request.lora_request is not None:
            self._parts.adapters.request_begins(request.request_id, request.lora_request)
        if request.request_id in self.requests or not self._has_key(request):
            return
        hello = self._client.hello
        if hello is not None and not self._parts.fits(hello):
            return
        ahead = self._options.lookahead_tokens
        source = source_of(request, self._options.handover_timeout_seconds)
        unit_tokens = self._parts.partial_unit_tokens if has_partial_chunk(request, source) else 0
        least_tokens = hello.chunk_tokens if hello is not None else 0
        is_short = len(request.prompt_token_ids) - ahead < min(least_tokens, unit_tokens or least_tokens)
        if is_short and self._decoded is None:
            return
        adapter = self._adapter(request)
        if request.lora_request is not None and adapter is None:
            return
        session = RequestSession(
            request.request_id,
            request.cache_salt or "",
            self._identity(request, adapter),
            pack_tokens(request.prompt_token_ids[ahead:]),
            content_spans(request.mm_features, ahead),
            trace_parent=trace_parent(request),
            source=source,
            partial_unit_tokens=unit_tokens,
        )
        tracked = self.requests[request.request_id] = TrackedRequest(request, session, adapter, ahead)
        if self._decoded is not None:
            self._parts.storing[request.request_id] = tracked
        if not is_short:
            self._hits.ask(tracked)

    def _has_key(self, request: Any) -> bool:
        """Whether a key says everything about the request's KV, and is not too long to be sent."""
        return (
            is_cacheable(request, media_have_names=self._options.media_have_names)
            and self._options.lookahead_tokens <= len(request.prompt_token_ids) <= MAX_TOKENS_PER_SESSION
            and len(request.request_id.encode()) <= MAX_NAME_BYTES
            and len((request.cache_salt or "").encode()) <= MAX_NAME_BYTES
        )

    def _adapter(self, request: Any) -> LoadedAdapter | None:
        """None: the request has none, or it is not known which."""
        lora = request.lora_request
        return self._parts.adapters.named(lora) if lora is not None else None

    def _identity(self, request: Any, adapter: LoadedAdapter | None) -> bytes:
        content = adapter.content if adapter is not None else None
        ahead = self._options.lookahead_tokens
        return request_identity(request, content or "", self._generation, lookahead_tokens=ahead)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond `computed_tokens` that will be loaded, asynchronously); (None, False): not known yet."""
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.load is not None:
            return 0, False
        self._steps.note_held(tracked, computed_tokens)
        if tracked.tokens_were_replaced(request):
            self._parts.forget(tracked)
            return 0, False
        if request.skip_reading_prefix_cache:
            return 0, False
        try:
            tokens = self._hits.matched_tokens(tracked, request, computed_tokens)
        except InvalidTransition:
            self._go_uncached(tracked)
            return 0, False
        return tokens, bool(tokens)

    def _go_uncached(self, tracked: TrackedRequest) -> None:
        log.exception("Request %s goes on uncached", tracked.request_id)
        tracked.recompute()
        self._parts.stores_no_more(tracked)

    # ---- loads -------------------------------------------------------------------------------------------------------
    def after_allocation(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has blocks for the request, `external_tokens` tokens of which are to be loaded."""
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return
        tracked.was_scheduled()
        self._hits.note_fetch(tracked)
        tracked.session.resumed = True
        session, answer = tracked.session, tracked.session.answer
        if answer is not None:
            tracked.stored_chunks = max(tracked.stored_chunks, session.full_hit_chunks)
            tracked.stores_partial &= answer.chunks <= len(session.hashes)
        self._parts.announce(tracked)
        if tracked.state is RequestState.LOOKING_UP:
            tracked.move(RequestState.LATE)
        if answer is None:
            return
        if external_tokens > 0:
            self._steps.order_load(tracked, block_ids, external_tokens)
        else:
            self._parts.lookups.give_back(session, recomputed=tracked.worth_loading is False)
            tracked.move(RequestState.IDLE)

    def tokens_not_in_l1(self, request_id: str) -> int:
        """How many tokens of the hit that a request is loading L1 did not have when it was asked."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.load is None:
            return 0
        return tracked.load.tokens_not_in_l1

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step_metadata(self, scheduler_output: Any) -> ConnectorMetadata:
        scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        self._hits.step_begins(busy=scheduled_tokens > 0)
        self._step_timer.step_begins(scheduled_tokens)
        return self._steps.build(scheduler_output)

    def step_ended(self, output: Any) -> None:
        """Takes what the workers reported. A load has ended when all have reported it; failures may come earlier."""
        self._parts.latency.computed(*self._step_timer.step_ends())
        self._take(output.kv_connector_worker_meta or WorkerReport())
        if output.invalid_block_ids:
            for tracked in self.requests.values():
                if tracked.load is not None and not tracked.load.blocks.isdisjoint(output.invalid_block_ids):
                    tracked.load.failed = True
        failed_whole = failed_requests(output)
        for request_id in output.finished_recving or ():
            ended = self.requests.get(request_id)
            if ended is not None and ended.load is not None:
                ended.load.failed |= request_id in failed_whole
                self._steps.load_ended(ended)

    def _take(self, report: WorkerReport) -> None:
        self._parts.pins.ended(report.ended_stores)
        if self.events is not None and (report.ended_stores or report.settled_stores):
            self.events.stores_went_on()
        self._parts.prefixes.on_stored(report.settled_stores)
        for request_id, chunks in report.unreadable.items():
            tracked = self.requests.get(request_id)
            if tracked is not None and tracked.load is not None:
                tracked.load.unreadable_chunks |= chunks

    # ---- the end -----------------------------------------------------------------------------------------------------
    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """`block_ids` of every group go back to the engine as soon as this returns, but for those pinned here. What the
        answer tells the engine that goes on with the request, None for nothing."""
        self._parts.adapters.request_ended(request.request_id)
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return None
        self._hits.note_fetch(tracked)
        if tracked.load is not None:
            if tracked.state is RequestState.LOADING:
                tracked.move(RequestState.ENDING)
            return None
        try:
            told = self._handed_over(tracked)
            self._steps.keep_decoded(tracked, block_ids)
        finally:
            self._parts.forget(tracked)
        return told

    def _handed_over(self, tracked: TrackedRequest) -> dict[str, Any] | None:
        server = tracked.session.server
        if not (self._options.stores and is_handed_over(tracked.request)):
            return None
        if server is None or server is not self._client.hello:
            return None
        tokens = tracked.stored_tokens(server.chunk_tokens)
        return handover(self._parts.lookups.instance_id, server, tokens) if tokens else None

    # ---- other weights -----------------------------------------------------------------------------------------------
    def await_pins(self) -> None:
        """Before the engine resets its own cache: gives back what is pinned, as far as that needs no step. An engine
        without requests may run none."""
        if self._decoded is not None:
            self._decoded.drop_tails()
        worker = self._local_worker()
        until = self._clock.monotonic() + STORES_END_SECONDS
        while worker is not None and self.has_pins:
            storing = worker.storing
            self._take(worker.report() or WorkerReport())
            if not storing or self._clock.monotonic() >= until:
                return
            worker.await_store_read(_STORES_LOOK_SECONDS)

    def reset(self) -> bool:
        """The weights may be others from now on. What was stored before is not found any more, and what was computed
        before is not stored: all keys bear a name that nobody else has.

        False while blocks of before are in use. They, and what is computed from them, may be of previous weights, so
        nothing is cached until a reset finds none."""
        lookups = self._parts.lookups
        lookups.suspended = True
        self._generation = self._random_bytes(_GENERATION_BYTES)
        if self.events is not None:
            self.events.renamed()
        for tracked in self.requests.values():
            self._rename(tracked)
        if not self._parts.pins.pool_is_empty:
            log.warning(
                "KV of previous weights may be in use, because requests run or stores have not ended: nothing is "
                "cached until reset_prefix_cache(reset_connector=True) succeeds"
            )
            return False
        lookups.suspended = False
        log.info("The caches are reset: from now on KV is stored and looked up under a new name of the weights")
        return True

    def _rename(self, tracked: TrackedRequest) -> None:
        self._parts.prefixes.on_ended(tracked.request_id)
        tracked.adapter = self._adapter(tracked.request)
        is_known = tracked.request.lora_request is None or tracked.adapter is not None
        identity = (
            self._identity(tracked.request, tracked.adapter) if is_known else self._random_bytes(_GENERATION_BYTES)
        )
        tracked.session = self._parts.lookups.renamed(tracked.session, identity)
        tracked.stored_chunks = 0
        tracked.noted_at = None
        if tracked.load is None and tracked.state is not RequestState.IDLE:
            tracked.move(RequestState.IDLE)

    @property
    def events(self) -> KVEvents | None:
        return self._parts.events

    @property
    def has_pins(self) -> bool:
        return self._parts.pins.held

    @property
    def needs_steps(self) -> bool:
        """Whether the engine has to go on stepping without requests: for stores, or to publish events."""
        return self.has_pins or (self.events is not None and self.events.is_pending)

    @property
    def pins_end_soon(self) -> bool:
        return self._parts.pins.end_soon

    def check_idle(self) -> None:
        """AssertionError if anything is kept of a request, or a block is pinned."""
        held = {"requests": len(self.requests), "storing": len(self._parts.storing)}
        assert not any(held.values()), f"The scheduler side is not idle: {held}"
        self._parts.pins.check_idle()

    def close(self) -> None:
        if self.events is not None:
            self.events.close()
        self._parts.lookups.close()
