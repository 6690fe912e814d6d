"""A loaded server that is told to stop: what it has accepted reaches L2 within --drain-timeout-seconds, or is named."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.client.client import ClientState
from lmcache.errors import LMCacheError
from lmcache.stop_signals import CLOSE_SECONDS
from lmcache.testing.processes import CacheServer
from lmcache.tiering.storage_loop import UNDER_WAY_SECONDS
from polling import until
from process.places import Place
from process.support import SmallEngine

PAYLOAD_BYTES = 1 << 18
CHUNKS_PER_STORE = 8
DRAIN_SECONDS = 1.0
BATCH_SECONDS = 1.5  # of a batch, from the signal on: those under way then end in time, others do not begin
ENDLESS_SECONDS = 600.0
SLOW = """
import asyncio
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter

class Slow(Adapter):
    '''Writes a line for each object that it has stored: none before the log of the server has the word, and then so
    many seconds after that or after the store began.'''
    def __init__(self, path, seconds, log, word):
        self.path, self.seconds, self.log, self.word = path, seconds, log, word
    def waits(self):
        with open(self.log) as log: return self.word not in log.read()
    async def store(self, keys, buffers):
        while self.waits(): await asyncio.sleep(0.02)
        await asyncio.sleep(self.seconds)
        with open(self.path, 'a') as file: file.writelines(f'{key.chunk_hash.hex()}\\n' for key in keys)
        return [StoreOutcome.STORED] * len(keys)
    async def load(self, keys, buffers): return [LoadOutcome.MISSING] * len(keys)
    async def probe(self, keys): return [None] * len(keys)
    async def delete(self, keys, *, corrupt=False): return [False] * len(keys)
    async def clear(self): return 0, 0
    async def close(self): pass
"""


class DrainPlace(Place):
    """With a backend that takes its time, whose stored objects are counted."""

    @property
    def stored_objects(self) -> int:
        path = self.folder / "stored"
        return len(set(path.read_text().splitlines())) if path.exists() else 0

    def slow_server(self, batch_seconds: float, *extra: str, word: str = "") -> CacheServer:
        """`word`: of the server's log, before which nothing is stored."""
        (self.folder / "slow_adapter.py").write_text(SLOW)
        log = self.folder / f"server-{self.servers + 1}.log"
        parameters = {"path": str(self.folder / "stored"), "seconds": batch_seconds, "log": str(log), "word": word}
        adapter = {"type": "plugin", "module_path": "slow_adapter", "class_name": "Slow", "adapter_params": parameters}
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        options = ["--l2-adapter", json.dumps(adapter), *extra]
        return self.server(*options, environment={"PYTHONPATH": path})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DrainPlace]:
    place = DrainPlace(tmp_path)
    yield place
    place.close()


class Writer:
    """An engine that stores, prompt after prompt, until it is refused. That counts once the server is to end: before, a
    server that did not answer in time stood still with this machine."""

    def __init__(self, place: Place, number: int, prompts: int = 10_000) -> None:
        self._engine = SmallEngine(place.port, payload_bytes=PAYLOAD_BYTES, heartbeat=0.2)
        self._first_chunk = number * 1_000_000
        self._prompts = prompts
        self.accepted: list[bytes] = []  # tokens of prompts whose objects the server has
        self.refusal: LMCacheError | None = None
        self.server_ends = self._over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._engine.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server_ends = self._over = True
        self._thread.join()
        self._engine.close()

    def wait(self) -> None:
        self._thread.join()

    @property
    def accepted_objects(self) -> int:
        return len(self.accepted) * CHUNKS_PER_STORE

    def _run(self) -> None:
        for prompt in range(self._prompts):
            first = self._first_chunk + prompt * CHUNKS_PER_STORE
            tokens = self._engine.tokens(*range(first, first + CHUNKS_PER_STORE))
            is_whole = self._is_whole(tokens)
            while is_whole is None and self.refusal is None:
                is_whole = self._is_whole(tokens, again=True)
            if is_whole:
                self.accepted.append(tokens)
            if self._over or self.refusal is not None:
                return

    def _is_whole(self, tokens: bytes, *, again: bool = False) -> bool | None:
        """Whether the server has all of it. None: it did not answer."""
        try:
            if self._engine.store(tokens) == CHUNKS_PER_STORE:
                return True
            if not again:
                return False
            found = self._engine.lookup("again", tokens).chunks  # the answer alone may have been lost
            self._engine.end("again")
        except LMCacheError as refusal:
            if self.server_ends:
                self.refusal = refusal
            else:
                until(lambda: self._engine.client.state is ClientState.READY or self.server_ends)
            return None
        return found == CHUNKS_PER_STORE


