"""What `lmcache bench l2` measures an adapter beside: programs that do nothing but move the same bytes to and from the
same place, with the same library, threads and settings. They write under names that no adapter has."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from lmcache.cli.bench_plain_mooncake import PlainMooncake
from lmcache.cli.bench_plain_nixl import PlainNixl, PlainNixlObjects
from lmcache.cli.bench_plain_resp import RespConnections
from lmcache.environment import SYSTEM
from lmcache.errors import LMCacheError
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.l2.adapters.folder_config import FsConfig
from lmcache.l2.adapters.mooncake_config import MooncakeConfig
from lmcache.l2.adapters.nixl_config import NixlConfig, NixlStoreConfig
from lmcache.l2.adapters.resp_config import RespConfig
from lmcache.l2.adapters.resp_servers import find_servers
from lmcache.l2.adapters.s3_client import connect
from lmcache.l2.adapters.s3_config import S3Config

_REQUEST_SECONDS = 600.0  # that a program waits for all of its requests


class PlainProgram(Protocol):
    name: str
    how: str  # it goes about it

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Object i of a round is piece i. LMCacheError where the place refuses."""
        ...

    def read(self, pieces: Sequence[memoryview]) -> None: ...

    def clean_up(self) -> None:
        """Removes what a round wrote."""
        ...

    def close(self) -> None: ...


def plain_program(config: AdapterConfig, objects: int) -> PlainProgram | None:
    """None where there is none for this adapter and these settings."""
    if isinstance(config, FsConfig):
        return PlainFiles(config)
    if isinstance(config, NixlConfig) and config.folder:
        return PlainNixl(config, objects)
    if isinstance(config, NixlStoreConfig):
        return PlainNixlObjects(config, objects)
    if isinstance(config, MooncakeConfig):
        return PlainMooncake(config)
    if isinstance(config, RespConfig):
        return PlainResp(config)
    if isinstance(config, S3Config) and config.location.is_virtual is not None:
        return PlainS3(config)
    return None


def _cache(direct: bool) -> str:
    return "O_DIRECT" if direct else "page cache"


class PlainFiles:
    name = "Plain files"

    def __init__(self, config: FsConfig) -> None:
        self._folder = Path(config.folder) / "plain"
        self._flags = os.O_DIRECT if config.use_odirect else 0
        self._threads = ThreadPoolExecutor(config.threads)
        self.how = f"{config.threads} threads, {_cache(config.use_odirect)}"

    def write(self, pieces: Sequence[memoryview]) -> None:
        self._folder.mkdir(exist_ok=True)

        def write(place: tuple[int, memoryview]) -> None:
            with _opened(self._folder / str(place[0]), os.O_WRONLY | os.O_CREAT | self._flags) as file:
                if os.pwritev(file, [place[1]], 0) != place[1].nbytes:
                    raise OSError("short write")

        self._each(write, pieces)

    def read(self, pieces: Sequence[memoryview]) -> None:
        def read(place: tuple[int, memoryview]) -> None:
            with _opened(self._folder / str(place[0]), os.O_RDONLY | self._flags) as file:
                if os.preadv(file, [place[1]], 0) != place[1].nbytes:
                    raise OSError("short read")

        self._each(read, pieces)

    def _each(self, act: Callable[[tuple[int, memoryview]], None], pieces: Sequence[memoryview]) -> None:
        try:
            list(self._threads.map(act, enumerate(pieces)))
        except OSError as error:
            raise LMCacheError(f"Plain file I/O in {self._folder} failed: {error.strerror or error}.") from None

    def clean_up(self) -> None:
        for path in self._folder.glob("*"):
            path.unlink()

    def close(self) -> None:
        self._threads.shutdown()


