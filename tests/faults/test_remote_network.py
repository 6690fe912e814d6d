"""`resp` and `s3` on a network that loses packets, swallows all of them or resets connections: exact bytes or misses,
within the timeout, and as before once the network is well."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from faults.test_resp import LOADED, STORED, alive, at, refusal
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.testing.frames import keys
from lmcache.testing.processes import LOOPBACK
from polling import until
from services import need_package
from services.network import Network, in_own_network, with_files
from services.redis import Client, Valkey
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

SILENT_ADDRESS = "127.53.53.53"
TIMEOUT_SECONDS = 2.0
WITHIN_SECONDS = 4 * TIMEOUT_SECONDS  # a retry on a new connection, and a machine that is busy


def valkey(folder: Path, running: ExitStack) -> tuple[int, dict[str, Any]]:
    """The port that everything goes through, and an adapter there."""
    server = running.enter_context(Valkey(folder))
    server.wait_ready()
    return server.port, at(server, timeout_seconds=TIMEOUT_SECONDS, num_workers=2)


def seaweedfs(folder: Path, running: ExitStack) -> tuple[int, dict[str, Any]]:
    need_package("awscrt")
    server = running.enter_context(SeaweedFS(folder / "server"))
    server.wait_ready()
    server.make_bucket("bucket")
    endpoint = {"s3_endpoint": f"{LOOPBACK}:{server.port}/bucket", "s3_region": REGION, "disable_tls": True}
    credentials = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    return server.port, {"type": "s3", **endpoint, **credentials, "timeout_seconds": TIMEOUT_SECONDS}


@pytest.mark.parametrize("service", [valkey, seaweedfs])
def test_lost_packets_black_holes_and_resets(
    tmp_path: Path, service: Callable[[Path, ExitStack], tuple[int, dict[str, Any]]]
) -> None:
    async def course(network: Network, port: int, spec: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        async with alive(spec) as life:
            wanted = keys(8)
            assert await life.store(wanted, 300_000) == [STORED] * 8
            for seed, share in enumerate((0.5, 1.0), start=1):
                network.lose(port, share=share)
                began = loop.time()
                loaded = set(await life.load(wanted, 300_000))
                stored = set(await life.store(keys(8, seed=seed), 300_000))
                assert loop.time() - began < 2 * WITHIN_SECONDS
                possible = {LOADED, STORED} if share < 1 else set()
                assert loaded | stored <= {LoadOutcome.FAILED, StoreOutcome.FAILED, *possible}
                network.well()
                await life.eventually(lambda: life.load(wanted, 300_000), [LOADED] * 8)
            network.reset(port)
            began = loop.time()
            assert await life.load(wanted, 300_000) == [LoadOutcome.FAILED] * 8
            assert loop.time() - began < WITHIN_SECONDS
            network.well()
            await life.eventually(lambda: life.load(wanted, 300_000), [LOADED] * 8)
            await life.eventually(lambda: life.store(keys(2, seed=9)), [STORED] * 2)

    def test(network: Network) -> None:
        with ExitStack() as running:
            port, spec = service(tmp_path, running)
            asyncio.run(asyncio.wait_for(course(network, port, spec), 100))

    in_own_network(test)


def test_a_server_that_cannot_be_reached_is_said_in_time() -> None:
    """The queue of a listener that accepts nobody is full: what comes next gets no answer."""
    with socket.create_server((LOOPBACK, 0), backlog=0) as listener:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        refused = refusal({"host": LOOPBACK, "port": listener.getsockname()[1], "timeout_seconds": 1})
        assert "does not answer in time" in str(refused)
        for each in waiting:
            each.close()


def test_an_address_of_a_name_that_swallows_what_it_gets_leaves_time_for_the_next(tmp_path: Path) -> None:
    async def course(server: Valkey) -> None:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        async with alive({"host": "kv.test", "port": server.port, "num_workers": 1, "timeout_seconds": 4}) as life:
            assert await life.store(keys(1)) == [STORED] and loop.time() - began < 60

    def answers(server: Valkey) -> bool:
        with suppress(OSError), Client(("127.0.0.2", server.port)) as client:
            return bool(client.call("PING") == b"PONG")
        return False

    def test() -> None:
        bound = ["--bind", "127.0.0.2"]
        with (
            Valkey(tmp_path / "valkey", settings=bound) as server,
            socket.socket() as silent,
            ExitStack() as waiting,
        ):
            until(lambda: answers(server))
            silent.bind((LOOPBACK, server.port))
            silent.listen(0)
            for _ in range(4):
                each = waiting.enter_context(socket.socket())
                each.setblocking(False)
                each.connect_ex(silent.getsockname())
            assert [found[4][0] for found in socket.getaddrinfo("kv.test", 1, type=socket.SOCK_STREAM)] == addresses
            asyncio.run(asyncio.wait_for(course(server), 100))

    addresses = [LOOPBACK, "127.0.0.2"]  # as the resolver sorts them
    (tmp_path / "hosts").write_text("".join(f"{address} kv.test\n" for address in addresses))
    with_files({"/etc/hosts": tmp_path / "hosts"}, test)


def test_name_servers_that_do_not_answer_are_left_in_time(tmp_path: Path) -> None:
    """The resolver itself would wait for a minute."""

    def test() -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as silent:
            silent.bind((SILENT_ADDRESS, 53))
            for _ in range(2):  # the second waits for what the first began
                began = time.monotonic()
                refused = refusal({"host": "kv.example", "port": 6379, "timeout_seconds": 1})
                assert time.monotonic() - began < 10
                assert "does not answer in time" in str(refused) or "is not resolved in time" in str(refused)
            assert silent.recv(4096)  # it was asked

    (tmp_path / "resolv.conf").write_text(f"nameserver {SILENT_ADDRESS}\noptions timeout:30 attempts:2\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
    files = {f"/etc/{name}": tmp_path / name for name in ("resolv.conf", "nsswitch.conf")}
    with_files(files, test)
