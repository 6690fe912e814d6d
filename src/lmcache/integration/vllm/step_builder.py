"""Builds the orders of a step for the workers: which hits to load, which chunks to store, and by which blocks."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmcache.client.lookup_client import PartialChunk
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, LoadOrder, StoreOrder
from lmcache.integration.engine.latency_model import Tier
from lmcache.integration.engine.request_state import RequestState
from lmcache.integration.vllm.chunk_blocks import (
    NOT_WRITTEN,
    States,
    blocks_to_store,
    group_load,
    is_all_or_nothing,
    restores_states,
)
from lmcache.integration.vllm.decode_store import DecodeStore
from lmcache.integration.vllm.hit_lookups import HitLookups
from lmcache.integration.vllm.tracked_request import ActiveLoad, SchedulerParts, TrackedRequest
from lmcache.integration.vllm.undrafted_blocks import UndraftedBlocks
from lmcache.integration.vllm.versions import boundary_states

log = logging.getLogger("lmcache.vllm")

BlockTable = Callable[[str], Sequence[Sequence[int]]]


class StepBuilder:
    """Belongs to the scheduler's thread."""

    def __init__(
        self,
        parts: SchedulerParts,
        hits: HitLookups,
        decoded: DecodeStore | None,
        undrafted: UndraftedBlocks,
    ) -> None:
        self._parts = parts
        self._hits = hits
        self._decoded = decoded
        self._undrafted = undrafted
        self._block_table: BlockTable = lambda request_id: ()
        self._metadata = self._new_metadata()  # of the step that is being scheduled
        self._step = 0  # its number

    def bind(self, block_table: BlockTable) -> None:
        """`block_table(request id)` gives the block ids of each group."""
        self._block_table = block_table

    def _new_metadata(self) -> ConnectorMetadata:
        return ConnectorMetadata(await_stores=self._parts.options.await_stores)

    # ---- loads -------------------------------------------------------------------------------------------------------
    def note_held(self, tracked: TrackedRequest, tokens: int) -> None:
        """The engine is about to schedule the request, or to load for it, and has that many tokens of it itself."""
        tracked.held_tokens = self._step, tokens

    def _is_loaded_in_step(self, tracked: TrackedRequest, start_token: int) -> bool:
        """Whether another connector loads a part of the request in the step that is being built. An asynchronous load
        has ended before its request is in a step."""
        step, tokens = tracked.held_tokens
        return step == self._step and start_token - tokens >= self._parts.block_tokens

    def order_load(self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine waits for the last `external_tokens` tokens of the hit whose answer is held."""
        session, answer = tracked.session, tracked.session.answer
        assert answer is not None and session.server is not None
        chunk_tokens, hit_tokens = session.server.chunk_tokens, session.hit_tokens
        start_token = hit_tokens - external_tokens
        null = self._parts.pins.null_block_id
        loads = tuple(
            group_load(group, ids, start_token, hit_tokens, chunk_tokens, null)
            for group, ids in zip(self._parts.options.groups, block_ids, strict=True)
        )
        tracked.move(RequestState.LOADING)
        order = LoadOrder(
            session.request_id,
            session.server.server_epoch,
            session.cache_salt,
            answer.chunks,
            answer.hashes,
            answer.slots,
            loads,
            answer.lease,
            is_all_or_nothing(self._parts.options.groups),
        )
        if restores_states(self._parts.options.groups, loads):
            self._metadata.loads.append(order)
        else:
            log.warning("A load for request %s is not possible: no block for a recurrent state", tracked.request_id)
            self._metadata.impossible_loads.append(order)
        blocks = frozenset(block for load in loads for block in array("q", load.blocks) if block != NOT_WRITTEN)
        self._undrafted.written(blocks)
        from_l2 = max(0, hit_tokens - answer.chunks_l1 * chunk_tokens)
        began_at = self._parts.clock.monotonic()
        tracked.load = ActiveLoad(session.server, answer, external_tokens, from_l2, blocks, began_at)
        session.answer = None

    def load_ended(self, tracked: TrackedRequest) -> None:
        """All workers have reported."""
        load, tracked.load = tracked.load, None
        assert load is not None
        parts = self._parts
        if tracked.state is RequestState.LOADING and not (load.failed or load.unreadable_chunks):
            parts.note_load(Tier.L1, load.tokens, parts.clock.monotonic() - load.began_at)
        parts.lookups.release(
            load.answer.lease,
            load.server,
            load.unreadable_chunks,
            loaded_tokens=0 if load.failed else load.tokens,
            prefill_seconds=parts.latency.compute_seconds(load.tokens),
        )
        if tracked.state is RequestState.ENDING:
            parts.forget(tracked)
            return
        tracked.move(RequestState.RECOMPUTING if load.failed else RequestState.IDLE)
        if load.unreadable_chunks:  # the server drops those; what is computed in their place is stored
            parts.store_from(tracked, min(load.unreadable_chunks))

    # ---- stores ------------------------------------------------------------------------------------------------------
    def build(self, scheduler_output: Any) -> ConnectorMetadata:
        metadata, self._metadata = self._metadata, self._new_metadata()
        metadata.idle = scheduler_output.total_num_scheduled_tokens == 0
        try:
            return self._with_stores(metadata, scheduler_output)
        finally:
            self._step += 1

    def _with_stores(self, metadata: ConnectorMetadata, scheduler_output: Any) -> ConnectorMetadata:
        if self._decoded is not None:
            metadata.stores += self._decoded.next_orders(idle=metadata.idle)
        spans = list(_spans(scheduler_output))
        self._undrafted.note_step(spans, self._block_table)
        if not self._parts.storing:
            return metadata
        offers = boundary_states(scheduler_output)
        for request_id, start_token, computed_tokens in spans:
            tracked = self._parts.storing.get(request_id)
            if tracked is None:
                continue
            if self._is_loaded_in_step(tracked, start_token):  # whether that fails is known when all is stored
                self._parts.stores_no_more(tracked)
                continue
            tracked.was_in_step = True
            states = {(group, tokens): block for group, block, tokens in offers.get(request_id, ())}
            try:
                order = self._store_order(tracked, computed_tokens, states)
            except Exception:  # the root of one request's store: it must not cost the engine its step
                log.exception("Request %s is not stored", request_id)
                self._parts.stores_no_more(tracked)
                continue
            self._parts.prefixes.on_step(request_id, computed_tokens, tracked.stored_chunks)
            if order is not None:
                metadata.stores.append(order)
        return metadata

    def _store_order(self, tracked: TrackedRequest, computed_tokens: int, states: States) -> StoreOrder | None:
        """The chunks that this step completes, with their blocks pinned."""
        pins, session = self._parts.pins, tracked.session
        if tracked.state is RequestState.LATE:
            self._hits.take_late_answer(tracked)
        elif session.append is not None and not (session.hashes or session.partial):
            self._parts.lookups.take_hashes(session)
        # Of what is decoded only known tokens count: drafts may be rejected, placeholders stand for nothing yet.
        known_tokens = tracked.prompt_tokens
        if self._decoded is not None:
            known_tokens = tracked.request.num_tokens - tracked.lookahead_tokens
            self._decoded.learn(tracked, tracked.request, min(computed_tokens, known_tokens))
        server = session.server
        if server is None or server is not self._parts.lookups.client.hello:
            return None
        if not (session.hashes or session.partial):
            return None
        chunk_tokens = server.chunk_tokens
        first = tracked.stored_chunks
        end = min(computed_tokens, known_tokens) // chunk_tokens
        end = min(end, len(session.hashes))
        if end > first:  # what has no room now may have it in a later step
            blocks_per_chunk = sum(group.blocks_in(chunk_tokens) for group in self._parts.options.groups)
            end = first + pins.room((end - first) * blocks_per_chunk) // blocks_per_chunk
        partial = self._partial_to_store(tracked, first, end, min(computed_tokens, known_tokens))
        tracked.stores_partial &= session.partial is not None and partial is None
        if self._decoded is None and end >= known_tokens // chunk_tokens and not tracked.stores_partial:
            del self._parts.storing[tracked.request_id]
        if end <= first and partial is None:
            return None
        end_token = end * chunk_tokens + (partial.tokens if partial is not None else 0)
        block_ids = self._block_table(tracked.request_id)
        lacks_drafts = self._undrafted.among(block_ids, first * chunk_tokens, end_token)
        if lacks_drafts or not self._parts.computed_as_named(tracked):
            self._parts.stores_no_more(tracked)  # what follows is of no use without these
            return None
        tracked.stored_chunks = end
        stored = blocks_to_store(
            self._parts.options.groups, block_ids, first, end_token, chunk_tokens, pins.null_block_id, states
        )
        if stored is None:
            return None
        job = pins.pin(stored.blocks)
        if job is None:
            return None
        self._parts.prefixes.on_store_ordered(tracked.request_id, job, first)
        if end > first:
            self._parts.note_named(tracked, end, stored=True)
        hashes = session.hashes[first:end].packed + (partial.chunk_hash if partial is not None else b"")
        packed = tuple(group.tobytes() for group in stored.blocks)
        return StoreOrder(
            job, server.server_epoch, session.cache_salt, hashes, packed, stored.wanted, session.request_id
        )

    def _partial_to_store(
        self, tracked: TrackedRequest, first_chunk: int, end_chunk: int, computed_tokens: int
    ) -> PartialChunk | None:
        """The partial chunk behind the full ones up to `end_chunk`, once they and it are computed and there is room."""
        session, partial = tracked.session, tracked.session.partial
        assert session.server is not None
        if partial is None or not tracked.stores_partial or end_chunk != len(session.hashes):
            return None
        end_token = end_chunk * session.server.chunk_tokens + partial.tokens
        if computed_tokens < end_token:
            return None
        sizes = [group.block_tokens for group in self._parts.options.groups]
        first_token = first_chunk * session.server.chunk_tokens
        wanted_blocks = sum((end_token - first_token) // size for size in sizes)
        return partial if self._parts.pins.room(wanted_blocks) == wanted_blocks else None

    # ---- the end of a request ----------------------------------------------------------------------------------------
    def keep_decoded(self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]]) -> None:
        """Pins what the request has decoded and nobody has stored. The last token was sampled from the KV of those
        before it and has none of its own. While an asynchronous load of another connector goes on, the engine counts
        its tokens as computed already."""
        request, hello = tracked.request, self._parts.lookups.client.hello
        if self._decoded is None or hello is None or not tracked.was_in_step:
            return
        tokens = min(request.num_computed_tokens, request.num_tokens - max(1, tracked.lookahead_tokens))
        if tokens // hello.chunk_tokens <= tracked.stored_chunks or not self._parts.computed_as_named(tracked):
            return
        if self._undrafted.among(block_ids, tracked.stored_chunks * hello.chunk_tokens, tokens):
            return
        blocks_per_chunk = [hello.chunk_tokens // group.block_tokens for group in self._parts.options.groups]
        self._decoded.keep(tracked, tokens, list(zip(blocks_per_chunk, block_ids, strict=True)))


def _spans(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """(request id, tokens whose KV the engine holds before this step, and once it has run) of every scheduled
    request."""
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.num_computed_tokens + scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed_tokens, computed_tokens + scheduled[request_id]
