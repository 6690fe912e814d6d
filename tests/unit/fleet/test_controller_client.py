"""What a router imports in place of LMCache's controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from lmcache.core.chunking import ChunkHasher
from lmcache.errors import ConfigError
from lmcache.fleet import controller_client
from lmcache.fleet.coordinator import CoordinatorProcess
from lmcache.fleet.messages import Batch, Entry, Key, RegisterRequest
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.protocol.tokens import pack_tokens
from lmcache.v1.cache_controller import controller_manager
from lmcache.v1.cache_controller.message import LookupMsg, LookupRetMsg, QueryInstMsg, QueryInstRetMsg
from manual_clock import ManualClock

TOKENS = list(range(8))
MOST_ASKS = 32
NOBODY = LookupRetMsg(layout_info={}, event_id="")
SOMEBODY = LookupRetMsg(layout_info={"a": ("LocalCPUBackend", 8)}, event_id="")


def test_a_router_asks_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As production-stack's kvaware router does it."""
    process = CoordinatorProcess(CoordinatorSettings(host="127.0.0.1", port=0, controller_port=0, chunk_size=4))
    process.start()
    monkeypatch.setenv("LMCACHE_COORDINATOR_URL", f"http://127.0.0.1:{process.port}")
    monkeypatch.setattr(controller_client, "ASK_SECONDS", 30.0)  # a coordinator that is late is not one that is away
    hasher = ChunkHasher("blake3", 4)
    packed = hasher.extend(hasher.root(b""), pack_tokens(TOKENS))
    keys = [Entry(Key(packed[at : at + 32].hex(), "m", 0), 1) for at in (0, 32)]
    process.fleet.instances.register(RegisterRequest("10.0.0.5", 8080, "pod-5"))
    process.fleet.intake.apply([Batch("pod-5", 1, 1, "store", "l1", entries=keys)])

    async def route() -> tuple[LookupRetMsg | QueryInstRetMsg, LookupRetMsg | QueryInstRetMsg]:
        manager = controller_manager.LMCacheControllerManager(
            {"pull": "0.0.0.0:9000", "reply": "0.0.0.0:9001"}, health_check_interval=0.1, lmcache_worker_timeout=1
        )
        health = asyncio.ensure_future(manager.start_all())
        found = await manager.handle_orchestration_message(LookupMsg(tokens=[*TOKENS, 9], event_id="Lookup1"))
        named_server = await manager.handle_orchestration_message(QueryInstMsg(ip="10.0.0.5", event_id="QueryInst1"))
        health.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await health
        return found, named_server

    found, named_server = asyncio.run(route())
    assert found == LookupRetMsg(layout_info={"pod-5": ("LocalCPUBackend", 8)}, event_id="Lookup1")
    assert named_server == QueryInstRetMsg(instance_id="pod-5", event_id="QueryInst1")
    process.stop()
    assert asyncio.run(route()) == (  # away: nobody has anything
        LookupRetMsg(layout_info={}, event_id="Lookup1"),
        QueryInstRetMsg(instance_id=None, event_id="QueryInst1"),
    )


def test_other_messages_and_addresses_are_refused() -> None:
    manager = controller_manager.LMCacheControllerManager("http://h:1")
    with pytest.raises(TypeError, match="LookupMsg or QueryInstMsg"):
        asyncio.run(manager.handle_orchestration_message("anything"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="coordinator"):
        controller_manager.LMCacheControllerManager({"coordinator": "ftp://h"})


class Mute(BaseHTTPRequestHandler):
    """A coordinator that answers only while it may. `asked`: what it was asked for."""

    may_answer: threading.Event
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.may_answer.wait(120.0)
        answer = json.dumps({"event_id": "", "layout_info": {"a": ["LocalCPUBackend", 8]}}).encode()
        with contextlib.suppress(OSError):  # nobody waits any more
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


async def later(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
def mute() -> Iterator[tuple[str, type[Mute]]]:
    class Handler(Mute):
        may_answer = threading.Event()
        asked: ClassVar[list[str]] = []

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    Handler.may_answer.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_coordinator_that_never_answers_holds_up_nothing_else_of_a_router(
    mute: tuple[str, type[Mute]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that a program shares are free, and of its requests only so many wait."""
    monkeypatch.setattr(controller_client, "ASK_SECONDS", 3600.0)
    monkeypatch.setattr(controller_client, "MAX_COORDINATOR_ASKS", MOST_ASKS)
    url, coordinator = mute

    async def route() -> None:
        manager = controller_manager.LMCacheControllerManager(url)
        asking = [
            asyncio.ensure_future(manager.handle_orchestration_message(LookupMsg(tokens=TOKENS)))
            for _ in range(3 * MOST_ASKS)
        ]
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 60.0) == 5
        await later(lambda: sum(answer.done() for answer in asking) == 2 * MOST_ASKS)
        done, waiting = await asyncio.wait(asking, timeout=0)
        assert len(waiting) == MOST_ASKS
        assert all(answer.result() == NOBODY for answer in done)
        coordinator.may_answer.set()
        assert [await answer for answer in waiting] == [SOMEBODY] * len(waiting)

    asyncio.run(route())


def test_one_that_did_not_answer_is_asked_by_no_request_until_it_does(
    mute: tuple[str, type[Mute]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_client, "ASK_SECONDS", 0.3)
    url, coordinator = mute
    clock = ManualClock()

    async def route() -> None:
        manager = controller_manager.LMCacheControllerManager(url, clock=clock)

        async def ask() -> LookupRetMsg | QueryInstRetMsg:
            return await manager.handle_orchestration_message(LookupMsg(tokens=TOKENS))

        assert await ask() == NOBODY
        assert [await ask() for _ in range(100)] == [NOBODY] * 100
        clock.advance(10.0)
        assert [await ask() for _ in range(100)] == [NOBODY] * 100  # the first of them has it looked at
        while "/healthz" not in coordinator.asked:  # a look may end before it has been sent
            assert clock.monotonic() < 600_000.0
            clock.advance(100.0)
            assert await ask() == NOBODY
            await asyncio.sleep(0.01)
        assert coordinator.asked.count("/lookup") <= 1
        monkeypatch.setattr(controller_client, "ASK_SECONDS", 60.0)
        coordinator.may_answer.set()
        answers: list[object] = []
        while SOMEBODY not in answers[-1:]:
            answers.append(await ask())
            clock.advance(100.0)
            assert len(answers) < 6000
            await asyncio.sleep(0.01)

    asyncio.run(route())


def test_all_that_wait_when_it_stands_still_are_one_failure(
    mute: tuple[str, type[Mute]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again after the first pause, however many requests were under way."""
    monkeypatch.setattr(controller_client, "ASK_SECONDS", 0.3)
    url, coordinator = mute
    clock = ManualClock()

    async def route() -> None:
        manager = controller_manager.LMCacheControllerManager(url, clock=clock)

        async def ask() -> LookupRetMsg | QueryInstRetMsg:
            return await manager.handle_orchestration_message(LookupMsg(tokens=TOKENS))

        assert await asyncio.gather(*(ask() for _ in range(MOST_ASKS))) == [NOBODY] * MOST_ASKS
        monkeypatch.setattr(controller_client, "ASK_SECONDS", 60.0)
        coordinator.may_answer.set()
        clock.advance(1.0)
        assert await ask() == NOBODY  # has it looked at
        await later(lambda: "/healthz" in coordinator.asked)
        answers: list[object] = []
        while SOMEBODY not in answers[-1:]:
            answers.append(await ask())
            assert len(answers) < 6000
            await asyncio.sleep(0.01)

    asyncio.run(route())
