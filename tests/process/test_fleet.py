"""Real servers and a real coordinator: who has what, and what happens when either is killed, stopped or away."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from lmcache.testing.processes import CacheServer, CoordinatorProcess, free_port
from polling import until
from process.support import SmallEngine, held
from seeds import SEED
from services.network import Network, in_own_network

TOKEN = "0123456789abcdef-token-of-an-operator"
ELSEWHERE = "192.0.2.77"
PATIENT_SECONDS = 30
SOON_GONE_SECONDS = 3  # where a test waits for the end of a server: then nothing else may need it to be there
CHUNKS = (1, 2, 3)


@contextlib.contextmanager
def fleet(
    folder: Path,
    names: tuple[str, ...] = ("a", "b"),
    *,
    l2: bool = False,
    timeout_seconds: int = PATIENT_SECONDS,
    coordinator_options: tuple[str, ...] = (),
) -> Iterator[tuple[CoordinatorProcess, dict[str, CacheServer]]]:
    """A coordinator, and servers that have joined."""
    options = ["--instance-timeout", str(timeout_seconds), *coordinator_options]
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(CoordinatorProcess(folder, extra=options))
        coordinator.wait_ready()
        servers = {name: stack.enter_context(member(folder, name, coordinator, l2=l2)) for name in names}
        for server in servers.values():
            server.wait_ready()
        until(lambda: joined(coordinator) == set(names), tell=lambda: joined(coordinator))
        yield coordinator, servers
        for server in servers.values():
            if server.alive():
                until(lambda: not held(server))  # noqa: B023
                assert "Traceback" not in server.log()
                assert server.stop() == 0
        if coordinator.alive():
            assert "Traceback" not in coordinator.log()
            assert coordinator.stop() == 0


def member(folder: Path, name: str, coordinator: CoordinatorProcess, *options: str, l2: bool = False) -> CacheServer:
    own = folder / name
    own.mkdir(exist_ok=True)
    extra = [*coordinator.member_options, "--instance-id", name, *options]
    return CacheServer(own, l1_size_gb=0.0625, l2_folder=own / "l2" if l2 else None, extra=extra)


def joined(coordinator: CoordinatorProcess) -> set[str]:
    return {entry["instance_id"] for entry in coordinator.answer("GET", "/instances")["instances"]}


def tokens(chunks: tuple[int, ...] = CHUNKS) -> list[int]:
    return [chunk for chunk in chunks for _ in range(256)]


def prompt(chunks: tuple[int, ...] = CHUNKS, **more: Any) -> dict[str, Any]:
    return {"token_ids": tokens(chunks), "model_name": "model", **more}


def places(coordinator: CoordinatorProcess, tier: str = "l1", chunks: tuple[int, ...] = CHUNKS) -> list[list[str]]:
    """Which servers have each chunk on that tier."""
    answer = coordinator.answer("POST", "/directory/lookup", prompt(chunks))
    return [
        sorted(place["instance_id"] for place in result["placements"] if place["tier"] == tier)
        for result in answer["results"]
    ]


def become(coordinator: CoordinatorProcess, wanted: list[list[str]], tier: str = "l1") -> None:
    until(lambda: places(coordinator, tier) == wanted, tell=lambda: places(coordinator, tier))


def test_the_directory_says_where_and_follows(tmp_path: Path) -> None:
    with fleet(tmp_path, l2=True) as (coordinator, servers), contextlib.ExitStack() as engines:
        first, second = (engines.enter_context(SmallEngine(server.port)) for server in servers.values())
        first.store(first.tokens(*CHUNKS))
        second.store(second.tokens(1, 2))
        become(coordinator, [["a", "b"], ["a", "b"], ["a"]])
        become(coordinator, [["a", "b"], ["a", "b"], ["a"]], "l2")
        layout = coordinator.answer("POST", "/lookup", {"tokens": tokens()})["layout_info"]
        assert list(layout.items()) == [("a", ["LocalCPUBackend", 768]), ("b", ["LocalCPUBackend", 512])]
        listed = coordinator.answer("GET", "/directory/keys?tier=l1&instance_id=a")["keys"]
        truth = servers["a"].ask(servers["a"].http_port, "GET", "/cache/objects?tier=l1")[1]["entries"]
        named = {f"{entry['key']['namespace']}/{entry['key']['chunk_hash_hex']}" for entry in listed}
        assert named == {entry["key"] for entry in truth}
        servers["a"].clear("l1")
        become(coordinator, [["b"], ["b"], []])
        become(coordinator, [["a", "b"], ["a", "b"], ["a"]], "l2")
        assert coordinator.answer("POST", "/lookup", {"tokens": tokens()})["layout_info"] == {
            "a": ["LocalDiskBackend", 768],
            "b": ["LocalCPUBackend", 512],
        }
        usage = {entry["instance_id"]: entry["usage"] for entry in usage_of(coordinator)}
        assert {(entry["tier"], entry["objects"]) for entry in usage["b"]} == {("l1", 2), ("l2", 2)}
        assert all(entry["capacity_bytes"] == 1 << 26 for entry in usage["b"] if entry["tier"] == "l1")


def test_servers_of_a_fleet_load_from_each_other(tmp_path: Path) -> None:
    """Nobody names the peers: the coordinator does, and it may be away afterwards, or know nobody at first."""
    with fleet(tmp_path, ()) as (coordinator, _), contextlib.ExitStack() as running:
        servers = []
        for name in ("a", "b"):
            address = f"127.0.0.1:{free_port()}"
            servers.append(running.enter_context(member(tmp_path, name, coordinator, "--p2p-advertise-url", address)))
        for server in servers:
            server.wait_ready()
        until(lambda: all(server.metric("lmcache_mp_p2p_peers") == 1 for server in servers))
        first, second = (running.enter_context(SmallEngine(server.port)) for server in servers)
        wanted = first.tokens(*CHUNKS)
        assert first.store(wanted) == len(CHUNKS)
        coordinator.stop()
        requests = itertools.count()

        def all_come() -> bool:
            """A request waits for a peer for some milliseconds only."""
            request = f"elsewhere {next(requests)}"
            found = second.lookup(request, wanted)
            assert second.read(found)
            second.end(request)
            return found.chunks == len(CHUNKS)

        until(all_come)
        assert servers[1].metric("lmcache_mp_p2p_received_bytes_total") > 0
        with CoordinatorProcess(tmp_path, port=coordinator.port, log_name="again.log") as again:
            again.wait_ready()
            until(lambda: joined(again) == {"a", "b"})
            until(lambda: all(server.metric("lmcache_mp_coordinator_members") == 2 for server in servers))
            until(lambda: all(server.metric("lmcache_mp_p2p_peers") == 1 for server in servers))
            assert all(server.log().count("is connected, frames come by") == 1 for server in servers)
            assert again.stop() == 0


def usage_of(coordinator: CoordinatorProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = coordinator.answer("GET", "/instances/usage")["instances"]
    return found


def listed(server: CacheServer, tier: str) -> set[str]:
    """The keys that the server lists, of all pages."""
    found: set[str] = set()
    token = ""
    while True:
        path = f"/cache/objects?tier={tier}&page_size=10000&page_token={token}"
        answer = server.ask(server.http_port, "GET", path)[1]
        found |= {entry["key"] for entry in answer["entries"]}
        if not (token := answer["next_page_token"]):
            return found


def known(coordinator: CoordinatorProcess, name: str, tier: str) -> set[str]:
    found: set[str] = set()
    offset, more = 0, True
    while more:
        answer = coordinator.answer("GET", f"/directory/keys?tier={tier}&instance_id={name}&offset={offset}&limit=1000")
        found |= {f"{entry['key']['namespace']}/{entry['key']['chunk_hash_hex']}" for entry in answer["keys"]}
        offset = answer["next_offset"]
        more = offset > 0
    return found


def test_after_stores_and_evictions_the_directory_is_what_the_server_lists(tmp_path: Path) -> None:
    """Of L1, and of an L2 that encodes and evicts: salts come and go meanwhile."""
    rng = random.Random(SEED)
    files: dict[str, Any] = {"type": "fs_native", "base_path": str(tmp_path / "files"), "serde": {"type": "zstd"}}
    files |= {"max_capacity_gb": 0.01, "eviction": {"eviction_policy": "LRU"}}
    with CoordinatorProcess(tmp_path) as coordinator:
        coordinator.wait_ready()
        extra = [*coordinator.member_options, "--instance-id", "a", "--l2-adapter", json.dumps(files)]
        with CacheServer(tmp_path, l1_size_gb=0.005, extra=extra) as server:
            server.wait_ready()
            with SmallEngine(server.port, payload_bytes=1 << 16) as engine:
                for number in range(60):
                    first = rng.randrange(500)
                    engine.store(engine.tokens(*range(first, first + rng.randrange(1, 12))), salt=f"salt-{number // 9}")
                    if number % 20 == 10:
                        server.clear(rng.choice(["l1", "l2"]))
                for tier in ("l1", "l2"):
                    until(
                        lambda: known(coordinator, "a", tier) == listed(server, tier),  # noqa: B023
                        tell=lambda: known(coordinator, "a", tier) ^ listed(server, tier),  # noqa: B023
                    )
                assert listed(server, "l1") and listed(server, "l2")
                assert server.metric("lmcache_mp_l1_evicted_chunks_total") > 0
            assert server.stop() == 0


def test_a_server_that_is_killed_is_gone_and_comes_back(tmp_path: Path) -> None:
    with fleet(tmp_path, timeout_seconds=SOON_GONE_SECONDS) as (coordinator, servers):
        with SmallEngine(servers["a"].port) as engine, SmallEngine(servers["b"].port) as other:
            engine.store(engine.tokens(*CHUNKS))
            other.store(other.tokens(*CHUNKS))
            become(coordinator, [["a", "b"]] * 3)
        servers["b"].kill()
        become(coordinator, [["a"]] * 3)
        until(lambda: joined(coordinator) == {"a"})
        with member(tmp_path, "b", coordinator) as again:
            again.wait_ready()
            until(lambda: joined(coordinator) == {"a", "b"})
            with SmallEngine(again.port) as other:
                other.store(other.tokens(2))
                other.store(other.tokens(1, 2))
                become(coordinator, [["a", "b"], ["a", "b"], ["a"]])
            assert again.stop() == 0
        until(lambda: joined(coordinator) == {"a"})  # it has taken its leave


def test_a_server_that_stands_still_is_gone_and_tells_everything_again(tmp_path: Path) -> None:
    with (
        fleet(tmp_path, ("a",), timeout_seconds=SOON_GONE_SECONDS) as (coordinator, servers),
        SmallEngine(servers["a"].port) as engine,
    ):
        engine.store(engine.tokens(*CHUNKS))
        become(coordinator, [["a"]] * 3)
        servers["a"].pause()
        become(coordinator, [[]] * 3)
        servers["a"].resume()
        become(coordinator, [["a"]] * 3)


def test_a_coordinator_that_is_killed_knows_everything_soon(tmp_path: Path) -> None:
    """With and without its checkpoint. Engines notice nothing."""
    saved = ("--checkpoint-path", str(tmp_path / "directory"), "--checkpoint-interval", "0.5")
    with fleet(tmp_path, coordinator_options=saved) as (coordinator, servers), contextlib.ExitStack() as engines:
        engine, other = (engines.enter_context(SmallEngine(server.port)) for server in servers.values())
        engine.store(engine.tokens(*CHUNKS))
        other.store(other.tokens(1))
        become(coordinator, [["a", "b"], ["a"], ["a"]])
        until(lambda: (tmp_path / "directory").exists())
        coordinator.kill()
        other.store(other.tokens(1, 2))  # while there is none
        servers["a"].clear("l1")
        assert engine.lookup("r", engine.tokens(*CHUNKS)).chunks == 0
        engine.end("r")
        for name in (str(tmp_path / "directory"), ""):
            options = ["--checkpoint-path", name] if name else []
            with CoordinatorProcess(
                tmp_path,
                port=coordinator.port,
                extra=["--instance-timeout", str(PATIENT_SECONDS), *options],
                log_name=f"again-{bool(name)}.log",
            ) as again:
                again.wait_ready()
                become(again, [["b"], ["b"], []])
                assert again.stop() == 0


def test_servers_serve_while_the_coordinator_stands_still(tmp_path: Path) -> None:
    with fleet(tmp_path, ("a",)) as (coordinator, servers), SmallEngine(servers["a"].port) as engine:
        os.kill(coordinator.pid, signal.SIGSTOP)
        times = []
        for number in range(30):
            began = time.perf_counter()
            asked = engine.tokens(number, number + 1)
            assert engine.store(asked) > 0
            reply = engine.lookup(f"r{number}", asked)
            assert reply.chunks == 2 and engine.read(reply)
            engine.end(f"r{number}")
            times.append(time.perf_counter() - began)
        assert sorted(times)[len(times) // 2] < 1.0, times
        os.kill(coordinator.pid, signal.SIGCONT)
        until(lambda: coordinator.answer("GET", "/directory/stats")["placements"] >= 31)


def test_operators_pin_delete_and_move(tmp_path: Path) -> None:
    with fleet(tmp_path, l2=True) as (coordinator, servers):
        a = servers["a"]
        with SmallEngine(a.port) as engine, SmallEngine(servers["b"].port) as other:
            engine.store(engine.tokens(*CHUNKS))
            other.store(other.tokens(1))
            become(coordinator, [["a", "b"], ["a"], ["a"]])
            become(coordinator, [["a", "b"], ["a"], ["a"]], "l2")
            pin = coordinator.answer("POST", "/cache/pins", prompt(owner="me"))
            assert (pin["objects"], pin["missing"], pin["instances"]) == (4, 0, ["a", "b"])
            a.clear("l1")
            assert places(coordinator)[0] == ["a", "b"]
            (shown,) = coordinator.answer("GET", "/cache/pins")["pins"]
            assert shown["pin_id"] == pin["pin_id"]
            # A server that has joined is given its pins anew before those that it had end: for a moment it holds both.
            until(lambda: a.ask(a.http_port, "GET", "/cache/pins")[1]["objects"] == 3)
            coordinator.answer("DELETE", "/instances/a")  # it joins again, and is not made to hold them twice
            become(coordinator, [["a", "b"], ["a"], ["a"]])
            until(lambda: coordinator.answer("GET", "/cache/pins")["pins"][0]["instances"] == ["a", "b"])
            until(lambda: a.ask(a.http_port, "GET", "/cache/pins")[1]["objects"] == 3)
            assert coordinator.answer("DELETE", "/cache/pins", {"owner": "me"}) == {
                "pins": 1,
                "objects": 4,
                "behind": [],
            }
            assert a.ask(a.http_port, "GET", "/cache/pins")[1]["objects"] == 0
            a.clear("l1")
            become(coordinator, [["b"], [], []])
            started = coordinator.answer("POST", "/cache/prefetches", prompt(instance_id="a"))
            assert started["chunks"] == 3
            path = f"/cache/prefetches/a/{started['request_id']}"
            until(lambda: coordinator.answer("GET", path)["done"])
            assert coordinator.answer("GET", path)["objects_done"] == 3
            become(coordinator, [["a", "b"], ["a"], ["a"]])
            # b can load what its own L2 has: one of three.
            job = coordinator.answer("POST", "/cache/moves", prompt(source="a", target="b"))["request_id"]
            until(lambda: coordinator.answer("GET", f"/jobs/{job}")["done"])
            moved = coordinator.answer("GET", f"/jobs/{job}")
            assert (moved["status"], moved["objects_total"], moved["objects_done"], moved["objects_failed"]) == (
                *("done", 3, 1, 2),
            ), moved
            become(coordinator, [["b"], ["a"], ["a"]])
            finished = coordinator.answer("POST", "/check_finish", {"event_id": job})
            assert (finished["status"], finished["objects_failed"]) == ("done", 2)
            deleted = coordinator.answer("POST", "/cache/delete", prompt())
            assert (deleted["deleted"], deleted["failed"]) == (4, {})
            become(coordinator, [[]] * 3)
            become(coordinator, [[]] * 3, "l2")
            assert engine.lookup("r", engine.tokens(*CHUNKS)).chunks == 0
            engine.end("r")


def test_quotas_reach_every_server_and_those_that_join_later(tmp_path: Path) -> None:
    with fleet(tmp_path, ("a",)) as (coordinator, servers):
        coordinator.answer("PUT", "/quota/tenant", {"limit_gb": 0.5})

        def limit(server: CacheServer) -> float:
            return float(server.ask(server.http_port, "GET", "/quota/tenant")[1]["limit_gb"])

        until(lambda: limit(servers["a"]) == 0.5)
        until(lambda: coordinator.answer("GET", "/quota/tenant")["behind"] == [])
        with member(tmp_path, "b", coordinator) as late:
            late.wait_ready()
            until(lambda: limit(late) == 0.5)
            assert late.stop() == 0
        coordinator.answer("DELETE", "/quota/tenant")
        until(lambda: not servers["a"].ask(servers["a"].http_port, "GET", "/quota/tenant")[1]["exists"])


def test_the_controllers_orders(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator:
        coordinator.wait_ready()
        extra = [*coordinator.member_options, "--instance-id", "a"]
        extra += ["--l2-adapter", f'{{"type": "fs", "base_path": "{tmp_path}/z", "serde": {{"type": "zstd"}}}}']
        with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as server:
            server.wait_ready()
            with SmallEngine(server.port) as engine:
                engine.store(engine.tokens(*CHUNKS))
                become(coordinator, [["a"]] * 3)
                become(coordinator, [["a"]] * 3, "l2")

                def order(path: str, **fields: Any) -> Any:
                    return coordinator.ask(
                        coordinator.controller_port, "POST", path, {"instance_id": "a", "tokens": tokens(), **fields}
                    )

                assert order("/pin")[1]["num_tokens"] == 768
                assert order("/unpin")[1]["pins"] == 1
                status, refused = order("/compress", method="gzip")
                assert status == 400 and "no L2 adapter with the serde 'gzip'" in refused["detail"]
                orders: list[tuple[str, list[list[str]]]] = [("/compress", [[]] * 3), ("/decompress", [["a"]] * 3)]
                for path, expected in orders:
                    status, begun = order(path, method="zstd")
                    assert status == 200, begun

                    def finished(event_id: str = begun["event_id"]) -> bool:
                        body = coordinator.answer("POST", "/check_finish", {"event_id": event_id})
                        assert body["status"] != "failed", body
                        return bool(body["status"] == "done" and body["objects_done"] == 3)

                    until(finished)
                    become(coordinator, expected)
                ask = {"instance_id": "a", "location": "LocalCPUBackend"}
                assert coordinator.answer("POST", "/clear", ask)["num_objects"] == 3
                become(coordinator, [[]] * 3)
                assert coordinator.answer("POST", "/health", {"instance_id": "a"})["error_codes"] == {"0": 0}


def test_nobody_without_the_token_reads_or_changes_anything_from_another_address(tmp_path: Path) -> None:
    """Of a coordinator that listens on all addresses; servers with the token join from there."""
    (tmp_path / "token").write_text(TOKEN)
    with_token = {"Authorization": f"Bearer {TOKEN}"}

    def test(_: Network) -> None:
        subprocess.run(["ip", "address", "add", f"{ELSEWHERE}/32", "dev", "lo"], check=True)
        secret = ["--admin-token-file", str(tmp_path / "token")]
        with CoordinatorProcess(tmp_path, host="0.0.0.0", extra=secret) as coordinator, httpx.Client() as http:
            coordinator.wait_ready()
            for port in (coordinator.port, coordinator.controller_port):
                url = f"http://{ELSEWHERE}:{port}"
                stranger = {"ip": "127.0.0.1", "http_port": 1}
                for path, body in (
                    ("/instances", stranger),
                    ("/events", {"batches": []}),
                    ("/directory/lookup", prompt()),
                    ("/cache/moves", {}),
                    ("/lookup", {"tokens": [1]}),
                    ("/clear", {"instance_id": "a"}),
                ):
                    assert http.post(url + path, json=body).status_code == 403, path
                for path in ("/instances", "/directory/keys", "/directory/stats", "/quota", "/controller/workers"):
                    assert http.get(url + path).status_code == 403, path
                    assert http.get(url + path, headers=with_token).status_code == 200, path
                assert http.get(f"{url}/healthz").status_code == 200
            own = ["--coordinator-url", f"http://{ELSEWHERE}:{coordinator.port}", "--instance-id", "a"]
            own += ["--http-host", "0.0.0.0", "--coordinator-heartbeat-interval", "0.3"]
            for number, options in enumerate(([], secret)):
                with CacheServer(
                    tmp_path, l1_size_gb=0.0625, extra=[*own, *options], log_name=f"server-{number}.log"
                ) as server:
                    server.wait_ready()
                    if options:
                        until(lambda: joined(coordinator) == {"a"})
                        (entry,) = coordinator.answer("GET", "/instances")["instances"]
                        assert entry["ip"] == ELSEWHERE
                        # The coordinator changes a server of another address with the token that they share.
                        assert coordinator.answer("PUT", "/quota/t", {"limit_gb": 1})
                        until(lambda: coordinator.answer("GET", "/quota/t")["behind"] == [])
                    else:
                        until(lambda: "admin token" in server.log())
                        assert joined(coordinator) == set()

    in_own_network(test)
