"""The listing of a bucket, page by page (ListObjectsV2)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import quote, urlencode

from lmcache.core.limits import MAX_L2_LISTED_OBJECTS
from lmcache.errors import AdapterError
from lmcache.l2.adapters.s3_config import S3Location
from lmcache.l2.adapters.s3_faults import explained
from lmcache.l2.adapters.s3_requests import Request
from lmcache.l2.adapters.s3_xml import ListPage, list_page
from lmcache.l2.background import in_thread

PAGE_OBJECTS = 1000  # as many as one request lists or deletes
PAGE_TRIES = 5  # of a scan: a listing of ten thousand pages is not given up for one that was throttled
PAGE_PAUSE_SECONDS = 0.5  # after the first try, then doubled


def list_request(bucket_path: str, prefix: str, token: str, count: int) -> Request:
    query = {"list-type": "2", "encoding-type": "url", "max-keys": str(count), "prefix": prefix}
    if token:
        query["continuation-token"] = token
    return Request("ListObjectsV2", "GET", f"{bucket_path}?{urlencode(sorted(query.items()), quote_via=quote)}")


class EndlessListing(AdapterError):
    """The pages of a bucket go round or do not end. Those before it are good."""


async def pages(
    run: Callable[[Sequence[Request]], Awaitable[None]], location: S3Location, prefix: str, *, tries: int = 1
) -> AsyncIterator[ListPage]:
    """AdapterError where a page cannot be had in so many tries; EndlessListing."""
    token = ""
    begun: set[bytes] = set()  # digests of the first names of pages, and of the tokens: both may be as long as a page
    listed = 0
    while listed < MAX_L2_LISTED_OBJECTS:
        page = await _page(run, location, prefix, token, tries)
        first = _digest("name", page.objects[0].name) if page.objects else b""
        if first in begun:
            raise EndlessListing(f"{location}: its listing goes round: it gives the same names again")
        if first:
            begun.add(first)
        listed += max(len(page.objects), PAGE_OBJECTS)  # of pages without objects there is an end, too
        yield page
        if not page.next_token:
            return
        token = page.next_token
        if (next_page := _digest("token", token)) in begun:
            raise EndlessListing(f"{location}: its listing goes round: it gives the same continuation token again")
        begun.add(next_page)
    raise EndlessListing(f"{location}: its listing does not end, and is left after {MAX_L2_LISTED_OBJECTS} objects")


def _digest(kind: str, text: str) -> bytes:
    return hashlib.blake2b(f"{kind} {text}".encode(errors="surrogatepass"), digest_size=16).digest()


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
