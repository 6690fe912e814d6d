"""The quota of each cache salt, on every server. `_default` in a path stands for the empty salt."""

from __future__ import annotations

import math

from starlette.exceptions import HTTPException

from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB, MAX_NAME_BYTES
from lmcache.fleet import messages as m
from lmcache.fleet.quotas import FleetQuota
from lmcache.fleet.routes.base import RouteContext
from lmcache.http.operation import Access, Call, Operation


class QuotaRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._quotas = context.fleet.quotas

    def operations(self) -> list[Operation]:
        read, change, path = Access.READ, Access.CHANGE, "/quota/{cache_salt:text}"
        return [
            Operation("GET", "/quota", "What each cache salt may keep on each server", read, self.all, m.QuotaList),
            Operation("GET", "/quota/config", "How quotas are kept", read, self.config, m.QuotaConfig),
            Operation("GET", path, "The quota of one salt; _default is the empty one", read, self.get, m.QuotaEntry),
            Operation(
                *("PUT", path, "Sets what a salt may keep on each server", change, self.put, m.QuotaEntry),
                body=m.QuotaRequest,
            ),
            Operation("DELETE", path, "The salt has no quota any more", change, self.delete, m.QuotaEntry),
        ]

    async def all(self, call: Call) -> m.QuotaList:
        quotas = await self._context.in_thread(self._quotas.all)
        return m.QuotaList([_shown(quota) for quota in quotas])

    async def config(self, call: Call) -> m.QuotaConfig:
        return m.QuotaConfig("each server, by its --eviction-policy IsolatedLRU")

    async def get(self, call: Call) -> m.QuotaEntry:
        salt = _salt(call)
        return _shown(await self._context.in_thread(lambda: self._quotas.get(salt)))

    async def put(self, call: Call) -> m.QuotaEntry:
        limit_gb = call.body.limit_gb
        if not math.isfinite(limit_gb):
            raise HTTPException(400, '"limit_gb" must be a number; 1 GB is 2^30 bytes.')
        return await self._set(_salt(call), int(limit_gb * GIB))

    async def delete(self, call: Call) -> m.QuotaEntry:
        return await self._set(_salt(call), None)

    async def _set(self, salt: str, limit_bytes: int | None) -> m.QuotaEntry:
        def change() -> FleetQuota:
            self._quotas.set(salt, limit_bytes)
            self._quotas.push()  # at once, not in the next round
            return self._quotas.get(salt)

        return _shown(await self._context.in_thread(change))


def _salt(call: Call) -> str:
    name = call.path("cache_salt")
    if not name or len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise HTTPException(400, f"A cache salt has 1 to {MAX_NAME_BYTES} bytes; {DEFAULT_SALT} is the empty one.")
    return "" if name == DEFAULT_SALT else name


def _shown(quota: FleetQuota) -> m.QuotaEntry:
    salt = quota.cache_salt or DEFAULT_SALT
    return m.QuotaEntry(salt, quota.limit_bytes / GIB, quota.usage_bytes / GIB, quota.exists, quota.behind)
