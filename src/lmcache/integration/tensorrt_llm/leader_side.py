"""The half of the connector in TensorRT-LLM's leader: decides what is loaded and stored, and by which blocks.

What differs from vLLM and shapes this file:

- The engine asks once, when a request gets its blocks, and waits for the answer: there is no "not known yet".
- It never preempts a request, so a request's blocks are its own until `request_finished`; a True from there keeps them
  until every worker has said that nothing copies from or to them any more.
- The scheduler is not told when loads end: a request that loads is left out of all steps until all workers have loaded.
  The step that it is in again ends its lease.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.lookup_client import LookupClient, Progress, RequestSession
from lmcache.core.key_batch import SLOT_BYTES
from lmcache.core.limits import MAX_NAME_BYTES, MAX_SESSIONS_PER_INSTANCE, MAX_TOKENS_PER_SESSION
from lmcache.core.rounding import div_ceil
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, GroupLoad, LoadOrder, StoreOrder
from lmcache.integration.engine.request_state import InvalidTransition, RequestState, RequestStateMachine
from lmcache.protocol.messages import HelloReply, LookupReply
from lmcache.protocol.tokens import pack_tokens

log = logging.getLogger("lmcache.tensorrt_llm")

_NOT_WRITTEN = -1  # of a block that the engine holds already
# What makes a request's KV depend on more than its tokens.
_BEYOND_TOKENS = (
    *("lora_task_id", "multimodal_hashes", "multimodal_embedding", "py_multimodal_data", "prompt_embedding_table"),
    *("encoder_tokens", "encoder_input_features", "mrope_rotary_cos_sin", "position_ids"),
)


@dataclass(frozen=True)
class _Load:
    """A hit that workers copy. Its lease is kept until the request is scheduled again."""

    server: HelloReply
    answer: LookupReply
    tokens: int


class TensorrtRequest(RequestStateMachine):
    """One request, from its lookup to its end. A request in ANSWERED or RECOMPUTING may have no blocks yet."""

    def __init__(self, session: RequestSession) -> None:
        super().__init__(session.request_id)
        self.session = session
        self.blocks = array("q")
        self.matched = range(0)  # tokens that the engine was told will be loaded
        self.stored_chunks = 0  # stored, being stored, or not to be stored
        self.has_orders = False  # some worker has copied, or copies, from or to its blocks
        self.load: _Load | None = None


class LeaderSide:
    """Belongs to the leader's thread."""

    def __init__(
        self,
        client: Client,
        instance_id: str,
        *,
        ranks: int,
        block_tokens: int,
        lookup_seconds: float,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> None:
        """`ranks` hold different KV. `lookup_seconds`: what a lookup may hold up the engine."""
        self._client = client
        self._lookups = LookupClient(client, instance_id, environment)
        self._ranks = ranks
        self._block_tokens = block_tokens
        self._lookup_seconds = lookup_seconds
        self.requests: dict[str, TensorrtRequest] = {}
        self._loads: list[LoadOrder] = []  # of the step that is being scheduled
        self._next_job = 1

    # ---- lookups -----------------------------------------------------------------------------------------------------
    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """Tokens beyond `computed_tokens` that will be loaded. May be asked again until there are blocks."""
        tracked = self.requests.get(str(request.request_id)) or self._track(request)
        if tracked is None:
            return 0
        try:
            hit_tokens = self._hit_tokens(tracked)
        except InvalidTransition:
            log.exception("Request %s goes on uncached", tracked.request_id)
            tracked.recompute()
            hit_tokens = 0
        tracked.matched = range(computed_tokens, max(computed_tokens, hit_tokens))
        return len(tracked.matched)

    def _track(self, request: Any) -> TensorrtRequest | None:
        tokens = request.get_tokens(0)
        name, salt = str(request.request_id), cache_salt(request)
        if (
            any(getattr(request, beyond, None) for beyond in _BEYOND_TOKENS)
            or len(tokens) > MAX_TOKENS_PER_SESSION
            or max(len(name.encode()), len(salt.encode())) > MAX_NAME_BYTES
            or not self._has_room()
        ):
            return None
        tracked = self.requests[name] = TensorrtRequest(RequestSession(name, salt, b"", pack_tokens(tokens)))
        return tracked

    def _has_room(self) -> bool:
        """Where there are too many, drops the oldest that never got blocks: nobody tells when such a one ends."""
        if len(self.requests) < MAX_SESSIONS_PER_INSTANCE:
            return True
        oldest = next((tracked for tracked in self.requests.values() if not tracked.blocks), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def _hit_tokens(self, tracked: TensorrtRequest) -> int:
        """Leading tokens that L1 has, in whole blocks; the last token is always left to compute."""
        session = tracked.session
        if tracked.state is RequestState.ANSWERED and session.server is not self._client.hello:
            session.answer = None
            tracked.move(RequestState.IDLE)
        if tracked.state is RequestState.IDLE and not tracked.blocks:
            self._ask(tracked)
        answer, server = session.answer, session.server
        if tracked.state is not RequestState.ANSWERED or answer is None or server is None:
            return 0
        hit_tokens = answer.chunks * server.chunk_tokens
        if hit_tokens > session.token_count or len(answer.slots) != self._ranks * answer.chunks * SLOT_BYTES:
            log.error("The answer to the lookup of request %s does not add up: ignored", tracked.request_id)
            return 0
        return min(hit_tokens, (session.token_count - 1) // self._block_tokens * self._block_tokens)

    def _ask(self, tracked: TensorrtRequest) -> None:
        hello, session = self._client.hello, tracked.session
        fits = hello is not None and hello.chunk_tokens % self._block_tokens == 0
        if hello is None or not fits or session.token_count < hello.chunk_tokens:
            return
        if not self._lookups.lookup(session, deadline_seconds=self._lookup_seconds):
            return
        tracked.move(RequestState.LOOKING_UP)
        progress = self._lookups.take_answer(session, self._lookup_seconds)
        if progress is Progress.WAITING:
            self._lookups.server_answers(session)  # a server that is silent is asked nothing more
        states = {Progress.ANSWERED: RequestState.ANSWERED, Progress.WAITING: RequestState.LATE}
        tracked.move(states.get(progress, RequestState.RECOMPUTING))

    # ---- loads -------------------------------------------------------------------------------------------------------
    def after_allocation(self, request: Any, block_ids: Sequence[int]) -> None:
        """The engine has blocks for the whole prompt, and counts on the tokens that it was told."""
        tracked = self.requests.get(str(request.request_id))
        if tracked is None:
            return
        tracked.blocks = array("q", block_ids)
        answer = tracked.session.answer
        if answer is None:
            return
        tracked.stored_chunks = answer.chunks
        if tracked.matched:
            self._order_load(tracked, answer)
        else:
            self._lookups.give_back(tracked.session)
            tracked.move(RequestState.IDLE)

    def _order_load(self, tracked: TensorrtRequest, answer: LookupReply) -> None:
        session, matched = tracked.session, tracked.matched
        server = session.server
        assert server is not None
        if len(tracked.blocks) * self._block_tokens < matched.stop:
            raise RuntimeError(
                f"Request {tracked.request_id} has {len(tracked.blocks)} blocks of {self._block_tokens} tokens for a "
                f"hit of {matched.stop} tokens: this version of TensorRT-LLM allocates otherwise than expected."
            )
        tracked.move(RequestState.LOADING)
        per_chunk = server.chunk_tokens // self._block_tokens
        first_chunk, end_chunk = matched.start // server.chunk_tokens, div_ceil(matched.stop, server.chunk_tokens)
        written = range(matched.start // self._block_tokens, matched.stop // self._block_tokens)
        blocks = array(
            "q",
            [
                tracked.blocks[index] if index in written else _NOT_WRITTEN
                for index in range(first_chunk * per_chunk, end_chunk * per_chunk)
            ],
        )
        self._loads.append(
            LoadOrder(
                session.request_id,
                server.server_epoch,
                session.cache_salt,
                end_chunk,
                answer.hashes,
                self._slots(answer, end_chunk),
                (GroupLoad(first_chunk, blocks.tobytes()),),
                answer.lease,
                all_or_nothing=True,
            )
        )
        tracked.load, tracked.has_orders, session.answer = _Load(server, answer, len(matched)), True, None

    def _slots(self, answer: LookupReply, end_chunk: int) -> bytes:
        """The slots of every rank's chunks before `end_chunk`: the last chunk of a hit may be one that the engine
        computes."""
        row = answer.chunks * SLOT_BYTES
        return b"".join(answer.slots[rank * row :][: end_chunk * SLOT_BYTES] for rank in range(self._ranks))

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step_metadata(self, output: Any) -> ConnectorMetadata:
        """`output`: the requests that this step computes; those that load are not among them."""
        metadata = ConnectorMetadata(loads=self._loads)
        loading = {order.request_id for order in self._loads}
        self._loads = []
        for data in _scheduled(output):
            tracked = self.requests.get(str(data.request_id))
            if tracked is None or tracked.request_id in loading:
                continue
            self._end_load(tracked)
            order = self._store_order(tracked, data.computed_position + data.num_scheduled_tokens)
            if order is not None:
                metadata.stores.append(order)
        return metadata

    def _end_load(self, tracked: TensorrtRequest) -> None:
        load, tracked.load = tracked.load, None
        if load is not None:
            self._lookups.release(load.answer.lease, load.server, loaded_tokens=load.tokens)
            tracked.move(RequestState.IDLE)

    def _store_order(self, tracked: TensorrtRequest, computed_tokens: int) -> StoreOrder | None:
        """The chunks of the prompt that this step completes."""
        session = tracked.session
        if tracked.state is RequestState.LATE and self._lookups.take_answer(session) is not Progress.WAITING:
            self._lookups.give_back(session)
            tracked.move(RequestState.RECOMPUTING)
        server = session.server
        if not session.hashes or server is None or server is not self._client.hello:
            return None
        first = tracked.stored_chunks
        end = min(min(computed_tokens, session.token_count) // server.chunk_tokens, len(session.hashes))
        per_chunk = server.chunk_tokens // self._block_tokens
        end = min(end, len(tracked.blocks) // per_chunk)
        if end <= first:
            return None
        tracked.stored_chunks, tracked.has_orders = end, True
        job, self._next_job = self._next_job, self._next_job + 1
        blocks = tracked.blocks[first * per_chunk : end * per_chunk].tobytes()
        hashes = session.hashes[first:end].packed
        return StoreOrder(
            job, server.server_epoch, session.cache_salt, hashes, (blocks,), request_id=tracked.request_id
        )

    # ---- the end -----------------------------------------------------------------------------------------------------
    def request_finished(self, request: Any) -> bool:
        """Whether the engine has to keep the blocks until the workers name the request."""
        tracked = self.requests.get(str(request.request_id))
        if tracked is None:
            return False
        self._loads = [order for order in self._loads if order.request_id != tracked.request_id]
        self._forget(tracked)
        return tracked.has_orders

    def _forget(self, tracked: TensorrtRequest) -> None:
        """Ends its session, and its lease: what a load still copies is checked, and nobody will read it."""
        del self.requests[tracked.request_id]
        if tracked.state is RequestState.LOADING:
            tracked.move(RequestState.ENDING)
        tracked.move(RequestState.ENDED)
        self._lookups.end(tracked.session)

    def check_idle(self) -> None:
        """AssertionError if anything is kept of a request."""
        assert not self.requests and not self._loads, f"{len(self.requests)} requests, {len(self._loads)} loads"

    def close(self) -> None:
        self._lookups.close()


def cache_salt(request: Any) -> str:
    """The tenant's name; versions that keep its hash alone give that."""
    salt = getattr(request, "cache_salt", None)
    if salt is None:
        salt = getattr(request, "cache_salt_id", None)
    return "" if salt is None else str(salt)


def _scheduled(output: Any) -> Iterable[Any]:
    yield from output.new_requests
    yield from output.cached_requests
