"""The end of a prompt that one engine computes for another, through real servers: exact bytes on every way."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.client.transfer_mode import WantedTransfer
from lmcache.protocol import messages as m
from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import CacheServer, CoordinatorProcess
from polling import until
from process.support import CALL_SECONDS, SmallEngine, unpack_slots
from process.test_fleet import fleet
from process.test_peers import engine_at, servers

PARTIAL = 48
PROBES = "lmcache_mp_l2_probe_seconds_count"
LAST = pack_tokens(list(range(PARTIAL + 5)))


def store(engine: SmallEngine, tokens: bytes) -> int:
    append = m.Append(engine.instance_id, "prefill", "", 0, tokens, partial_tokens=PARTIAL)
    named: m.AppendReply = engine.client.call("append", append, CALL_SECONDS)
    assert named.partial_tokens == PARTIAL
    engine.end("prefill")
    reply = engine.reserve(named.hashes)
    if engine.client.memory is None:
        engine.send(named.hashes, reply)
    else:
        engine.fill(named.hashes, unpack_slots(reply.slots))
    return engine.commit(reply.reservation)


def hit(engine: SmallEngine, tokens: bytes, partial: int = PARTIAL) -> int:
    """Chunks, which are exactly what was stored."""
    lookup = m.Lookup(engine.instance_id, "decode", "", 0, tokens, deadline_seconds=10.0, partial_tokens=partial)
    reply: m.LookupReply = engine.client.call("lookup", lookup, CALL_SECONDS)
    assert engine.read(reply)
    engine.end("decode")
    return reply.chunks


def test_a_peer_gives_it(tmp_path: Path) -> None:
    with (
        servers(tmp_path, (), ()) as (one, other),
        engine_at(one) as prefill,
        engine_at(other) as decode,
    ):
        tokens = prefill.tokens(1, 2, 3) + LAST
        assert store(prefill, tokens) == 4
        until(lambda: hit(decode, tokens) == 4)
        until(lambda: hit(decode, tokens, PARTIAL - 1) == 3)
        assert hit(decode, tokens, PARTIAL - 1) <= 3, "another length"


@pytest.mark.parametrize("transfer", [WantedTransfer.SHM, WantedTransfer.SOCKET])
def test_a_later_server_has_it_in_l2(tmp_path: Path, transfer: WantedTransfer) -> None:
    adapter = json.dumps({"type": "fs", "base_path": str(tmp_path / "l2")})
    tokens = b""
    for is_first in (True, False):
        with CacheServer(tmp_path, l1_size_gb=0.0625, extra=["--l2-adapter", adapter]) as server:
            server.wait_ready()
            with SmallEngine(server.port, transfer=transfer) as engine:
                if is_first:
                    tokens = engine.tokens(1) + LAST
                    assert store(engine, tokens) == 2
                    until(lambda server=server: server.status()["l2"]["adapters"][0]["objects"] == 2)
                until(lambda engine=engine, tokens=tokens: hit(engine, tokens) == 2)
                assert hit(engine, LAST) == 0
            assert server.stop() == 0


def test_operators_find_pin_and_delete_it(tmp_path: Path) -> None:
    """At a server, by the name that its lookup gives."""
    with CacheServer(tmp_path, l1_size_gb=0.0625) as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(1, 2) + LAST
            assert store(engine, tokens) == 3

            def found(ids: list[int]) -> list[dict[str, Any]]:
                body = {"model_name": "model", "tokens": ids}
                status, answer = server.ask(server.http_port, "POST", "/cache/lookup", body)
                assert status == 200, answer
                namespaces.update(answer["namespaces"])
                return list(answer["partial_chunks"])

            def ask(method: str, path: str, **body: Any) -> Any:
                status, answer = server.ask(server.http_port, method, path, body)
                assert status == 200, answer
                return answer

            namespaces: set[str] = set()
            ids = numbers(tokens)
            (partial,) = found(ids)
            assert (partial["tokens"], partial["tiers"], partial["in_l1"]) == (PARTIAL, ["l1"], [0])
            assert found(ids[:-5]) == [partial], "of exactly these tokens"
            assert found(ids[:-6]) == [] and found([*ids[:-6], 7]) == [], "of other tokens"
            key = f"{namespaces.pop()}/{partial['hash']}"
            pin = ask("POST", "/cache/pins", keys=[key], owner="me", ttl_seconds=60.0)
            assert (pin["objects"], pin["missing"]) == (1, 0)
            server.clear("l1")
            assert found(ids) == [partial] and server.status()["l1"]["objects"] == 1
            assert ask("DELETE", "/cache/objects", keys=[key])["deleted"] == 0, "it is pinned"
            ask("DELETE", "/cache/pins", owner="me")
            assert ask("DELETE", "/cache/objects", keys=[key])["deleted"] == 1
        assert server.stop() == 0


def test_a_lookup_asks_no_backend_about_its_many_names(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(1) + LAST
            assert store(engine, tokens) == 2
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == 2)
            server.clear("l1")
            asked = server.metric(PROBES)
            body = {"model_name": "model", "tokens": numbers(tokens)}
            status, answer = server.ask(server.http_port, "POST", "/cache/lookup", body)
            (name,) = (adapter["name"] for adapter in server.status()["l2"]["adapters"])
            assert (status, answer["chunks"][0]["tiers"]) == (200, [name])
            assert [(partial["tokens"], partial["tiers"]) for partial in answer["partial_chunks"]] == [
                (PARTIAL, [name])
            ]
            assert server.metric(PROBES) == asked
        assert server.stop() == 0


def test_a_server_warms_and_moves_it(tmp_path: Path) -> None:
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(1) + LAST
            assert store(engine, tokens) == 2
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == 2)
            adapter = server.status()["l2"]["adapters"][0]["name"]
            prompt = {"model_name": "model", "tokens": numbers(tokens)}

            def done(path: str, body: dict[str, Any]) -> int:
                job = server.ask(server.http_port, "POST", path, body)[1]["request_id"]
                until(lambda: server.ask(server.http_port, "GET", f"/jobs/{job}")[1]["done"])
                return int(server.ask(server.http_port, "GET", f"/jobs/{job}")[1]["objects_done"])

            server.clear("l1")
            assert done("/cache/prefetches", prompt) == 2
            until(lambda: hit(engine, tokens) == 2)
            server.clear("l2")
            assert done("/cache/moves", {**prompt, "from": "l1", "to": adapter}) == 2
            assert server.status()["l1"]["objects"] == 0
            assert server.status()["l2"]["adapters"][0]["objects"] == 2
        assert server.stop() == 0


def test_operators_of_a_fleet_find_pin_and_delete_it(tmp_path: Path) -> None:
    with fleet(tmp_path) as (coordinator, servers), contextlib.ExitStack() as engines:
        engine, other = (engines.enter_context(SmallEngine(server.port)) for server in servers.values())
        tokens = engine.tokens(1, 2) + LAST
        assert store(engine, tokens) == 3
        other.store(other.tokens(1, 2))
        named = {"model_name": "model", "token_ids": numbers(tokens)}

        def stored() -> list[tuple[int, list[str]]]:
            answer = coordinator.answer("POST", "/directory/lookup", named)
            assert answer["chunks"] == len(answer["results"]) == 2
            return [
                (partial["tokens"], [place["instance_id"] for place in partial["results"][0]["placements"]])
                for partial in answer["partial_chunks"]
            ]

        until(lambda: stored() == [(PARTIAL, ["a"])], tell=stored)
        body = {"tokens": numbers(tokens), "instance_id": "a", "location": "LocalCPUBackend"}
        until(lambda: len(layout(coordinator, tokens)) == 2)
        reached = {"a": ["LocalCPUBackend", 512 + PARTIAL], "b": ["LocalCPUBackend", 512]}
        assert layout(coordinator, tokens) == reached and list(layout(coordinator, tokens)) == ["a", "b"]
        assert coordinator.answer("POST", "/pin", body)["num_tokens"] == 512 + PARTIAL
        assert coordinator.answer("POST", "/unpin", body)["pins"] == 1
        pin = coordinator.answer("POST", "/cache/pins", {**named, "owner": "me"})
        assert (pin["objects"], pin["missing"]) == (5, 0)
        servers["a"].clear("l1")
        assert stored() == [(PARTIAL, ["a"])] and hit(engine, tokens) == 3
        coordinator.answer("DELETE", "/cache/pins", {"owner": "me"})
        answer = coordinator.answer("POST", "/cache/delete", named)
        assert (answer["deleted"], answer["skipped"], answer["failed"]) == (5, 0, {})
        until(lambda: stored() == [], tell=stored)
        assert hit(engine, LAST) == hit(engine, tokens) == 0


def layout(coordinator: CoordinatorProcess, tokens: bytes) -> dict[str, Any]:
    found: dict[str, Any] = coordinator.answer("POST", "/lookup", {"tokens": numbers(tokens)})["layout_info"]
    return found


def numbers(tokens: bytes) -> list[int]:
    return memoryview(tokens).cast("I").tolist()
