"""The services themselves: they start, answer and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from polling import until
from services.certificates import Certificates
from services.redis import Client, Redis, Sentinel, ServerError, Valkey, cluster


@pytest.mark.parametrize("kind", [Redis, Valkey])
def test_a_server_with_a_password_answers_over_tcp_and_its_socket(
    tmp_path: Path, kind: type[Redis] | type[Valkey]
) -> None:
    with kind(tmp_path / "server", password="secret word") as server:
        server.wait_ready()
        assert server.call("SET", "name", b"\x00value\r\n") == b"OK"
        with Client(server.unix_socket, "secret word") as client:
            assert client.call("GET", "name") == b"\x00value\r\n" and client.call("GET", "other") is None
        with pytest.raises(ServerError, match="WRONGPASS"):
            Client(server.unix_socket, "wrong")
    assert not server.alive()


def test_redis_speaks_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Redis(tmp_path / "server", certificates=certificates) as server:
        server.wait_ready()
        assert server.tls_answers(certificates)


def test_three_servers_are_a_cluster(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        ranges = nodes[1].call("CLUSTER", "SLOTS")
        assert sorted(entry[2][1] for entry in ranges) == sorted(node.port for node in nodes)


def test_sentinel_promotes_a_replica(tmp_path: Path) -> None:
    with Redis(tmp_path / "one") as first, Redis(tmp_path / "two") as second:
        first.wait_ready()
        second.wait_ready()
        second.call("REPLICAOF", "127.0.0.1", first.port)
        until(lambda: b"master_link_status:up" in second.call("INFO", "replication"))
        with Sentinel(tmp_path / "sentinel", first) as sentinel:
            until(lambda: sentinel.master_port() == first.port)
            until(lambda: b"slave" in str(sentinel.call("SENTINEL", "replicas", "kv")).encode())
            first.kill()
            until(lambda: sentinel.master_port() == second.port)