def not_written(log: str) -> int:
    """Objects that the last line about them names."""
    found = re.findall(r"Objects that are not in L2: (\d+) for plugin_0; they are lost", log)
    return int(found[-1]) if found else 0


def test_what_was_accepted_under_load_is_in_l2(place: DrainPlace) -> None:
    """Each prompt that a store was answered for, while the signal came, is found by the next server."""
    adapter = {"type": "fs_native", "base_path": str(place.folder / "l2")}
    options = ["--l2-adapter", json.dumps(adapter), "--drain-timeout-seconds", "60"]
    with place.server(*options, l1_size_gb=1.0) as server:
        server.wait_ready()
        with Writer(place, 1) as first, Writer(place, 2) as second:
            until(lambda: min(len(first.accepted), len(second.accepted)) >= 20, 60)
            first.server_ends = second.server_ends = True
            server.popen.send_signal(signal.SIGTERM)
            first.wait()
            second.wait()
            assert server.popen.wait(60) == 0, server.log()
    assert "are left behind" not in server.log() and "not in L2" not in server.log()
    assert first.refusal is not None and second.refusal is not None
    assert not place.file.exists()
    with place.server(*options, l1_size_gb=1.0) as server:
        server.wait_ready()
        with SmallEngine(place.port, payload_bytes=PAYLOAD_BYTES) as engine:
            for number, tokens in enumerate([*first.accepted, *second.accepted]):
                reply = engine.lookup(f"r{number}", tokens)
                assert reply.chunks == CHUNKS_PER_STORE and engine.read(reply)
                engine.end(f"r{number}")


def test_a_backend_that_is_too_slow_ends_in_time_and_the_rest_is_named(place: DrainPlace) -> None:
    options = ["--drain-timeout-seconds", str(DRAIN_SECONDS)]
    with place.slow_server(BATCH_SECONDS, *options, word="Draining") as server:
        server.wait_ready()
        with Writer(place, 1, prompts=24) as writer:
            writer.wait()
            asked = time.monotonic()
            server.popen.send_signal(signal.SIGTERM)
            assert server.popen.wait(DRAIN_SECONDS + CLOSE_SECONDS) == 0, server.log()
            seconds = time.monotonic() - asked
            assert seconds > DRAIN_SECONDS
    assert "The 1 s of --drain-timeout-seconds are over" in server.log()
    lost = not_written(server.log())
    assert lost and lost + place.stored_objects >= writer.accepted_objects >= lost, server.log()
    # Where this machine stood still, a batch that is named as lost may have ended all the same.
    if seconds < DRAIN_SECONDS + UNDER_WAY_SECONDS:
        assert lost + place.stored_objects == writer.accepted_objects, server.log()
    assert not place.file.exists()


def test_a_second_signal_ends_it_at_once_and_says_what_is_lost(place: DrainPlace) -> None:
    with place.slow_server(ENDLESS_SECONDS, "--drain-timeout-seconds", str(ENDLESS_SECONDS)) as server:
        server.wait_ready()
        with Writer(place, 1, prompts=12) as writer:
            writer.wait()
            server.popen.send_signal(signal.SIGTERM)
            until(lambda: f"Draining for {ENDLESS_SECONDS:g} s at most" in server.log())
            assert server.alive()
            # An equal one counts only once it can be no repetition of the first.
            until(lambda: server.popen.poll() or server.popen.send_signal(signal.SIGTERM))
            assert server.popen.returncode == 128 + signal.SIGTERM
    assert "A second signal ends the server at once. Objects that are not in L2: " in server.log()
    assert not_written(server.log()) == writer.accepted_objects
    assert not place.file.exists()


def test_what_l2_did_not_get_stays_in_a_persistent_l1(place: DrainPlace) -> None:
    options = ["--drain-timeout-seconds", str(DRAIN_SECONDS), "--l1-persist"]
    with place.slow_server(BATCH_SECONDS, *options, word="Draining") as server:
        server.wait_ready()
        with Writer(place, 1, prompts=24) as writer:
            writer.wait()
            server.popen.send_signal(signal.SIGTERM)
            assert server.popen.wait(DRAIN_SECONDS + CLOSE_SECONDS) == 0, server.log()
    assert "; they stay in L1 for the next server." in server.log()
    assert place.stored_objects < writer.accepted_objects
    with place.slow_server(0.0, *options) as server:
        server.wait_ready()
        until(lambda: place.stored_objects == writer.accepted_objects, 30)
        assert server.stop() == 0, server.log()
