"""What vLLM's own connector class calls in the scheduler, answered by the parts of ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.lookup_client import LookupClient, Progress, RequestSession
from lmcache.core.limits import MAX_NAME_BYTES, MAX_TOKENS_PER_SESSION
from lmcache.errors import ConfigError, LMCacheError
from lmcache.integration.engine.instance_id import instance_name
from lmcache.integration.vllm.hit_lookups import STEP_WAIT_SECONDS
from lmcache.integration.vllm.scheduler_process import scheduler_process_id
from lmcache.integration.vllm.uncached_adapter import CalledAsDeclared
from lmcache.integration.vllm.upstream_types import ParallelStrategy
from lmcache.protocol.messages import HelloReply, RegisterInstance
from lmcache.protocol.tokens import pack_tokens

log = logging.getLogger("lmcache.vllm")


def chunk_blocks(hello: HelloReply, block_tokens: int) -> int:
    """Engine blocks in one chunk. ConfigError when chunks are not whole blocks."""
    if hello.chunk_tokens % block_tokens:
        raise ConfigError(
            f"The server's chunk size of {hello.chunk_tokens} tokens is not a multiple of this engine's block size of "
            f"{block_tokens}: start the server with --chunk-size set to a multiple of it."
        )
    return hello.chunk_tokens // block_tokens


def connect(client: Client, timeout_seconds: float) -> HelloReply:
    """ConnectionError past the deadline: this interface asks for the chunk size at once."""
    try:
        return client.connect(timeout_seconds)
    except LMCacheError as error:
        client.close()
        raise ConnectionError(f"{error} Start the server before the engine.") from error


class LMCacheMPSchedulerAdapter(CalledAsDeclared):
    """One lookup a request, leased until the request's end: nothing tells this side when its workers have loaded."""

    def __init__(
        self,
        *,
        server_url: str,
        context: Any,
        model_name: str,
        vllm_block_size: int,
        parallel_strategy: ParallelStrategy,
        mq_timeout: float = 300.0,
        heartbeat_interval: float = 10.0,
        environment: EngineEnvironment = ENGINE_SYSTEM,
    ) -> None:
        """`context` (a ZMQ context) is not used: the client has its own. ConnectionError without a server."""
        client = Client(server_url, environment=environment, heartbeat_interval_seconds=heartbeat_interval)
        pid = scheduler_process_id(in_scheduler=True, executor="", workers=parallel_strategy.actual_world_size)
        instance_id = instance_name("vllm", pid)
        client.declare(
            RegisterInstance(
                *(instance_id, model_name, parallel_strategy.kv_world_size, 1),
                *(heartbeat_interval, "vllm, its own connector class"),
            )
        )
        hello = connect(client, mq_timeout)
        self._start(LookupClient(client, instance_id, environment), hello, vllm_block_size)

    def _start(self, lookups: LookupClient, hello: HelloReply, block_tokens: int) -> None:
        self._lookups = lookups
        self._chunk_tokens = hello.chunk_tokens
        self._chunk_blocks = chunk_blocks(hello, block_tokens)
        self.sessions: dict[str, RequestSession] = {}
        self._hits: dict[str, int] = {}  # tokens, of the lookups that are answered and not yet cleaned up

    def num_blocks_per_chunk(self) -> int:
        """Fixed until the engine ends: a later server with other chunks is not used."""
        return self._chunk_blocks

    # ---- lookups -----------------------------------------------------------------------------------------------------
    def maybe_submit_lookup_request(self, request_id: str, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Sends the lookup, unless it is under way or answered."""
        if request_id in self._hits or request_id in self.sessions:
            return
        hello = self._lookups.client.hello
        if (
            hello is None
            or hello.chunk_tokens != self._chunk_tokens
            or not self._chunk_tokens <= len(token_ids) <= MAX_TOKENS_PER_SESSION
            or max(len(request_id.encode()), len(cache_salt.encode())) > MAX_NAME_BYTES
        ):
            self._hits[request_id] = 0
            return
        session = RequestSession(request_id, cache_salt, b"", pack_tokens(token_ids))
        if self._lookups.lookup(session):
            self.sessions[request_id] = session
        else:
            self._hits[request_id] = 0

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens that may be loaded, a multiple of the chunk size; None: not known yet. Waits a moment at most."""
        hit_tokens = self._hits.get(request_id)
        if hit_tokens is not None:
            return hit_tokens
        session = self.sessions.get(request_id)
        if session is None:
            return 0
        progress = self._lookups.take_answer(session, STEP_WAIT_SECONDS)
        if progress is Progress.WAITING and self._lookups.server_answers(session):
            return None
        hit_tokens = 0
        if progress is Progress.ANSWERED and session.answer is not None:
            hit_tokens = min(session.answer.chunks * self._chunk_tokens, session.token_count)
        elif progress is Progress.WAITING:
            log.warning("The LMCache server does not answer: request %s goes on uncached", request_id)
        self._hits[request_id] = hit_tokens
        return hit_tokens

    def cleanup_lookup_result(self, request_id: str) -> None:
        """The engine has allocated by the answer. What is leased stays so until the request ends.

        From now on this request hits nothing: that class would announce a second load and never order it."""
        self._hits[request_id] = 0

    def free_lookup_locks(self, token_ids: Sequence[int], start: int, end: int, request_id: str) -> None:
        """The engine will not load these tokens. One lease covers a whole hit: it is given back when all are named."""
        session = self.sessions.get(request_id)
        answer = session.answer if session is not None else None
        if session is not None and answer is not None and start == 0 and end >= answer.chunks * self._chunk_tokens:
            self._lookups.give_back(session)

    def end_session(self, request_id: str) -> None:
        """The request is over: the server forgets its tokens and every lease."""
        self._hits.pop(request_id, None)
        session = self.sessions.pop(request_id, None)
        if session is not None:
            self._lookups.end(session)

    def report_block_allocations(self, records: Sequence[Any]) -> None:
        """For observers of the engine's own memory, which this server has none of: nothing is kept."""

    def shutdown(self) -> None:
        self._lookups.close()
