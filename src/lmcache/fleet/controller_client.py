"""What a router that embeds the controller of LMCache has instead: the same class and messages, asking a coordinator.

A router that asks while the coordinator is away is told that nobody has anything, and routes as it would without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from lmcache.errors import LMCacheError
from lmcache.fleet import controller_messages as c
from lmcache.http.client import answer_of, request, split_url
from lmcache.telemetry.log_limiter import LogLimiter

logger = logging.getLogger("lmcache.fleet")

URL_VARIABLE = "LMCACHE_COORDINATOR_URL"
TOKEN_VARIABLE = "LMCACHE_ADMIN_TOKEN"
DEFAULT_URL = "http://localhost:9300"
ASK_SECONDS = 2.0
_LOG_SECONDS = 60.0


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
    ) -> None:
        """Health and timeouts of servers are the coordinator's; `health_check_interval` is how often `start_all` looks
        whether it is there. ConfigError for what is no address."""
        named = controller_urls if isinstance(controller_urls, str) else (controller_urls or {}).get("coordinator", "")
        self.url = named or environ.get(URL_VARIABLE, "") or DEFAULT_URL
        split_url(self.url, "The address of the coordinator")
        self._token = environ.get(TOKEN_VARIABLE, "").strip()
        self._interval_seconds = max(0.1, float(health_check_interval or 10.0))
        self._limiter = LogLimiter(_LOG_SECONDS)

    async def start_all(self) -> None:
        """Until it is cancelled: says in the log whether the coordinator answers."""
        answers = True
        while True:
            try:
                await asyncio.to_thread(self._ask, "GET", "/healthz")
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
        try:
            answer = await asyncio.to_thread(self._ask, "POST", path, body)
            with answer_of(self.url, "a coordinator"):
                return msgspec.convert(answer, kind)
        except LMCacheError as error:
            if self._limiter.due(path):
                logger.warning("The coordinator did not answer %s: %s", path, error)
            return otherwise

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return request(self.url, method, path, body, token=self._token, timeout_seconds=ASK_SECONDS)
