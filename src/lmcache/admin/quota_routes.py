"""The quota of each cache salt over HTTP. `_default` in a path stands for the empty salt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmcache.admin.requests import AdminContext
from lmcache.core.key import salt_digest
from lmcache.core.limits import GIB, MAX_NAME_BYTES, MAX_QUOTA_GB
from lmcache.l1.quota import Quota
from lmcache.l1.quota_file import DEFAULT_SALT


class QuotaRoutes:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._state = context.state  # whose quotas come after this

    def routes(self) -> list[Route]:
        return [
            Route("/quota", self.all),
            Route("/quota/{cache_salt:path}", self.of_salt, methods=["GET", "PUT", "DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        quotas, name = await self._context.in_thread(self._state.quotas.all), self._naming(request)
        shown = sorted((_shown(quota, name) for quota in quotas), key=lambda entry: str(entry["cache_salt"]))
        return JSONResponse({"quotas": shown, "enforced": self._state.quotas.enforced})

    async def of_salt(self, request: Request) -> Response:
        name = request.path_params["cache_salt"]
        if not name:
            raise HTTPException(400, f"The path must name a cache salt; {DEFAULT_SALT} is the empty one.")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise HTTPException(400, f"A cache salt has at most {MAX_NAME_BYTES} bytes.")
        salt = "" if name == DEFAULT_SALT else name
        if request.method == "PUT":
            limit_bytes = _limit_bytes(await self._context.change(request, {"limit_gb"}))
            quota = await self._context.in_thread(lambda: self._state.quotas.put(salt, limit_bytes))
        elif request.method == "DELETE":
            await self._context.change(request, set())
            quota = await self._context.in_thread(lambda: self._state.quotas.delete(salt))
        else:
            quota = await self._context.in_thread(lambda: self._state.quotas.get(salt))
        return JSONResponse({**_shown(quota, self._naming(request)), "enforced": self._state.quotas.enforced})

    def _naming(self, request: Request) -> Callable[[str], str]:
        return str if self._context.may_read_salts(request) else salt_digest


def _limit_bytes(body: dict[str, Any]) -> int:
    limit = body.get("limit_gb")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit):
        raise HTTPException(400, '"limit_gb" must be a number; 1 GB is 2^30 bytes.')
    if not 0 <= limit <= MAX_QUOTA_GB:
        raise HTTPException(400, f'"limit_gb" must be at least 0 and at most {MAX_QUOTA_GB}, got {limit:g}.')
    return int(limit * GIB)


def _shown(quota: Quota, name: Callable[[str], str]) -> dict[str, Any]:
    return {
        "cache_salt": name(quota.cache_salt) or DEFAULT_SALT,
        "limit_gb": quota.limit_bytes / GIB,
        "current_usage_gb": quota.usage_bytes / GIB,
        "exists": quota.exists,
    }
