"""The quota of each cache salt. `_default` in a path stands for the empty salt."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lmcache.admin import messages as m
from lmcache.admin.requests import AdminContext
from lmcache.admin.shared_answer import SharedAnswer
from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB, MAX_NAME_BYTES
from lmcache.http.operation import Access, Call, Operation
from lmcache.l1.quota import Quota


class QuotaRoutes:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._state = context.state  # whose quotas come after this
        # By whether salts are shown. Everybody may ask, and many salts take a while.
        self._shared = {shows: SharedAnswer(partial(self._quotas, shows)) for shows in (False, True)}

    def operations(self) -> list[Operation]:
        path, public, change = "/quota/{cache_salt:text}", Access.PUBLIC, Access.CHANGE
        of_one = "The same of one salt; _default is the empty one"
        return [
            Operation(
                *("GET", "/quota", "What each cache salt may keep, and has; salts are digests without the admin token"),
                *(public, self.all, m.Quotas),
            ),
            # Whoever may ask of a salt that he guesses is told whether there is such a tenant, and what it has.
            Operation("GET", path, of_one, Access.READ, self.get, m.SaltQuota),
            Operation(*("PUT", path, "Sets what a salt may keep", change, self.put, m.SaltQuota), body=m.QuotaRequest),
            Operation("DELETE", path, "The salt has no limit any more", change, self.delete, m.SaltQuota),
        ]

    async def all(self, call: Call) -> Response:
        return Response(await self._shared[call.may_read_salts].get(), media_type="application/json")

    async def _quotas(self, shows_salts: bool) -> bytes:
        naming = str if shows_salts else self._state.metrics.salt_digest

        def encoded() -> bytes:
            shown = [m.Quota(*_figures(quota, naming)) for quota in self._state.quotas.all()]
            shown.sort(key=lambda entry: entry.cache_salt)
            return msgspec.json.encode(m.Quotas(shown, self._state.quotas.enforced))

        return await self._context.figures(encoded)

    async def get(self, call: Call) -> m.SaltQuota:
        salt = _salt(call)
        return self._shown(await self._context.figures(lambda: self._state.quotas.get(salt)), call)

    async def put(self, call: Call) -> m.SaltQuota:
        salt, limit_gb = _salt(call), call.body.limit_gb
        if not math.isfinite(limit_gb):
            raise HTTPException(400, '"limit_gb" must be a number; 1 GB is 2^30 bytes.')
        return self._shown(
            await self._context.in_thread(lambda: self._state.quotas.put(salt, int(limit_gb * GIB))), call
        )

    async def delete(self, call: Call) -> m.SaltQuota:
        salt = _salt(call)
        return self._shown(await self._context.in_thread(lambda: self._state.quotas.delete(salt)), call)

    def _shown(self, quota: Quota, call: Call) -> m.SaltQuota:
        naming = str if call.may_read_salts else self._state.metrics.salt_digest
        return m.SaltQuota(*_figures(quota, naming), self._state.quotas.enforced)


def _salt(call: Call) -> str:
    name = call.path("cache_salt")
    if not name:
        raise HTTPException(400, f"The path must name a cache salt; {DEFAULT_SALT} is the empty one.")
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise HTTPException(400, f"A cache salt has at most {MAX_NAME_BYTES} bytes.")
    return "" if name == DEFAULT_SALT else name


def _figures(quota: Quota, name: Callable[[str], str]) -> tuple[str, float, float, bool]:
    shown = name(quota.cache_salt) or DEFAULT_SALT
    return shown, quota.limit_bytes / GIB, quota.usage_bytes / GIB, quota.exists
