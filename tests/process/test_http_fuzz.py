"""Requests made from the OpenAPI document of a real server with objects, and such requests with faults: none crashes
it, none is answered with 500 or with what the document does not say, and nothing grows."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lmcache.testing.processes import CacheServer
from process.memory_watch import MemoryWatch, private_bytes
from process.support import SmallEngine
from seeds import SEED

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = int(os.environ.get("TEST_HTTP_EXAMPLES", "15"))  # an operation
FAULTY = int(os.environ.get("TEST_HTTP_FAULTY_REQUESTS", "3000"))
RIGHT = 5  # requests without a fault, of each operation, that faults are put into
BATCH = 100  # requests between two looks at the server's memory
ANSWER_SECONDS = 30.0
GROWTH_BYTES = 48 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    with CacheServer(folder, l1_size_gb=0.0625, l2_folder=folder / "l2") as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            engine.store(engine.tokens(*range(50)))
            yield server


def described(server: CacheServer) -> tuple[str, Sequence[Any]]:
    """Where the server is, and its operations."""
    url = f"http://127.0.0.1:{server.http_port}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 25
    return url, operations


def each(strategy: Any, act: Callable[[schemathesis.Case[Any]], None], examples: int, seed: int) -> None:
    """Calls `act` with that many requests."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case: schemathesis.Case[Any]) -> None:
        act(case)

    hypothesis.seed(seed)(run)()


def test_requests_from_the_openapi_document(server: CacheServer) -> None:
    url, operations = described(server)
    asked = 0
    before = 0
    for turn in range(2):  # what the first turn takes, caches included, is no growth
        for operation in operations:

            def ask(case: schemathesis.Case[Any]) -> None:
                nonlocal asked
                asked += 1
                answer = case.call(base_url=url, timeout=ANSWER_SECONDS)
                case.validate_response(answer, checks=CHECKS)

            wrong = operation.as_strategy(generation_mode=GenerationMode("negative"))
            each(st.one_of(operation.as_strategy(), wrong), ask, EXAMPLES, SEED + turn)
        if turn == 0:
            before = private_bytes(server.pid)
    grown = private_bytes(server.pid) - before
    print(f"{asked} requests; {grown / 2**20:.1f} MiB grown in the second turn")
    assert grown < GROWTH_BYTES
    assert server.ask(server.http_port, "GET", "/healthcheck") == (200, {"status": "healthy"})
    assert not [line for line in server.log().splitlines() if "ERROR" in line or "Traceback" in line]


# ---- requests with faults --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    method: str
    target: bytes
    body: bytes
    lines: bytes = b""  # more headers, each with its line end
    missing_bytes: int = 0  # of the body that the header promises
    is_last: bool = False  # the client says nothing more: the connection cannot be used again

    def encoded(self) -> bytes:
        length = len(self.body) + self.missing_bytes
        head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        return head % (self.method.encode(), self.target, length) + self.lines + b"\r\n" + self.body


def right_requests(server: CacheServer) -> list[Request]:
    url, operations = described(server)
    found: list[Request] = []

    def note(case: schemathesis.Case[Any]) -> None:
        arguments = case.as_transport_kwargs(base_url=url)
        made = requests.Request(**{key: arguments[key] for key in arguments.keys() & ACCEPTED}).prepare()
        body = made.body.encode() if isinstance(made.body, str) else made.body or b""
        assert isinstance(body, bytes)
        found.append(Request(str(made.method), made.path_url.encode(), body))

    for operation in operations:
        each(operation.as_strategy(), note, RIGHT, SEED)
    return found


ACCEPTED = {"method", "url", "headers", "params", "json", "data"}
VALUES: tuple[Any, ...] = (None, -1, 2**63, 2**70, 0.5, 1e308, "", "é\0", "x" * 5000, [], [[]], {}, True)
LINES = (
    b"X: \xff\r\n",
    b"Authorization: Bearer x\r\n",
    b"Content-Type: text/plain\r\n",
    b"X: " + b"y" * 9000 + b"\r\n",
)
BREAKING = (b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"no colon\r\n", b": x\r\n", b"Host: y\r\n")


