"""What the routes share: the server behind them, who may change it, bodies, and threads for what takes time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from lmcache.admin.access import may_read_salts, why_refused
from lmcache.admin.state import ServerState
from lmcache.config.values import did_you_mean

MAX_BODY_BYTES = 64 * 1024
BODY_DEADLINE_SECONDS = 10.0

T = TypeVar("T")


class AdminContext:
    """`token` is the admin token, "" when only this host may change state."""

    def __init__(self, state: ServerState, token: str) -> None:
        self.state = state
        self._token = token
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lmcache-admin")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs what may take time, so that no request holds up another kind."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def may_read_salts(self, request: Request) -> bool:
        return may_read_salts(request, self._token)

    async def change(self, request: Request, allowed: set[str]) -> dict[str, Any]:
        """The body of a request that changes state, with no keys but the allowed ones. HTTPException when the request
        may not change state, or has no such body."""
        if refusal := why_refused(request, self._token):
            raise HTTPException(403, refusal)
        try:
            raw = await asyncio.wait_for(_read(request), BODY_DEADLINE_SECONDS)
        except asyncio.TimeoutError:
            raise HTTPException(408, "The body did not arrive in time.") from None
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            raise HTTPException(400, "The body is not JSON.") from None
        if not isinstance(body, dict):
            raise HTTPException(400, "The body must be a JSON object.")
        for key in body:
            if key not in allowed:
                guess = did_you_mean(key, sorted(allowed)).rstrip("?")
                raise HTTPException(400, f"The body has no key {key!r}{guess + '?' if guess else '.'}")
        return body


async def _read(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    return body
