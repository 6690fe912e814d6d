"""Remote tiers of a real server whose network loses packets, swallows all of them or resets connections, and whose
service is killed and started again in the middle of loads: exact hits or misses within the deadline, nothing that stays
held, another tier as fast as before, and everything as before once the service is well."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer
from polling import STALL_SECONDS, until
from process.remote_services import ALL, FIRST_QUICK, Remote, Start
from process.support import SmallEngine, held, split
from services.network import Network, in_own_network

CHUNKS = 4
DEADLINE_SECONDS = 2.0
TIMEOUT_SECONDS = 4.0  # of the adapter: lookups do not wait for it
AGAIN_SECONDS = 150.0  # clients look for their service every few seconds, and the breaker has its pauses
ENGINES = 4
L1_GB = 0.0625


@contextmanager
def caching(folder: Path, *adapters: dict[str, Any], log_name: str = "server.log") -> Iterator[CacheServer]:
    """Nothing is held at its end, and it stops as it should."""
    extra = [part for adapter in adapters for part in ("--l2-adapter", json.dumps(adapter))]
    with CacheServer(folder, l1_size_gb=L1_GB, extra=extra, log_name=log_name) as server:
        server.wait_ready()
        yield server
        busy = ("loads_in_flight", "stores_in_flight", "abandoned")
        until(
            lambda: not held(server) and not any(tier[name] for tier in figures(server) for name in busy),
            tell=server.status,
        )
        assert "Traceback" not in server.log()
        assert server.stop() == 0


def figures(server: CacheServer) -> list[dict[str, Any]]:
    return list(server.status()["l2"]["adapters"])


def is_suspended(server: CacheServer) -> bool:
    """Of the last adapter."""
    return bool(figures(server)[-1]["loads_suspended"] or figures(server)[-1]["stores_suspended"])


class Asking:
    """Requests of one engine."""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine = engine
        self._numbers = count()

    def ask(self, tokens: bytes, deadline_seconds: float = DEADLINE_SECONDS) -> tuple[int, float]:
        """The chunks that are there, each as it was stored, and the seconds of the answer."""
        request = f"{self.engine.instance_id} {next(self._numbers)}"
        started = time.monotonic()
        found = self.engine.lookup(request, tokens, deadline_seconds=deadline_seconds)
        seconds = time.monotonic() - started
        assert self.engine.read(found)
        self.engine.end(request)
        return found.chunks, seconds


class Stores:
    """Prompts that nobody stored before."""

    def __init__(self, server: CacheServer, engine: SmallEngine) -> None:
        self._server, self._engine = server, engine
        self._firsts = count(10_000, CHUNKS)

    def next_is_stored(self) -> bytes:
        """A prompt that the last adapter has; b"" where it did not take it."""
        first = next(self._firsts)
        tokens = self._engine.tokens(*range(first, first + CHUNKS))
        before = figures(self._server)[-1]["objects"]
        assert self._engine.store(tokens) == CHUNKS
        with suppress(AssertionError):  # or it was dropped, as the adapter is suspended
            until(lambda: figures(self._server)[-1]["objects"] == before + CHUNKS, 3)
            return tokens
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("start", ALL)
def test_a_network_that_fails_costs_misses_in_time_and_other_tiers_nothing(tmp_path: Path, start: Start) -> None:
    def faults(network: Network, remote: Remote) -> dict[str, Callable[[], None]]:
        return {
            "half": lambda: network.lose(*remote.ports, share=0.5),
            "all": lambda: network.lose(*remote.ports),
            "resets": lambda: network.reset(*remote.ports),
        }

    def test(network: Network) -> None:
        with ExitStack() as running:
            remote = start(tmp_path, running)
            adapter = {**remote.adapter, "timeout_seconds": TIMEOUT_SECONDS}
            files = {"type": "fs_native", "base_path": str(tmp_path / "files")}
            server = running.enter_context(caching(tmp_path, files, adapter))
            engine = running.enter_context(SmallEngine(server.port))
            asking, stores = Asking(engine), Stores(server, engine)
            near = engine.tokens(*range(CHUNKS))
            assert engine.store(near) == CHUNKS
            until(lambda: figures(server)[0]["objects"] == CHUNKS, tell=server.status)
            far = b""  # in the service alone

            def ask(tokens: bytes) -> tuple[int, float]:
                server.clear("l1")
                return asking.ask(tokens)

            def is_well() -> bool:
                nonlocal far
                if far := stores.next_is_stored():
                    names = [chunk_hash.hex() for chunk_hash in split(engine.hashes(far))]
                    for folder, _, file_names in os.walk(tmp_path / "files"):  # the server removes empty ones meanwhile
                        for file_name in file_names:
                            if any(name in file_name for name in names):
                                (Path(folder) / file_name).unlink()
                return bool(far) and ask(far)[0] == CHUNKS and not is_suspended(server)

            def well() -> None:
                until(is_well, AGAIN_SECONDS, tell=lambda: (server.status(), server.log()[-2000:]))

            well()
            for name, begin in faults(network, remote).items():
                begin()
                far_times: list[float] = []
                near_times: list[float] = []
                until_suspended = time.monotonic() + AGAIN_SECONDS
                while len(far_times) < 3 or (name != "half" and not is_suspended(server)):
                    assert time.monotonic() < until_suspended, server.status()
                    chunks, seconds = ask(far)
                    far_times.append(seconds)
                    assert name == "half" or chunks == 0, name
                    chunks, seconds = ask(near)
                    near_times.append(seconds)
                    assert chunks == CHUNKS, name
                while len(near_times) < 10:
                    near_times.append(ask(near)[1])
                assert max(far_times) < DEADLINE_SECONDS + STALL_SECONDS, (name, far_times)
                assert quantiles(near_times)[2] < DEADLINE_SECONDS / 2, (name, near_times)  # some may stand still
                network.well()
                well()

    in_own_network(test)


@pytest.mark.parametrize("start", FIRST_QUICK)
def test_a_service_that_is_killed_and_started_in_the_middle_of_loads(tmp_path: Path, start: Start) -> None:
    with ExitStack() as services, ExitStack() as running:  # a server ends before its service
        remote = start(tmp_path, services)
        server = running.enter_context(caching(tmp_path, {**remote.adapter, "timeout_seconds": TIMEOUT_SECONDS}))
        engines = [running.enter_context(SmallEngine(server.port)) for _ in range(ENGINES)]
        asking = [Asking(engine) for engine in engines]
        prompts = [engines[0].tokens(*range(100 * n, 100 * n + CHUNKS)) for n in range(ENGINES)]
        for engine, tokens in zip(engines, prompts, strict=True):
            assert engine.store(tokens) == CHUNKS
        until(lambda: figures(server)[0]["objects"] == ENGINES * CHUNKS, tell=server.status)
        server.clear("l1")
        remote.process.pause()  # so that loads are under way for certain
        with ThreadPoolExecutor(ENGINES) as threads:
            answers = [
                threads.submit(client.ask, tokens, 2 * DEADLINE_SECONDS)
                for client, tokens in zip(asking, prompts, strict=True)
            ]

            def is_loading() -> bool:  # or was, before this machine stood still
                return bool(figures(server)[0]["loads_in_flight"]) or all(answer.done() for answer in answers)

            until(is_loading, tell=server.status)
            remote.process.kill()
            remote.restart(services)
            ended = [answer.result() for answer in answers]
        assert max(seconds for _, seconds in ended) < 2 * DEADLINE_SECONDS + STALL_SECONDS, ended
        remote.wait_ready()
        stores = Stores(server, engines[0])

        def is_well() -> bool:
            tokens = stores.next_is_stored()
            server.clear("l1")
            return bool(tokens) and asking[0].ask(tokens)[0] == CHUNKS and not is_suspended(server)

        until(is_well, AGAIN_SECONDS, tell=lambda: (server.status(), server.log()[-2000:]))
        for client, tokens in zip(asking, prompts, strict=True):  # what the service kept is exact
            assert client.ask(tokens)[0] <= CHUNKS
