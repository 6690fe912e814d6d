"""What one salt has stored is nothing to another, on any path, and not by the time that an answer takes either."""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import httpx
import pytest

from lmcache.testing.processes import CacheServer
from polling import until
from process.support import NO_SLOT, SmallEngine, unpack_slots
from services.network import Network, in_own_network

SALTS = ("", "a", "aa", "b", "_default", "a/b", "a\0", " ")
ELSEWHERE = "192.0.2.9"
TOKEN = "a token of an operator"
CHUNKS = 24
QUESTIONS = 300
# How often the answer about another tenant's prompt takes longer than that about nobody's, of pairs in turn. By chance
# alone 0.5 with a standard deviation of 0.03.
NO_DIFFERENCE = (0.3, 0.7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("tenants")
    with CacheServer(folder, l1_size_gb=0.0625, l2_folder=folder / "l2") as server:
        server.wait_ready()
        yield server
    assert not (Path("/dev/shm") / server.shm_name).exists()


def stored_in_l2(server: CacheServer, objects: int) -> None:
    deadline = time.monotonic() + 90
    while True:
        [adapter] = server.status()["l2"]["adapters"]
        if adapter["objects"] >= objects and not adapter["stores_in_flight"]:
            return
        assert time.monotonic() < deadline, adapter
        time.sleep(0.02)


def test_no_salt_hits_what_another_stored(server: CacheServer) -> None:
    with SmallEngine(server.port) as engine:
        tokens = engine.tokens(1, 2)
        hashes = engine.hashes(tokens)
        for number, salt in enumerate(SALTS):
            # Learns neither that the chunks are there, nor that somebody is about to store them.
            reply = engine.reserve(hashes, salt=salt)
            slots = unpack_slots(reply.slots)
            assert len(set(slots)) == 2 and NO_SLOT not in slots
            engine.fill(hashes, slots, salt=salt)
            for other in SALTS[number:]:
                assert engine.lookup("early", tokens, salt=other).chunks == 0
            assert engine.commit(reply.reservation) == 2
        stored_in_l2(server, 2 * len(SALTS))
        for tier in ("l1", "l2"):
            for salt, other in permutations(SALTS, 2):
                found = engine.lookup("own", tokens, salt=salt)
                assert found.chunks == 2
                assert engine.read(found, salt=salt)
                assert not engine.read(found, salt=other)  # the frames themselves name their tenant
            server.clear("l1")
            engine.end("own")
            assert tier == "l2" or engine.lookup("again", tokens, salt="nobody").chunks == 0
        server.clear("all")


@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_the_time_of_an_answer_tells_nothing(server: CacheServer, tier: str) -> None:
    with SmallEngine(server.port) as engine:
        known = [engine.tokens(*range(1000 * prompt, 1000 * prompt + CHUNKS)) for prompt in range(1, 7)]
        unknown = [engine.tokens(*range(1000 * prompt, 1000 * prompt + CHUNKS)) for prompt in range(11, 17)]
        for tokens in known:
            assert engine.store(tokens, salt="one") == CHUNKS
        stored_in_l2(server, CHUNKS * len(known))
        if tier == "l2":
            server.clear("l1")

        def seconds(tokens: bytes, salt: str) -> float:
            began = time.perf_counter()
            reply = engine.lookup("question", tokens, salt=salt)
            took = time.perf_counter() - began
            assert reply.chunks == (CHUNKS if salt == "one" else 0)
            engine.end("question")
            return took

        pairs = []
        for number in range(QUESTIONS):
            asked = [(0, known[number % 6]), (1, unknown[number % 6])]
            times = [0.0, 0.0]
            for kind, tokens in asked if number % 2 else reversed(asked):
                times[kind] = seconds(tokens, "two")
            pairs.append(times)
        longer = sum(theirs > nobodys for theirs, nobodys in pairs) / QUESTIONS
        print(f"{tier}: another tenant's prompt took longer than nobody's in {100 * longer:.0f} % of {QUESTIONS} pairs")
        assert NO_DIFFERENCE[0] < longer < NO_DIFFERENCE[1]
        # That the times could tell: the tenant's own prompts, from the tier where they are.
        own = [seconds(known[number % 6], "one") for number in range(6)]
        print(f"its own: {1e3 * min(own):.2f} ms, nobody's: {1e3 * sorted(p[1] for p in pairs)[QUESTIONS // 2]:.2f} ms")
        server.clear("all")


def test_who_asks_from_another_address_learns_of_no_salt(tmp_path: Path) -> None:
    """Of a server that listens on all addresses, on both ports: digests stand for salts, no guess of a salt can be
    confirmed, and the token shows them."""
    (tmp_path / "token").write_text(TOKEN)
    with_token = {"Authorization": f"Bearer {TOKEN}"}

    def test(_: Network) -> None:
        subprocess.run(["ip", "address", "add", f"{ELSEWHERE}/32", "dev", "lo"], check=True)
        extra = ["--http-host", "0.0.0.0", "--admin-token-file", str(tmp_path / "token"), "--prometheus-port", "9111"]
        with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as server, httpx.Client() as http:
            server.wait_ready()
            with SmallEngine(server.port) as engine:
                assert engine.store(engine.tokens(1), salt="alice") == 1
                assert engine.lookup("own", engine.tokens(1), salt="alice").chunks == 1
                engine.end("own")
            quota = f"http://127.0.0.1:{server.http_port}/quota/alice"
            history = f"{server.http_port}/metrics/history?since=0"
            until(lambda: "alice" in http.get(f"http://127.0.0.1:{history}").text, tell=server.log)
            assert http.put(quota, json={"limit_gb": 1}, headers=with_token).status_code == 200
            for page in (f"{server.http_port}/quota", f"{server.http_port}/metrics", "9111/metrics", history):
                seen = http.get(f"http://{ELSEWHERE}:{page}").text
                assert re.search(r"salt-[0-9a-f]{12}", seen) and "alice" not in seen, page
                assert hashlib.sha256(b"alice").hexdigest()[:12] not in seen, page
                assert "alice" in http.get(f"http://{ELSEWHERE}:{page}", headers=with_token).text, page
                assert "alice" in http.get(f"http://127.0.0.1:{page}").text, page
            elsewhere = quota.replace("127.0.0.1", ELSEWHERE)
            assert http.put(elsewhere, json={"limit_gb": 2}).status_code == 403
            guessed, made_up = http.get(elsewhere), http.get(elsewhere.replace("alice", "nobody"))
            assert (guessed.status_code, guessed.content) == (403, made_up.content)
            assert http.get(elsewhere, headers=with_token).json()["exists"]

    in_own_network(test)
