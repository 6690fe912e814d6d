"""Mooncake's master and a service behind NIXL that stand still, seen through a real server: misses within the deadline
of a lookup, L1 as it was, nothing that stays held, and hits again once the service goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer, ManagedProcess
from polling import STALL_SECONDS, until
from process.support import SmallEngine, held
from services import mooncake, nixl
from services.azurite import Azurite
from services.mooncake import Master, Peer

CHUNKS = 4
DEADLINE_SECONDS = 2.0
TIMEOUT_SECONDS = 10.0  # of the adapter: what a lookup would wait for without its deadline
AGAIN_SECONDS = 120.0  # clients look for their service every few seconds, and the breaker has its pauses

Start = Callable[[Path, ExitStack], tuple[ManagedProcess, dict[str, Any]]]


def mooncake_master(folder: Path, running: ExitStack) -> tuple[ManagedProcess, dict[str, Any]]:
    master = running.enter_context(Master(folder))
    master.wait_ready()
    running.enter_context(Peer(folder, master)).wait_ready()
    return master, {"type": "mooncake_store", **mooncake.setup_keys(master, 0)}


def azure_behind_nixl(folder: Path, running: ExitStack) -> tuple[ManagedProcess, dict[str, Any]]:
    nixl.need()
    server = running.enter_context(Azurite(folder / "azurite"))
    server.wait_ready()
    server.make_container("cache")
    params = {"connection_string": server.connection_string, "container_name": "cache"}
    return server, {"type": "nixl_store", "backend": "AZURE_BLOB", "pool_size": 64, "backend_params": params}


@pytest.mark.parametrize("start", [mooncake_master, azure_behind_nixl])
def test_a_service_that_stands_still_costs_misses_in_time(tmp_path: Path, start: Start) -> None:
    with ExitStack() as running:
        service, adapter = start(tmp_path, running)
        extra = ["--l2-adapter", json.dumps({**adapter, "timeout_seconds": TIMEOUT_SECONDS})]
        server = running.enter_context(CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra))
        server.wait_ready()
        engine = running.enter_context(SmallEngine(server.port))

        def figures() -> dict[str, Any]:
            return dict(server.status()["l2"]["adapters"][0])

        def ask(request: str, tokens: bytes, deadline_seconds: float = 20.0) -> tuple[int, float]:
            """The chunks that are there, each as it was stored, and the seconds of the answer."""
            started = time.monotonic()
            found = engine.lookup(request, tokens, deadline_seconds=deadline_seconds)
            seconds = time.monotonic() - started
            assert engine.read(found)
            engine.end(request)
            return found.chunks, seconds

        in_l2, in_l1 = engine.tokens(*range(CHUNKS)), engine.tokens(*range(100, 100 + CHUNKS))
        assert engine.store(in_l2) == CHUNKS
        until(lambda: figures()["objects"] == CHUNKS, tell=figures)
        server.clear("l1")
        assert ask("well", in_l2)[0] == CHUNKS
        server.clear("l1")
        service.pause()
        assert engine.store(in_l1) == CHUNKS
        chunks, seconds = ask("silent", in_l2, DEADLINE_SECONDS)
        assert chunks == 0 and seconds < DEADLINE_SECONDS + STALL_SECONDS < TIMEOUT_SECONDS
        times = [ask(f"memory {turn}", in_l1)[1] for turn in range(20)]
        assert quantiles(times)[2] < DEADLINE_SECONDS / 2, times  # the machine may stand still in some
        service.resume()
        prompts = count(200, 10)

        def comes_back() -> bool:
            tokens = engine.tokens(*range(first := next(prompts), first + CHUNKS))
            before = figures()["objects"]
            assert engine.store(tokens) == CHUNKS
            with suppress(AssertionError):  # or it was dropped, as the adapter is suspended
                until(lambda: figures()["objects"] == before + CHUNKS, 3)
            server.clear("l1")
            return ask(f"again {first}", tokens, DEADLINE_SECONDS)[0] == CHUNKS

        until(comes_back, AGAIN_SECONDS, tell=lambda: (figures(), server.log()[-2000:]))
        until(lambda: not held(server) and not figures()["loads_in_flight"], tell=server.status)
        assert "Traceback" not in server.log()
        assert server.stop() == 0
