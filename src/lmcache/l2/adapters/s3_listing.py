"""The listing of a bucket, page by page (ListObjectsV2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import quote, urlencode

from lmcache.core.limits import MAX_L2_LISTED_OBJECTS
from lmcache.errors import AdapterError
from lmcache.l2.adapters.s3_config import S3Location
from lmcache.l2.adapters.s3_faults import explained
from lmcache.l2.adapters.s3_requests import Request
from lmcache.l2.adapters.s3_xml import ListPage, list_page
from lmcache.l2.background import in_thread

log = logging.getLogger("lmcache.l2")

PAGE_OBJECTS = 1000  # as many as one request lists or deletes
PAGE_TRIES = 5  # of a scan: a listing of ten thousand pages is not given up for one that was throttled
PAGE_PAUSE_SECONDS = 0.5  # after the first try, then doubled


def list_request(bucket_path: str, prefix: str, token: str, count: int) -> Request:
    query = {"list-type": "2", "encoding-type": "url", "max-keys": str(count), "prefix": prefix}
    if token:
        query["continuation-token"] = token
    return Request("ListObjectsV2", "GET", f"{bucket_path}?{urlencode(sorted(query.items()), quote_via=quote)}")


async def pages(
    run: Callable[[Sequence[Request]], Awaitable[None]], location: S3Location, prefix: str, *, tries: int = 1
) -> AsyncIterator[ListPage]:
    """AdapterError where a page cannot be had in so many tries. Pages that go round or do not end are left."""
    token = ""
    begun: set[str] = set()  # the first names of pages
    listed = 0
    while listed < MAX_L2_LISTED_OBJECTS:
        page = await _page(run, location, prefix, token, tries)
        first = page.objects[0].name if page.objects else ""
        if first in begun:
            break
        if first:
            begun.add(first)
        listed += max(len(page.objects), PAGE_OBJECTS)  # of pages without objects there is an end, too
        yield page
        if not page.next_token:
            return
        if page.next_token == token:
            break
        token = page.next_token
    log.warning(
        "%s: its listing goes round or does not end, and is left after %d pages; what it did not name counts only when "
        "it is asked for",
        *(location, len(begun)),
    )


async def _page(
    run: Callable[[Sequence[Request]], Awaitable[None]], location: S3Location, prefix: str, token: str, tries: int
) -> ListPage:
    for number in range(tries):
        request = list_request(location.bucket_path, prefix, token, PAGE_OBJECTS)
        await run([request])
        if (fault := request.fault) is None:
            return await in_thread("l2-list", list_page, request.answer)
        if number == tries - 1 or not fault.retryable:
            raise AdapterError(f"{location}: it could not be listed: {explained(fault)}", retryable=fault.retryable)
        await asyncio.sleep(PAGE_PAUSE_SECONDS * 2**number)
    raise ValueError("no try was asked for")
