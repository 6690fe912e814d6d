"""What a router that embeds the controller of LMCache has instead: the same class and messages, asking a coordinator.

A router that asks while the coordinator is away is told that nobody has anything, and routes as it would without it. A
coordinator that did not answer is asked by nobody's request until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from lmcache.clock import Clock
from lmcache.core.limits import MAX_COORDINATOR_ASKS
from lmcache.environment import SYSTEM
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.fleet import controller_messages as c
from lmcache.http.client import HttpRefused, answer_of, request, split_url
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")

URL_VARIABLE = "LMCACHE_COORDINATOR_URL"
TOKEN_VARIABLE = "LMCACHE_ADMIN_TOKEN"
DEFAULT_URL = "http://localhost:9300"
ASK_SECONDS = 2.0
_LOG_SECONDS = 60.0
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 1.0, 30.0  # between two looks at one that does not answer

T = TypeVar("T")


class LookupMsg(msgspec.Struct, kw_only=True):
    """Who has how much of a prompt? `model_name` and `cache_salt` are additions."""

    tokens: list[int]
    event_id: str = ""
    model_name: str = ""
    cache_salt: str = ""


class LookupRetMsg(msgspec.Struct, kw_only=True):
    """Location and tokens by server, the most tokens first."""

    layout_info: dict[str, tuple[str, int]]
    event_id: str = ""


class QueryInstMsg(msgspec.Struct, kw_only=True):
    """Who is at that address?"""

    ip: str
    event_id: str = ""


class QueryInstRetMsg(msgspec.Struct, kw_only=True):
    """None: nobody."""

    instance_id: str | None
    event_id: str = ""


class LMCacheControllerManager:
    """The coordinator is at `controller_urls` where that is a text, at its "coordinator", or where
    LMCACHE_COORDINATOR_URL says; else on this host. The admin token is in LMCACHE_ADMIN_TOKEN."""

    def __init__(
        self,
        controller_urls: str | Mapping[str, str] | None = None,
        health_check_interval: float = 10.0,
        lmcache_worker_timeout: float = 30.0,
        environ: Mapping[str, str] = os.environ,
        clock: Clock = SYSTEM.clock,
    ) -> None:
        """Health and timeouts of servers are the coordinator's; `health_check_interval` is how often `start_all` looks
        whether it is there. ConfigError for what is no address."""
        url = controller_urls if isinstance(controller_urls, str) else (controller_urls or {}).get("coordinator", "")
        self.url = url or environ.get(URL_VARIABLE, "") or DEFAULT_URL
        split_url(self.url, "The address of the coordinator")
        self._token = environ.get(TOKEN_VARIABLE, "").strip()
        self._interval_seconds = max(0.1, float(health_check_interval or 10.0))
        self._clock = clock
        self._limiter = LogLimiter(_LOG_SECONDS, clock)
        self._free_asks = threading.BoundedSemaphore(MAX_COORDINATOR_ASKS)
        self._pause_seconds = 0.0  # 0: it answers
        self._paused_until = 0.0
        self._failures = 0
        self._trial: asyncio.Task[None] | None = None

    async def start_all(self) -> None:
        """Until it is cancelled: says in the log whether the coordinator answers."""
        answers = True
        while True:
            try:
                await self._ask("GET", "/healthz")
                if not answers:
                    logger.info("The coordinator at %s answers again", self.url)
                answers = True
            except LMCacheError as error:
                if answers:
                    logger.warning("The coordinator cannot be asked: %s", error)
                answers = False
            await asyncio.sleep(self._interval_seconds)

    async def handle_orchestration_message(self, msg: LookupMsg | QueryInstMsg) -> LookupRetMsg | QueryInstRetMsg:
        """TypeError for any other message."""
        if isinstance(msg, LookupMsg):
            body = msgspec.structs.asdict(msg)
            answer = await self._answer("/lookup", body, c.LookupAnswer, c.LookupAnswer(msg.event_id, {}))
            layout = {
                name: (str(location), tokens)
                for name, (location, tokens) in answer.layout_info.items()
                if isinstance(tokens, int)
            }
            return LookupRetMsg(layout_info=layout, event_id=answer.event_id)
        if isinstance(msg, QueryInstMsg):
            body = msgspec.structs.asdict(msg)
            unknown = c.QueryInstanceAnswer(msg.event_id, None)
            found = await self._answer("/query_instance", body, c.QueryInstanceAnswer, unknown)
            return QueryInstRetMsg(instance_id=found.instance_id, event_id=found.event_id)
        raise TypeError(f"{type(msg).__name__} is no message that this controller takes: LookupMsg or QueryInstMsg.")

    async def _answer(self, path: str, body: dict[str, Any], kind: Any, otherwise: Any) -> Any:
        if self._pause_seconds:
            self._try()
            return otherwise
        try:
            answer = await self._ask("POST", path, body)
            with answer_of(self.url, "a coordinator"):
                return msgspec.convert(answer, kind)
        except LMCacheError as error:
            if self._limiter.due(path):
                logger.warning("The coordinator did not answer %s: %s", path, error)
            return otherwise

    def _try(self) -> None:
        """Sees whether it answers again, where that is due. Nobody's request waits for it."""
        if self._clock.monotonic() >= self._paused_until and (self._trial is None or self._trial.done()):
            self._trial = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        try:
            await self._ask("GET", "/healthz")
        except LMCacheError as error:
            logger.debug("The coordinator still cannot be asked: %s", error)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, after ASK_SECONDS at most. LMCacheError; ServerUnavailable begins a pause."""

        def ask() -> Any:
            return request(self.url, method, path, body, token=self._token, timeout_seconds=ASK_SECONDS)

        failures = self._failures
        try:
            answer = await self._in_thread(ask)
        except ServerUnavailable:
            if failures == self._failures:  # what was under way when it failed is one failure with it
                self._failures += 1
                self._pause_seconds = min(max(2 * self._pause_seconds, _FIRST_PAUSE_SECONDS), _LAST_PAUSE_SECONDS)
                self._paused_until = self._clock.monotonic() + self._pause_seconds
            raise
        except HttpRefused:
            self._pause_seconds = 0.0  # it has answered
            raise
        self._pause_seconds = 0.0
        return answer

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """On a thread of its own: those that a program shares are not held up. ServerUnavailable where that takes too
        long; another LMCacheError where too many have not ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(asyncio.Future.exception)  # seen, also where nobody waits any more

        def run() -> None:
            try:
                settle: Callable[[], None] = partial(future.set_result, call())
            except BaseException as error:  # the root of the thread: the awaiting side handles it
                settle = partial(future.set_exception, error)
            self._free_asks.release()
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nothing waits for the result
                loop.call_soon_threadsafe(settle)

        if not self._free_asks.acquire(blocking=False):
            raise LMCacheError(f"{MAX_COORDINATOR_ASKS} requests to {self.url} have not ended.")
        try:
            threading.Thread(target=run, name="lmcache-coordinator", daemon=True).start()
        except RuntimeError as error:
            self._free_asks.release()
            raise LMCacheError(f"{self.url} could not be asked: {error}.") from None
        await asyncio.wait({future}, timeout=ASK_SECONDS)
        if not future.done():
            raise ServerUnavailable(f"{self.url} did not answer within {ASK_SECONDS:g} s.")
        return future.result()
