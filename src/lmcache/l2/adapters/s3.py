"""`s3`: one object each in a bucket of S3, or of a server that speaks its protocol (docs/formats/remote-names.md).

The name of an object is its whole key, so what another server stored is one HEAD away. What the bucket holds is listed
in the background. Objects never change: they are stored by conditional requests where the server knows these.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Sequence

from lmcache.core.frame import holds_whole_frame
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.environment import SYSTEM, Environment
from lmcache.errors import AdapterError, ResourceError
from lmcache.l2.adapter import Adapter, Capacity, Inventory
from lmcache.l2.adapters.remote_names import RemoteNames
from lmcache.l2.adapters.s3_client import S3Session, check_package, open_session
from lmcache.l2.adapters.s3_config import S3Config, S3Location
from lmcache.l2.adapters.s3_faults import FULL_CODES, explained, refusal
from lmcache.l2.adapters.s3_inventory import BucketContents
from lmcache.l2.adapters.s3_listing import PAGE_OBJECTS, PAGE_TRIES, EndlessListing, list_request, pages
from lmcache.l2.adapters.s3_requests import Download, Fault, Request, Upload
from lmcache.l2.adapters.s3_xml import delete_body, is_list_page, list_page, not_deleted
from lmcache.l2.adapters.scan_order import MAX_TIME_NS
from lmcache.l2.background import in_thread, spawn
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.logs import level_of

log = logging.getLogger("lmcache.l2")

LOG_SECONDS = 60.0
OPEN_SECONDS = 10.0  # without an answer until somebody is told why
RESCAN_SECONDS = 900.0  # of a bucket with a capacity: requests for listings cost money
RESCAN_FAILED_SECONDS = 60.0  # after a scan that failed: until then the capacity does not know the others' objects
RESCAN_SHARE = 50  # the pause after a scan, in multiples of its duration

CUT_SHORT = Fault(0, "the answer was cut short")

_UNKNOWN_REQUEST = (405, 501)


class S3Adapter(Adapter):
    capacity = Capacity()

    def __init__(self, config: S3Config, environment: Environment = SYSTEM) -> None:
        self._clock = environment.clock
        self.capacity = Capacity(config.limit_bytes)
        self._config = config
        self._name = config.name
        self._session: S3Session | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_conditional = True  # until the server says that it does not know such requests
        self._deletes_many = True
        self._throttled = 0
        self._told: dict[bytes, Namespace] = {}  # namespaces of the last scan, by their digests
        self._listed_until_ns = MAX_TIME_NS  # all that the first scan finds is older than what is stored meanwhile
        self._log_limiter = LogLimiter(LOG_SECONDS, self._clock)

    def status(self) -> dict[str, int]:
        if self._session is None:
            return {}
        return {
            "requests_in_flight": self._session.requests_in_flight,
            "throttled_requests": self._throttled,
            "conditional_puts": int(self._is_conditional),
        }

    async def open(self, inventory: Inventory) -> None:
        location = self._config.location
        self._session = await open_session(self._config, location)
        try:
            self._location = await self._found(location)
        except BaseException:
            await self.close()
            raise
        self._names = RemoteNames(self._location.folder + self._config.prefix)
        self._root_path = self._location.object_path(self._names.root)
        self._inventory = inventory
        self._watcher = spawn(self._watch(), f"{self._name}-watch")

    async def _found(self, location: S3Location) -> S3Location:
        """Where the bucket is. ConfigError or ResourceError where it cannot be listed."""
        if location.is_virtual is None:
            request = await self._ask(location, "")
            if request.fault is not None and request.fault.retryable:  # that says nothing about the host
                raise await in_thread("l2-open", refusal, self._config, location, request.fault)
            is_virtual = request.fault is None and is_list_page(request.answer)
            location = location.resolved(is_virtual=is_virtual)
        request = await self._ask(location, RemoteNames(location.folder + self._config.prefix).root)
        if request.fault is not None:
            raise await in_thread("l2-open", refusal, self._config, location, request.fault)
        try:
            list_page(request.answer)
        except AdapterError as error:
            raise ResourceError(
                f"{self._config.where}: {location} is no bucket: {error}; correct s3_endpoint."
            ) from None
        return location

    async def _ask(self, location: S3Location, prefix: str) -> Request:
        """Lists one name. ResourceError where no answer comes."""
        assert self._session is not None
        request = list_request(location.bucket_path, prefix, "", 1)
        await self._session.run([request], min(OPEN_SECONDS, self._config.timeout_seconds / 2))
        if request.fault is not None and not request.fault.status:
            raise await in_thread("l2-open", refusal, self._config, location, request.fault)
        return request

    # ---- objects -----------------------------------------------------------------------------------------------------
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        were_conditional = self._is_conditional
        requests = self._uploads(keys, buffers)
        await self._run(requests)
        again = [index for index, request in enumerate(requests) if _is_unknown(request.fault)]
        if again and were_conditional:
            if self._is_conditional:
                self._is_conditional = False
                log.info("%s: the server knows no conditional requests; objects are stored without", self._name)
            second = self._uploads([keys[index] for index in again], [buffers[index] for index in again])
            await self._run(second)
            for index, request in zip(again, second, strict=True):
                requests[index] = request
        outcomes = [_stored(request.fault) for request in requests]
        self._report([request.fault for request in requests], [o is StoreOutcome.FAILED for o in outcomes])
        return outcomes

    def _uploads(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[Upload]:
        headers = [("If-None-Match", "*")] if self._is_conditional else []
        return [Upload(path, buffer, headers) for path, buffer in zip(self._paths(keys), buffers, strict=True)]

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        requests = [Download(path, buffer) for path, buffer in zip(self._paths(keys), buffers, strict=True)]
        await self._run(requests)
        outcomes = [_loaded(request, buffer) for request, buffer in zip(requests, buffers, strict=True)]
        self._report([request.fault for request in requests], [o is LoadOutcome.FAILED for o in outcomes])
        useless = [
            key
            for key, request, outcome in zip(keys, requests, outcomes, strict=True)
            if outcome is LoadOutcome.CORRUPT or _is_archived(request.fault)
        ]
        if useless:
            try:
                await self.delete(useless, corrupt=True)
            except AdapterError as error:
                log.debug("%s: corrupt or archived objects could not be deleted: %s", self._name, error)
        return outcomes

    async def probe(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        requests = [Request("HeadObject", "HEAD", path) for path in self._paths(keys)]
        await self._run(requests)
        faults = [request.fault for request in requests if request.fault is not None and request.fault.status != 404]
        if faults:
            raise AdapterError(
                f"{self._location}: a lookup failed: {explained(faults[0])}", retryable=faults[0].retryable
            )
        return [None if request.fault else _size(request.header("content-length")) for request in requests]

    async def delete(self, keys: Sequence[ObjectKey], *, corrupt: bool = False) -> list[bool]:
        """Corrupt objects are deleted, too: a bucket has no place that nobody pays for."""
        names = self._names.names(keys)
        kept = await self._delete(names)
        return [name not in kept for name in names]

    async def clear(self) -> tuple[int, int]:
        objects = size_bytes = 0
        async for page in pages(self._run, self._location, self._names.root):
            found = [listed for listed in page.objects if self._names.parse(listed.name) is not None]
            kept = await self._delete([listed.name for listed in found])
            gone = [listed for listed in found if listed.name not in kept]
            objects += len(gone)
            size_bytes += sum(listed.size_bytes for listed in gone)
        return objects, size_bytes

    async def close(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # ---- requests ----------------------------------------------------------------------------------------------------
    async def _run(self, requests: Sequence[Request]) -> None:
        if self._session is None:
            raise AdapterError(f"{self._name}: it is not open")
        await self._session.run(requests, self._config.timeout_seconds)
        self._throttled += sum(request.fault is not None and request.fault.throttled for request in requests)

    def _paths(self, keys: Sequence[ObjectKey]) -> list[str]:
        skipped = len(self._names.root)
        return [self._root_path + name[skipped:] for name in self._names.names(keys)]  # hex digits need no escapes

    def _report(self, faults: Sequence[Fault | None], have_failed: Sequence[bool]) -> None:
        """AdapterError where every request failed; some that did are logged."""
        failed = [fault for fault, has_failed in zip(faults, have_failed, strict=True) if has_failed]
        if not failed:
            return
        first = failed[0] or CUT_SHORT
        sentence = f"{self._location}: {len(failed)} of {len(faults)} requests failed, the first: {explained(first)}"
        if len(failed) == len(faults):
            raise AdapterError(sentence, retryable=first.retryable)
        if self._log_limiter.due():
            log.warning("%s: %s", self._name, sentence)

    async def _delete(self, names: Sequence[str]) -> set[str]:
        """Those that are still there."""
        if self._deletes_many and len(names) > 1:
            requests = [
                self._delete_request(names[start : start + PAGE_OBJECTS])
                for start in range(0, len(names), PAGE_OBJECTS)
            ]
            await self._run(requests)
            if not any(_is_unknown(request.fault) for request in requests):
                faults = [request.fault for request in requests]
                self._report(faults, [fault is not None for fault in faults])
                return self._kept(names, requests)
            self._deletes_many = False
        requests = [Request("DeleteObject", "DELETE", self._location.object_path(name)) for name in names]
        await self._run(requests)
        faults = [request.fault for request in requests]
        have_failed = [fault is not None and not _is_missing(fault) for fault in faults]
        self._report(faults, have_failed)
        return {name for name, has_failed in zip(names, have_failed, strict=True) if has_failed}

    def _kept(self, names: Sequence[str], requests: Sequence[Request]) -> set[str]:
        kept: set[str] = set()
        for number, request in enumerate(requests):
            asked = names[number * PAGE_OBJECTS : (number + 1) * PAGE_OBJECTS]
            if request.fault is not None:
                kept.update(asked)
            elif request.answer:
                faults = not_deleted(request.answer)
                kept.update(name for name in asked if faults.get(name, "NoSuchKey") != "NoSuchKey")
        return kept

    def _delete_request(self, names: Sequence[str]) -> Request:
        body = delete_body(names)
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = [("Content-MD5", digest), ("Content-Type", "application/xml")]
        return Request("DeleteObjects", "POST", f"{self._location.bucket_path}?delete=", headers, body)

    # ---- what the bucket holds ---------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """Lists once, and again where the capacity has to know what other servers store and delete."""
        loop = asyncio.get_running_loop()
        is_first = True
        while True:
            started = loop.time()
            least_seconds, share = RESCAN_SECONDS, RESCAN_SHARE
            try:
                await self._scan()
            except AdapterError as error:
                least_seconds, share = RESCAN_FAILED_SECONDS, 1
                log.warning("%s: %s; what it holds is found when it is asked for", self._name, error)
            except Exception as error:  # the root of a task: the adapter serves without an inventory, by HEAD
                log.log(level_of(error), "%s: %s could not be listed", self._name, self._location, exc_info=True)
            if is_first:
                self._inventory.complete()
                is_first = False
            if self._config.limit_bytes is None:
                return
            await asyncio.sleep(max(least_seconds, share * (loop.time() - started)))

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        scan = self._inventory.begin_scan()
        contents = BucketContents(self._names, self._told)
        progress = LogLimiter(LOG_SECONDS, self._clock)
        progress.due()  # most listings are over before it is due again
        try:
            async for page in pages(self._run, self._location, self._names.root, tries=PAGE_TRIES):
                await in_thread("l2-list", contents.add, page.objects)
                if progress.due():
                    # Millions of objects take long, and until the first listing ends stores with a capacity wait.
                    log.info("%s: listing %s: %d objects so far", self._name, self._location, len(contents))
        except EndlessListing as error:
            log.warning("%s: %s; what it did not name counts only when it is asked for", self._name, error)
        await self._identify(contents)
        self._told = contents.told()
        order = await in_thread("l2-list", contents.youngest_first)
        for columns, newer in contents.told_as(order, self._listed_until_ns):
            self._inventory.found(columns, newer=newer)
            await asyncio.sleep(0)
        # By the server's clock. What was stored behind the back of a scan may be as old as its beginning.
        self._listed_until_ns = max(0, contents.newest_ns(order) - int((loop.time() - started) * 1e9))
        try:
            await self._report_lost(scan)
        except AdapterError as error:
            log.warning(
                "%s: %s; what others deleted is a miss once, or is noticed by the next listing", self._name, error
            )

    async def _report_lost(self, scan: int) -> None:
        for keys in self._inventory.known(unseen_by=scan):
            # Asked once more: one may have been stored during the scan.
            for start in range(0, len(keys), PAGE_OBJECTS):
                some = keys[start : start + PAGE_OBJECTS]
                sizes = await self.probe(some)
                self._inventory.lost([key for key, size in zip(some, sizes, strict=True) if size is None])
            await asyncio.sleep(0)

    async def _identify(self, contents: BucketContents) -> None:
        """Reads the names of namespaces out of the headers of their objects."""
        while candidates := contents.candidates():
            buffers = [contents.header_buffer() for _ in candidates]
            paths = [self._location.object_path(name) for name in candidates]
            requests = [Download(path, buffer) for path, buffer in zip(paths, buffers, strict=True)]
            await self._run(requests)
            for name, request, buffer in zip(candidates, requests, buffers, strict=True):
                contents.identify(name, buffer if request.fault is None else memoryview(b""))


def check(config: S3Config) -> list[str]:
    """The `AdapterType.check` of this type. The bucket is asked by `open`."""
    check_package(config.where)
    return []


def _is_unknown(fault: Fault | None) -> bool:
    """Whether the server does not know such a request."""
    return fault is not None and (fault.status in _UNKNOWN_REQUEST or fault.code == "NotImplemented")


def _is_missing(fault: Fault) -> bool:
    """Whether there is no such object. Answers to HEAD do not tell it from a bucket that is gone."""
    return fault.status == 404 and fault.code != "NoSuchBucket"


def _is_archived(fault: Fault | None) -> bool:
    """Whether a rule of the bucket has moved the object to where it must be restored from for hours: as long as it is
    there, nobody loads it and nobody stores it anew."""
    return fault is not None and fault.status == 403 and fault.code == "InvalidObjectState"


def _stored(fault: Fault | None) -> StoreOutcome:
    if fault is None:
        return StoreOutcome.STORED
    if fault.status == 412:
        return StoreOutcome.ALREADY_THERE
    if fault.status == 507 or fault.code in FULL_CODES:
        return StoreOutcome.FULL
    return StoreOutcome.TOO_LARGE if fault.code == "EntityTooLarge" else StoreOutcome.FAILED


def _loaded(request: Download, buffer: memoryview) -> LoadOutcome:
    fault = request.fault
    if fault is not None:
        if _is_missing(fault) or _is_archived(fault):
            return LoadOutcome.MISSING
        # 416: the object is empty.
        return LoadOutcome.CORRUPT if fault.too_long or fault.status == 416 else LoadOutcome.FAILED
    if request.received_bytes == request.object_bytes == buffer.nbytes:
        return LoadOutcome.LOADED
    if request.received_bytes < min(request.object_bytes, buffer.nbytes):
        return LoadOutcome.FAILED
    return LoadOutcome.LOADED if holds_whole_frame(buffer, request.received_bytes) else LoadOutcome.CORRUPT


def _size(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