def with_a_fault(random_: random.Random, request: Request) -> Request:
    """Most leave the connection as it is; what a server has to end it for costs a new one."""
    body, target = request.body, request.target
    kind = random_.randrange(100)
    if kind < 25:
        return replace(request, target=with_other_bytes(random_, target))
    if kind < 45 and body:
        return replace(request, body=with_other_bytes(random_, body))
    if kind < 55 and body:
        return replace(request, body=body[: random_.randrange(len(body))])
    if kind < 80 and (fields := decoded(body)):
        fields[random_.choice([*fields])] = random_.choice(VALUES)
        return replace(request, body=json.dumps(fields).encode())
    if kind < 90:
        return replace(request, lines=random_.choice(LINES))
    if kind < 96:
        return replace(request, method=random_.choice(("GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "X")))
    if kind < 98:
        return replace(request, lines=random_.choice(BREAKING), is_last=True)
    return replace(request, missing_bytes=random_.choice((1, 1000, 2**40)), is_last=True)


def with_other_bytes(random_: random.Random, text: bytes) -> bytes:
    """One is changed, some are put between, or written as percents."""
    at = random_.randrange(1, len(text)) if len(text) > 1 else 0
    kind = random_.randrange(3)
    if kind == 0:
        return text[:at] + bytes([text[at] ^ 1 << random_.randrange(5)]) + text[at + 1 :]
    if kind == 1:
        return (
            text[:at] + bytes(random_.choices(b"0123456789abcxyz/?&=.,:[]{}-_%", k=random_.randrange(1, 6))) + text[at:]
        )
    return text[:at] + b"".join(b"%%%02x" % byte for byte in random_.randbytes(2)) + text[at:]


def decoded(body: bytes) -> dict[str, Any]:
    """The object of the body; empty where it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class KeptConnection:
    """Asks over one connection, and over another where the server has ended it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def ask(self, request: Request) -> int:
        """The status of the answer; 0 where the connection ended instead, after a request that broke it."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), ANSWER_SECONDS)
        try:
            self._socket.sendall(request.encoded())
            if request.is_last:
                self._socket.shutdown(socket.SHUT_WR)
            response = HTTPResponse(self._socket, method=request.method)
            response.begin()
            response.read()
        except (ConnectionError, HTTPException):
            self.close()
            return 0
        if response.will_close or request.is_last:
            self.close()
        return response.status

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def test_requests_that_are_nearly_right(server: CacheServer) -> None:
    """As many as TEST_HTTP_FAULTY_REQUESTS says; nothing grows by them."""
    random_ = random.Random(SEED)
    right = right_requests(server)
    watch = MemoryWatch(server=lambda: private_bytes(server.pid))
    statuses: Counter[int] = Counter()
    began = time.monotonic()
    with contextlib.closing(KeptConnection(server.http_port)) as connection:
        for _ in range(0, FAULTY, BATCH):
            for _ in range(BATCH):
                request = with_a_fault(random_, random_.choice(right))
                status = connection.ask(request)
                assert status < 500 or status in (501, 503, 504), request  # 501: a name of the controller by chance
                statuses[status] += 1
            assert server.ask(server.http_port, "PUT", "/loglevel", {"level": "INFO"})[0] == 200  # a request changed it
            watch.sample()
    seconds = time.monotonic() - began
    print(f"{statuses.total()} requests, {statuses.total() / seconds:.0f} a second, {dict(statuses)}; {watch.check()}")
    assert {200, 400, 404, 405} <= set(statuses), statuses
    assert statuses[0] < statuses.total() * 0.05
    assert server.metric("lmcache_mp_internal_faults_total") == 0
    assert server.ask(server.http_port, "GET", "/healthcheck") == (200, {"status": "healthy"})
    assert not [line for line in server.log().splitlines() if "ERROR" in line or "Traceback" in line]
