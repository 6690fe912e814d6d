"""Objects by name and prompts by tokens: listing, deletion, clear, lookup, and the jobs that warm and move."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.responses import Response

from lmcache.admin import messages as m
from lmcache.admin.jobs import TrackedJob
from lmcache.admin.requests import AdminContext
from lmcache.admin.tokenizers import Tokenizers
from lmcache.http.operation import Access, Call, Operation
from lmcache.protocol.tokens import pack_tokens
from lmcache.service.cache_operations import ChunkPlaces, Prompt
from lmcache.tiering.object_listing import ListingRequest

logger = logging.getLogger("lmcache.admin")

_UNKNOWN_MODEL = {409: "no engine with that model is registered"}
_NO_JOB = {404: "there is no such job; those that ended long ago are forgotten"}


class ObjectRoutes:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._tokenizers = Tokenizers(lambda: context.state.config.tokenizer_dir)

    def operations(self) -> list[Operation]:
        read, change = Access.READ, Access.CHANGE
        return [
            Operation(
                *("GET", "/cache/objects", "Lists objects, a page at a time", read, self.list_objects, m.ObjectPage),
                query=m.ObjectQuery,
            ),
            Operation(
                *("DELETE", "/cache/objects", "Deletes single objects", change, self.delete, m.Deleted),
                body=m.DeleteRequest,
                large_body=True,
            ),
            Operation(
                *("POST", "/cache/clear", "Empties L1, L2 or both", change, self.clear, m.Cleared), body=m.ClearRequest
            ),
            Operation(
                *(
                    "POST",
                    "/cache/lookup",
                    "Tells which tiers have each chunk of a prompt; of partial chunks, as far as is known here",
                    read,
                ),
                *(self.lookup, m.LookupAnswer),
                body=m.TokensRequest,
                large_body=True,
                refusals=_UNKNOWN_MODEL,
            ),
            Operation(
                *("POST", "/cache/prefetches", "Warms L1 with a prompt that L2 has: a job", change),
                *(self.prefetch, m.Accepted),
                body=m.TokensRequest,
                status=202,
                large_body=True,
                refusals=_UNKNOWN_MODEL,
            ),
            Operation(
                *("GET", "/cache/prefetches/{request_id}", "How far a prefetch is", read, self.prefetch_job, m.Job),
                refusals=_NO_JOB,
            ),
            Operation(
                *("POST", "/cache/moves", "Moves or copies objects between tiers: a job", change),
                *(self.move, m.Accepted),
                body=m.MoveRequest,
                status=202,
                large_body=True,
                refusals=_UNKNOWN_MODEL,
            ),
            Operation("GET", "/jobs", "Jobs under way, and the latest that ended", read, self.jobs, m.Jobs),
            Operation("GET", "/jobs/{request_id}", "How far a job is", read, self.job, m.Job, refusals=_NO_JOB),
        ]

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def list_objects(self, call: Call) -> Response:
        query: m.ObjectQuery = call.query
        request = ListingRequest(
            *(query.tier, query.adapter, query.model_name, query.key, query.page_size, query.page_token)
        )
        cache = self._context.cache
        page = await self._context.in_thread(lambda: cache.list_objects(request))
        body = b'{"entries":[%b],"next_page_token":"%b"}' % (page.text, page.next_page_token.encode())
        return Response(body, media_type="application/json")

    async def delete(self, call: Call) -> m.Deleted:
        body: m.DeleteRequest = call.body
        cache = self._context.cache
        deleted, kept, missing = await self._context.in_thread(
            lambda: cache.delete(body.keys, body.tier, force=body.force)
        )
        return m.Deleted(deleted, kept + missing, not kept)

    async def clear(self, call: Call) -> m.Cleared:
        body: m.ClearRequest = call.body
        objects, size_bytes = await self._context.in_thread(
            lambda: self._context.state.clear(body.tier, force=body.force)
        )
        logger.info("Cleared %s by request: %d objects, %d bytes", body.tier, objects, size_bytes)
        return m.Cleared("ok", True, body.tier, objects, size_bytes)

    # ---- prompts -----------------------------------------------------------------------------------------------------
    async def _prompt(self, body: m.TokensRequest | m.MoveRequest) -> Prompt:
        if bool(body.tokens) == bool(body.text):
            raise HTTPException(400, 'The body needs either "tokens" or "text".')
        cache = self._context.cache

        def name() -> Prompt:
            tokens = self._tokenizers.encode(body.model_name, body.text) if body.text else body.tokens
            return cache.prompt(body.model_name, pack_tokens(tokens), body.cache_salt, body.instance_id)

        return await self._context.in_thread(name)

    async def lookup(self, call: Call) -> m.LookupAnswer:
        prompt = await self._prompt(call.body)
        cache = self._context.cache

        def look() -> m.LookupAnswer:
            places = cache.lookup(prompt.keys)
            prefix = next((index for index, place in enumerate(places) if not place.tiers), len(places))
            namespaces = [namespace.digest.hex() for namespace in prompt.keys.namespaces.namespaces]
            partials = cache.stored_partials(prompt, asks_backends=False)
            return m.LookupAnswer(
                *(self._context.state.config.chunk_size, prefix, [m.ChunkTiers(*_places(place)) for place in places]),
                namespaces,
                [m.PartialChunk(*_places(place), tokens) for tokens, place in partials],
            )

        return await self._context.in_thread(look)

    # ---- jobs --------------------------------------------------------------------------------------------------------
    async def prefetch(self, call: Call) -> m.Accepted:
        prompt = await self._prompt(call.body)
        cache = self._context.cache
        keys = await self._context.in_thread(lambda: cache.with_partial(prompt))
        job = self._context.jobs.submit(
            cache.mark, "prefetch", keys.objects, lambda progress: cache.prefetch(keys, progress)
        )
        return m.Accepted(job.request_id)

    async def move(self, call: Call) -> m.Accepted:
        body: m.MoveRequest = call.body
        cache = self._context.cache
        source, target = cache.tier(body.source), cache.tier(body.target)
        if source is target:
            raise HTTPException(400, '"from" and "to" must be two tiers.')
        if body.keys and (body.tokens or body.text):
            raise HTTPException(400, 'The body needs either "keys" or a prompt.')
        if body.keys:
            keys = await self._context.in_thread(lambda: cache.keys_of(body.keys))
        else:
            prompt = await self._prompt(body)
            prompt_keys = await self._context.in_thread(lambda: cache.with_partial(prompt))
            ranks = range(len(prompt_keys.namespaces))
            keys = [prompt_keys.key(rank, chunk) for chunk in range(prompt_keys.chunks) for rank in ranks]
        job = self._context.jobs.submit(
            *(cache.mark, "move", len(keys)),
            lambda progress: cache.move(keys, source, target, progress, copy=body.copy),
        )
        return m.Accepted(job.request_id)

    async def jobs(self, call: Call) -> m.Jobs:
        return m.Jobs([self._shown(job) for job in self._context.jobs.all()])

    async def job(self, call: Call) -> m.Job:
        return self._job(call, "")

    async def prefetch_job(self, call: Call) -> m.Job:
        return self._job(call, "prefetch")

    def _job(self, call: Call, kind: str) -> m.Job:
        job = self._context.jobs.find(call.path("request_id"))
        if job is None or kind not in ("", job.kind):
            raise HTTPException(404, "There is no such job; those that ended long ago are forgotten, see GET /jobs.")
        return self._shown(job)

    def _shown(self, job: TrackedJob) -> m.Job:
        progress = job.progress
        return m.Job(
            request_id=job.request_id,
            kind=job.kind,
            status=job.status,
            done=job.has_ended,
            objects_total=progress.total,
            objects_done=progress.done,
            objects_failed=progress.failed,
            detail=progress.detail,
            age_seconds=round(self._context.jobs.age_seconds(job), 3),
        )


def _places(place: ChunkPlaces) -> tuple[str, list[str], list[int]]:
    return place.chunk_hash.hex(), list(place.tiers), list(place.in_l1)
