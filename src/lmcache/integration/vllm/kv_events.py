"""What the engine tells routers of the cache server: blocks that are there, beside those in its own memory.

The scheduler's thread only notes which requests have named which chunks, and takes the events that are ready. Another
thread describes the chunks by the engine's blocks, follows the server's changes, and makes the events. It gives up the
interpreter after every few chunks, so that no step of the engine waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.core import limits
from lmcache.integration.engine.announced_chunks import ChunkName
from lmcache.integration.vllm.kv_event_maker import EventMaker, EventOptions, NamedChunks
from lmcache.integration.vllm.tracked_request import TrackedRequest
from lmcache.integration.vllm.versions import EventInterface, hash_block_tokens

if TYPE_CHECKING:
    from lmcache.client.client import Client

log = logging.getLogger("lmcache.vllm")

_IDLE_SECONDS = 1.0  # between calls while nothing changes
_BUSY_SECONDS = 0.05
_STORED_SECONDS = 1.0  # that the engine goes on stepping for the events of what it has stored last
_COMPUTED_SECONDS = 60.0  # that the step may take which computes what is to be stored
_PAUSE_SECONDS = 0.0002


class KVEvents:
    """Its public methods are for the scheduler's thread, and never wait."""

    def __init__(
        self,
        client: Client,
        instance_id: str,
        options: EventOptions,
        events: EventInterface,
        environment: EngineEnvironment,
    ) -> None:
        self._clock = environment.clock
        self._block_tokens = self._hashed_tokens = options.block_tokens
        self._changed = environment.condition()
        self._maker = EventMaker(
            client, instance_id, options, events, now=self._clock.monotonic, pause=self._give_up_interpreter
        )
        self._named: deque[NamedChunks | None] = deque()  # None: what was named before is not found any more
        self._ready: deque[Any] = deque()  # events, until the engine takes them
        self._expected: set[ChunkName] = set()  # chunks that are being stored
        self._expected_until = 0.0
        self._engine_cleared = self._closing = False
        self._thread = environment.thread(target=self._run, name="lmcache-kv-events", daemon=True)
        self._thread.start()

    def bind(self, block_pool: Any) -> None:
        self._hashed_tokens = hash_block_tokens(block_pool, self._block_tokens)

    def note(self, tracked: TrackedRequest, end_chunk: int) -> None:
        """The first `end_chunk` chunks of a request are, or will be, at the server."""
        session = tracked.session
        server = session.server
        end_chunk = min(end_chunk, len(session.hashes))
        first_chunk = tracked.noted_chunks if tracked.noted_at is server else 0
        if server is None or tracked.request.resumable or end_chunk <= first_chunk:
            return  # tokens of a session that goes on may be replaced
        if server.chunk_tokens % self._block_tokens or len(self._named) >= limits.MAX_ORDERS_NOTED:
            return
        tracked.noted_at, tracked.noted_chunks = server, end_chunk
        self._named.append(
            NamedChunks(
                tracked.request, session.cache_salt, session.hashes, first_chunk, end_chunk, server.chunk_tokens
            )
        )

    def expect(self, cache_salt: str, last_hash: bytes) -> None:
        """A store has been ordered that ends with this chunk. The engine steps on until it is announced, for a moment:
        without requests it would publish nothing before the next one."""
        if len(self._expected) < limits.MAX_ORDERS_NOTED:
            self._expected_until = self._clock.monotonic() + _STORED_SECONDS
            self._expected.add(ChunkName(cache_salt, last_hash))  # last: the thread drops what is overdue

    def stores_went_on(self) -> None:
        """Workers have said of some stores that they read, or have settled, them."""
        self._expected_until = self._clock.monotonic() + _STORED_SECONDS

    @property
    def is_pending(self) -> bool:
        """Whether a step of the engine would publish something, or will in a moment."""
        return bool(self._ready) or self._is_expecting

    @property
    def _is_expecting(self) -> bool:
        return bool(self._expected) and self._clock.monotonic() < self._expected_until

    def take(self) -> list[Any]:
        ready = self._ready
        return [ready.popleft() for _ in range(len(ready))]

    def cleared(self) -> None:
        """The engine has told routers that it has nothing."""
        self._engine_cleared = True

    def renamed(self) -> None:
        """What was stored before is not found any more."""
        # Another one, not an empty one: the thread may have seen that there is something to take.
        self._named = deque([None])

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    # ---- the thread of its own ---------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing:
            is_busy = False
            try:
                is_busy = self._step()
            except Exception:
                log.exception("KV events of the LMCache server failed")
            pause_seconds = _BUSY_SECONDS if is_busy or self._is_expecting else _IDLE_SECONDS
            self._rest(pause_seconds)

    def _rest(self, seconds: float) -> None:
        """Or until there is something to describe: it looks for that itself, as a notice would cost the scheduler's
        thread the interpreter."""
        until = self._clock.monotonic() + seconds
        with self._changed:
            while not self._changed.wait_for(lambda: self._closing, _BUSY_SECONDS):
                if self._named or self._clock.monotonic() >= until:
                    return

    def _step(self) -> bool:
        maker = self._maker
        if self._engine_cleared:
            self._engine_cleared = False
            maker.announce_again()
        while self._named:
            chunks = self._named.popleft()
            if chunks is None:
                maker.forget_all()
            else:
                maker.remember(chunks, self._hashed_tokens)
        is_busy = len(self._ready) < limits.MAX_EVENTS_WAITING and maker.poll()
        self._ready.extend(maker.events())
        if self._clock.monotonic() > self._expected_until + _COMPUTED_SECONDS:
            self._expected.clear()
        for name in tuple(self._expected):
            if maker.is_announced(name):
                self._expected.discard(name)
        return is_busy

    def _give_up_interpreter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, _PAUSE_SECONDS)
