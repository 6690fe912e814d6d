"""awscrt's S3 client on one asyncio loop: batches of requests, each with a deadline, reported together.

awscrt runs callbacks on threads of its own. The last one of a request puts it into a queue and wakes the loop once for
all that are in it; nothing else of a transfer runs on the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache.errors import ResourceError
from lmcache.l2.adapters.s3_config import S3Config, S3Location
from lmcache.l2.adapters.s3_requests import Fault, Headers, Request
from lmcache.l2.background import in_thread

if TYPE_CHECKING:
    from awscrt.io import ClientBootstrap, EventLoopGroup
    from awscrt.s3 import S3Client

PACKAGE = 'install it by `pip install "lmcache[s3]"`'

PART_BYTES = 8 << 20  # of larger objects, which are moved by parts at once
SINGLE_PUT_BYTES = 32 << 20  # a larger object is stored in parts, which costs two more requests
REQUESTS_AT_ONCE = 128  # of a batch; submitting one takes a part of a millisecond of the loop
MEMORY_LIMIT_BYTES = 2 << 30  # of awscrt for bodies under way; the layers around the adapter keep it far below
# awscrt makes a connection for each of these in its target, whatever a connection reaches then.
GBPS_PER_CONNECTION = 0.4
SMALLEST_TARGET_GBPS = 10.0
CLOSE_SECONDS = 2.0  # a connection whose TLS has failed ends half a minute later

# awscrt tries requests again that met a fault of the connection or a 5xx, then the layers around the adapter do.
MAX_RETRIES = 3
RETRY_SCALE_MS = 50
RETRY_MAX_SECONDS = 2
CONNECT_TIMEOUT_MS = 3000

TIMED_OUT = Fault(0, "no answer in time")
CLOSED = Fault(0, "closed")


async def open_session(config: S3Config, location: S3Location) -> S3Session:
    """Connects to nothing yet. ResourceError where awscrt is missing or refuses the settings."""
    return S3Session(location, await in_thread("l2-open", connect, config, location))


class S3Session:
    """Belongs to the loop that made it."""

    def __init__(self, location: S3Location, connected: tuple[EventLoopGroup, ClientBootstrap, S3Client]) -> None:
        self._location = location
        self._loop = asyncio.get_running_loop()
        self._ended: deque[Request] = deque()
        self._is_woken = False
        self._batches: dict[Request, _Batch] = {}
        self._handles: dict[Request, Any] = {}
        self._is_closed = False
        self._threads, self._bootstrap, self._client = connected

    @property
    def requests_in_flight(self) -> int:
        return len(self._handles)

    async def run(self, requests: Sequence[Request], timeout_seconds: float) -> None:
        """Returns when every request has ended, with a fault or its answer; those that last longer are cancelled and
        end then. Cancelled itself it takes back what was lent to them, and does not wait."""
        if not requests:
            return
        batch = _Batch(requests, self._loop.create_future())
        timer = self._loop.call_later(timeout_seconds, self._cancel, batch, TIMED_OUT)
        try:
            self._submit(batch)
            await batch.ended
        except asyncio.CancelledError:
            self._cancel(batch, CLOSED)
            raise
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Ends what runs and gives threads and connections back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for batch in set(self._batches.values()):
            self._cancel(batch, CLOSED)
        ends = [self._client.shutdown_event, self._bootstrap.shutdown_event, self._threads.shutdown_event]
        del self._client, self._bootstrap, self._threads
        waits = [asyncio.ensure_future(in_thread("l2-close", end.wait, CLOSE_SECONDS)) for end in ends]
        await asyncio.gather(*waits)

    # ---- on the loop -------------------------------------------------------------------------------------------------
    def _submit(self, batch: _Batch) -> None:
        while batch.waiting and batch.running < REQUESTS_AT_ONCE:
            request = batch.waiting.popleft()
            if self._is_closed or batch.cancelled_by is not None:
                request.fault = batch.cancelled_by or CLOSED
                request.close()
                continue
            batch.running += 1
            self._batches[request] = batch
            try:
                self._handles[request] = self._start(request)
            except Exception as error:  # of awscrt, which raises various kinds: no callback comes then
                self._end(request, error, 0, (), b"")
        if not batch.waiting and not batch.running and not batch.ended.done():
            batch.ended.set_result(None)

    def _cancel(self, batch: _Batch, fault: Fault) -> None:
        batch.cancelled_by = fault
        for request, owner in self._batches.items():
            if owner is batch:
                request.close()
                if (handle := self._handles.get(request)) is not None:
                    handle.cancel()
        self._submit(batch)

    def _collect(self) -> None:
        self._is_woken = False
        while self._ended:
            request = self._ended.popleft()
            batch = self._batches.pop(request)
            self._handles.pop(request, None)
            batch.running -= 1
            if request.fault is not None and batch.cancelled_by is not None:
                request.fault = batch.cancelled_by
            self._submit(batch)

    def _start(self, request: Request) -> Any:
        from awscrt.http import HttpHeaders, HttpRequest
        from awscrt.s3 import S3RequestType

        headers = HttpHeaders([("Host", self._location.host), *request.headers])
        body = request.body()
        if body is not None:
            headers.add("Content-Length", str(request.body_bytes))
        return self._client.make_request(
            type=S3RequestType(request.kind),
            request=HttpRequest(request.method, request.path, headers, body),
            operation_name=None if request.kind else request.operation,
            on_headers=request.on_headers,
            on_body=request.on_body,
            on_done=partial(self._on_done, request),
        )

    # ---- on threads of awscrt ----------------------------------------------------------------------------------------
    def _on_done(
        self,
        request: Request,
        *,
        error: BaseException | None,
        error_headers: Headers | None,
        error_body: bytes | None,
        status_code: int | None,
        **_: Any,
    ) -> None:
        self._end(request, error, status_code or 0, error_headers or (), error_body or b"")

    def _end(self, request: Request, error: BaseException | None, status: int, headers: Headers, body: bytes) -> None:
        request.ended(error, status, headers, body)
        self._ended.append(request)
        # Appended first: whoever finds the loop woken already is in the queue before the loop empties it.
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._collect)
            except RuntimeError:
                pass  # the loop has been closed: nothing waits for it


class _Batch:
    def __init__(self, requests: Sequence[Request], ended: asyncio.Future[None]) -> None:
        self.waiting = deque(requests)
        self.running = 0
        self.ended = ended
        self.cancelled_by: Fault | None = None


def check_package(where: str) -> None:
    """ResourceError where awscrt is not there."""
    try:
        import awscrt.s3  # noqa: F401
    except ImportError as error:
        raise ResourceError(f"{where}: the package awscrt cannot be imported ({error}); {PACKAGE}.") from None


def connect(config: S3Config, location: S3Location) -> tuple[EventLoopGroup, ClientBootstrap, S3Client]:
    """Threads, what makes connections, and a client with these settings; it connects to nothing yet."""
    check_package(config.where)
    from awscrt import auth, io, s3

    threads = io.EventLoopGroup(config.s3_num_io_threads)
    bootstrap = io.ClientBootstrap(threads, io.DefaultHostResolver(threads))
    if config.aws_access_key_id:
        credentials = auth.AwsCredentialsProvider.new_static(config.aws_access_key_id, config.aws_secret_access_key)
    else:
        credentials = auth.AwsCredentialsProvider.new_default_chain(bootstrap)
    signing = s3.create_default_s3_signing_config(region=config.s3_region, credential_provider=credentials)
    if config.s3_enable_s3express:
        signing = signing.replace(algorithm=auth.AwsSigningAlgorithm.V4_S3EXPRESS)
    client = s3.S3Client(
        bootstrap=bootstrap,
        region=config.s3_region,
        tls_mode=s3.S3RequestTlsMode.ENABLED if location.tls else s3.S3RequestTlsMode.DISABLED,
        tls_connection_options=_tls_options(config, location) if location.tls else None,
        signing_config=signing,
        throughput_target_gbps=max(SMALLEST_TARGET_GBPS, config.s3_num_io_threads * GBPS_PER_CONNECTION),
        memory_limit=MEMORY_LIMIT_BYTES,
        part_size=PART_BYTES,
        multipart_upload_threshold=SINGLE_PUT_BYTES,
        enable_s3express=config.s3_enable_s3express,
        retry_config=s3.S3RetryConfig(
            max_retries=MAX_RETRIES, backoff_scale_factor_ms=RETRY_SCALE_MS, max_backoff_secs=RETRY_MAX_SECONDS
        ),
        connect_timeout_ms=CONNECT_TIMEOUT_MS,
    )
    return threads, bootstrap, client


def _tls_options(config: S3Config, location: S3Location) -> Any:
    from awscrt import io

    options = io.TlsContextOptions()
    options.alpn_list = ["h2", "http/1.1"] if config.s3_prefer_http2 else ["http/1.1"]
    try:
        if config.authorities:
            options.override_default_trust_store_from_path(None, config.authorities)
        connection = io.ClientTlsContext(options).new_connection_options()
    except Exception as error:  # of awscrt, which raises various kinds
        raise ResourceError(
            f"{config.where}: the TLS authorities {config.authorities or 'of the system'} cannot be used ({error}); "
            "name a PEM file that can be read as tls_ca."
        ) from None
    connection.set_server_name(location.host_name)
    return connection