class PlainResp:
    """SET and GET from and to memory, a thread for each connection; in a cluster one to each server."""

    name = "Plain SET and GET"

    def __init__(self, config: RespConfig) -> None:
        self._prefix = f"{config.prefix}/bench-{uuid.uuid4().hex}"
        servers = find_servers(config, SYSTEM.clock)
        self._connections = [RespConnections(config, servers) for _ in range(config.num_workers)]
        self._threads = ThreadPoolExecutor(config.num_workers)
        self._count = 0
        self.how = f"{config.num_workers} connections"
        if len(servers.addresses) > 1:
            self.how += f" to each of {len(servers.addresses)} servers"

    def write(self, pieces: Sequence[memoryview]) -> None:
        self._count = len(pieces)
        self._each(lambda connection, index: connection.store(self._key(index), pieces[index]))

    def read(self, pieces: Sequence[memoryview]) -> None:
        self._each(lambda connection, index: connection.load(self._key(index), pieces[index]))

    def clean_up(self) -> None:
        self._each(lambda connection, index: connection.delete(self._key(index)))

    def _key(self, index: int) -> str:
        return f"{self._prefix}/{index}"

    def _each(self, act: Callable[[RespConnections, int], None]) -> None:
        """Objects are dealt out as connections become free, as among workers of the adapter."""
        turns, lock = iter(range(self._count)), threading.Lock()

        def work(connection: RespConnections) -> None:
            while True:
                with lock:
                    index = next(turns, None)
                if index is None:
                    return
                act(connection, index)

        list(self._threads.map(work, self._connections))

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()


class PlainS3:
    """awscrt's client, all objects at once, as its documentation shows."""

    name = "Plain awscrt"

    def __init__(self, config: S3Config) -> None:
        self._location = config.location
        self._prefix = f"{config.prefix}/bench-{uuid.uuid4().hex}"
        self._threads, self._bootstrap, self._client = connect(config, self._location)
        self._count = 0
        self.how = f"{config.s3_num_io_threads} threads"

    def write(self, pieces: Sequence[memoryview]) -> None:
        self._count = len(pieces)
        self._each("PUT", [{"body": piece} for piece in pieces])

    def read(self, pieces: Sequence[memoryview]) -> None:
        def into(piece: memoryview) -> Callable[..., None]:
            def on_body(chunk: bytes, offset: int, **_: Any) -> None:
                piece[offset : offset + len(chunk)] = chunk

            return on_body

        self._each("GET", [{"on_body": into(piece)} for piece in pieces])

    def clean_up(self) -> None:
        self._each("DELETE", [{}] * self._count)

    def _each(self, method: str, parts: Sequence[dict[str, Any]]) -> None:
        from awscrt.http import HttpHeaders, HttpRequest
        from awscrt.s3 import S3RequestType

        kinds = {"PUT": S3RequestType.PUT_OBJECT, "GET": S3RequestType.GET_OBJECT, "DELETE": S3RequestType.DEFAULT}
        ended, faults = threading.Semaphore(0), []

        def on_done(error: BaseException | None = None, **_: Any) -> None:
            if error is not None:
                faults.append(error)
            ended.release()

        requests = []
        for index, part in enumerate(parts):
            headers = HttpHeaders([("Host", self._location.host)])
            body = part.get("body")
            if body is not None:
                headers.add("Content-Length", str(body.nbytes))
            path = self._location.object_path(f"{self._location.folder}{self._prefix}/{index}")
            requests.append(
                self._client.make_request(
                    type=kinds[method],
                    request=HttpRequest(method, path, headers, BytesIO(body) if body is not None else None),
                    operation_name="DeleteObject" if method == "DELETE" else None,
                    on_body=part.get("on_body"),
                    on_done=on_done,
                )
            )
        for _ in requests:
            if not ended.acquire(timeout=_REQUEST_SECONDS):
                raise LMCacheError(f"The plain program got no answer within {_REQUEST_SECONDS:.0f} s.")
        if faults:
            raise LMCacheError(f"A plain {method} to {self._location} failed: {faults[0]}.")

    def close(self) -> None:
        del self._client, self._bootstrap, self._threads


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
