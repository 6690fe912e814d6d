"""Guides to what lies behind a server: its commands as printed, but for sizes, folders and what two servers on one
machine cannot share, with the services that they name."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from lmcache.testing.processes import LOOPBACK
from polling import until
from process.nursery import Nursery
from process.support import SmallEngine
from process.test_documented_commands import Row, in_a_network_where_names_are_local, with_server
from process.test_guide_lines import HOW_TO, lines
from process.test_share_guide import SEAWEED_PORTS, Tour, hit
from services import mooncake, need_package, program
from services.network import Network, in_own_network, with_own_memory
from services.redis import VALKEY, Valkey
from services.seaweedfs import Credentials, SeaweedFS

START_SECONDS = 60.0
# Of the second of two servers on this machine.
OTHER_PORTS = "--port 5556 --http-port 8081 --prometheus-port 9091"


def test_servers_load_from_each_other(tmp_path: Path) -> None:
    text = (HOW_TO / "load_from_other_servers.md").read_text()
    secret, *lines_to_run = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    first_line, second_line, installation, engine_line = (
        line.strip().replace("--l1-size-gb 20", "--l1-size-gb 0.05") for line in lines_to_run
    )
    addresses = set(re.findall(r"--p2p-advertise-url ([\d.]+):", text))

    def test(_: Network) -> None:
        with_own_memory()
        for address in addresses:
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
        tour = Tour(tmp_path)
        tour.run(secret)
        with (
            tour.start(f"exec {first_line}", "first") as first,
            tour.start(f"exec {second_line} {OTHER_PORTS}", "second") as second,
        ):
            first.wait_until_ready(8080, "/healthcheck", START_SECONDS)
            second.wait_until_ready(8081, "/healthcheck", START_SECONDS)
            with SmallEngine(5555) as storing, SmallEngine(5556) as loading:
                tokens = storing.tokens(1, 2, 3)
                assert storing.store(tokens) == 3
                until(lambda: hit(loading, tokens) == 3, tell=second.log)
            assert first.stop() == 0 and second.stop() == 0, first.log() + second.log()
        with tour.start(f"exec {engine_line}", "by-engine") as third:
            third.wait_until_ready(8080, "/healthcheck", START_SECONDS)
            assert third.stop() == 0, third.log()

    assert installation.startswith("pip install") and len(addresses) == 2
    in_own_network(test)


def test_what_is_stored_in_redis_is_encrypted(tmp_path: Path) -> None:
    page = HOW_TO / "encrypt_what_is_stored.md"
    (server_line,) = lines(page, "server")
    making_a_key = re.findall(r"^    (umask .*\n    openssl .*\n)", page.read_text(), re.MULTILINE)[0]
    folder, fitted = tmp_path / "etc", server_line.replace("10.0.0.5", LOOPBACK)
    folder.mkdir()
    program(VALKEY, "Valkey")

    def test(_: Network) -> None:
        nursery = Nursery()
        try:
            Tour(tmp_path / "tour").run(making_a_key.replace("/etc/lmcache", str(folder)))
            with Valkey(tmp_path / "valkey", port=6379) as service:
                service.wait_ready()

                def is_sealed(_: object) -> None:
                    names = service.keys("lmcache/v1/*")
                    assert len(names) == 3
                    for name in names:
                        payload = hashlib.shake_128(bytes.fromhex(name[-64:])).digest(64)
                        assert payload not in service.call("GET", name)

                row = Row("", fitted.replace("/etc/lmcache", str(folder)), "runs")
                with_server(nursery, row, tmp_path, {}, is_sealed)
        finally:
            nursery.close()

    in_own_network(test)


def test_a_server_keeps_kv_in_a_bucket(tmp_path: Path) -> None:
    need_package("awscrt")
    (line,) = [line for line in lines(HOW_TO / "keep_kv_in_s3.md", "server") if "minio.local" in line]

    def test(nursery: Nursery) -> None:
        owner = Credentials("minio", "minio123")
        with SeaweedFS(tmp_path / "seaweedfs", ports=SEAWEED_PORTS, credentials=owner) as service:
            service.wait_ready()
            service.make_bucket("my-bucket")
            with_server(nursery, Row("", line, "runs"), tmp_path, {})
            assert len(service.names("my-bucket")) == 3

    in_a_network_where_names_are_local("minio.local", tmp_path, test)


def test_a_server_keeps_kv_in_a_mooncake_store(tmp_path: Path) -> None:
    mooncake.need()
    page = HOW_TO / "store_with_mooncake.md"
    (line,) = lines(page, "server")
    (master_line,) = re.findall(r"^    (mooncake_master .*)$", page.read_text(), re.MULTILINE)
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.submodule_search_locations
    master_program = Path(spec.submodule_search_locations[0]) / "mooncake_master"

    def answers() -> bool:
        with suppress(OSError):
            socket.create_connection(("10.0.0.1", 50051), 1.0).close()
            return True
        return False

    def test(nursery: Nursery) -> None:
        for address in ("10.0.0.1", "10.0.0.2"):
            subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "lan"], check=True)
        tour = Tour(tmp_path / "tour")
        (tour.folder / "bin" / "mooncake_master").symlink_to(master_program)
        with tour.start(f"exec {master_line}", "master") as master:
            until(answers, START_SECONDS, tell=master.log)
            with_server(nursery, Row("", line, "runs"), tmp_path, {})

    in_a_network_where_names_are_local("node01", tmp_path, test)
