"""A listing of ten million objects over HTTP: each once, page by page, while an engine goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import threading
import time
from array import array
from http.client import HTTPConnection
from pathlib import Path

import pytest

from lmcache.testing.processes import LOOPBACK, CacheServer
from polling import until
from process.support import SmallEngine

OBJECTS = int(os.environ.get("TEST_LISTED_OBJECTS", "10000000"))
SLICE_OBJECTS = 4096
PAGE_OBJECTS = 10_000
INVENTORY_SECONDS = 300.0
LONGEST_SECONDS = 1.0  # of a page, and of a lookup meanwhile
KEY = re.compile(rb'"key":"[0-9a-f]{64}/([0-9a-f]{16})')
STOCKED = """
import asyncio, random
from array import array
from lmcache.core.key import Namespace
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.l2.adapter import Adapter, ObjectColumns

class Stocked(Adapter):
    '''Says that it has many objects, and has none.'''
    def __init__(self, objects, slice_objects): self.objects, self.slice_objects = objects, slice_objects
    async def open(self, inventory):
        rng, owners = random.Random(1), [Namespace("model", 1, 0, 0, "0" * 32, "")]
        for _ in range(0, self.objects, self.slice_objects):
            count, hashes = self.slice_objects, rng.randbytes(32 * self.slice_objects)
            sizes, rows = array("Q", [65536]) * count, array("I", range(count))
            inventory.found(ObjectColumns(owners, array("I", bytes(4 * count)), hashes, sizes, rows))
            await asyncio.sleep(0)
        inventory.complete()
    async def store(self, keys, buffers): return [StoreOutcome.FULL] * len(keys)
    async def load(self, keys, buffers): return [LoadOutcome.MISSING] * len(keys)
    async def probe(self, keys): return [None] * len(keys)
    async def delete(self, keys, *, corrupt=False): return [True] * len(keys)
    async def clear(self): return 0, 0
    async def close(self): pass
"""


def low_words(hashes: bytes) -> int:
    """Sum of the first eight bytes of each hash: of one that is missing or there twice it is another."""
    return sum(array("Q", hashes)[::4])


class Lookups:
    """Of one engine, until it is told to end: how long each took."""

    def __init__(self, server: CacheServer) -> None:
        self.seconds: list[float] = []
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookups")

    def _run(self) -> None:
        with SmallEngine(self._server.port) as engine:
            tokens = engine.tokens(*range(20))
            engine.store(tokens)
            while not self._ended.wait(0.01):
                began = time.monotonic()
                assert engine.lookup("beside", tokens).chunks == 20
                self.seconds.append(time.monotonic() - began)
                engine.end("beside")

    def __enter__(self) -> Lookups:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.slow
def test_millions_of_objects_are_listed_each_once(tmp_path: Path) -> None:
    slices = -(-OBJECTS // SLICE_OBJECTS)
    (tmp_path / "stocked_adapter.py").write_text(STOCKED)
    place = {"type": "plugin", "module_path": "stocked_adapter", "class_name": "Stocked"}
    adapter = {**place, "adapter_params": {"objects": OBJECTS, "slice_objects": SLICE_OBJECTS}}
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    extra = ["--l2-adapter", json.dumps(adapter)]
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra, environment={"PYTHONPATH": path}) as server:
        server.wait_ready()
        until(lambda: server.status()["l2"]["adapters"][0]["inventory_complete"], INVENTORY_SECONDS)
        pages: list[float] = []
        listed = found = 0
        token = ""
        connection = HTTPConnection(LOOPBACK, server.http_port, timeout=60)
        with contextlib.closing(connection), Lookups(server) as lookups:
            while not pages or token:
                began = time.monotonic()
                connection.request("GET", f"/cache/objects?tier=l2&page_size={PAGE_OBJECTS}&page_token={token}")
                answer = connection.getresponse()
                page = answer.read()
                pages.append(time.monotonic() - began)
                assert answer.status == 200, page
                hashes = KEY.findall(page)
                listed += len(hashes)
                found += sum(array("Q", bytes.fromhex(b"".join(hashes).decode())))
                token = json.loads(b"{" + page[page.rindex(b'"next_page_token"') :])["next_page_token"]
        assert server.stop() == 0, server.log()
    rng = random.Random(1)
    wanted = sum(low_words(rng.randbytes(32 * SLICE_OBJECTS)) for _ in range(slices))
    assert (listed, found) == (slices * SLICE_OBJECTS, wanted)
    median_ms = statistics.median(lookups.seconds) * 1e3
    print(
        f"{listed:,} objects in {sum(pages):.0f} s, the longest page {max(pages) * 1e3:.0f} ms; "
        f"lookups meanwhile {median_ms:.1f} ms in the median, {max(lookups.seconds) * 1e3:.0f} ms at most"
    )
    assert max(*pages, *lookups.seconds) < LONGEST_SECONDS
