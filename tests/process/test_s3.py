"""Servers that share a bucket: what one stored the other hits, bit by bit, also after the bucket has been away."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache.testing.processes import LOOPBACK, CacheServer, http_json
from polling import until
from process.support import SmallEngine
from services import need_package
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

need_package("awscrt")

CHUNKS = 24
BY_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
L1_GB = 0.0625


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SeaweedFS]]:
    """The one that runs is the last."""
    services = [SeaweedFS(tmp_path_factory.mktemp("seaweedfs") / "server")]
    services[0].wait_ready()
    services[0].make_bucket("shared")
    yield services
    services[-1].stop()


def adapter(service: SeaweedFS, **keys: Any) -> dict[str, Any]:
    endpoint = f"{LOOPBACK}:{service.port}/shared"
    return {"type": "s3", "s3_endpoint": endpoint, "s3_region": REGION, "disable_tls": True, **keys}


@contextlib.contextmanager
def running(folder: Path, name: str, *extra: str, environment: dict[str, str]) -> Iterator[CacheServer]:
    with CacheServer(folder, l1_size_gb=L1_GB, extra=extra, environment=environment, log_name=f"{name}.log") as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log()


def by_environment(folder: Path, name: str, service: SeaweedFS, **keys: Any) -> Any:
    """The default chain finds the credentials."""
    return running(folder, name, "--l2-adapter", json.dumps(adapter(service, **keys)), environment=BY_ENVIRONMENT)


def by_file(folder: Path, name: str, service: SeaweedFS, **keys: Any) -> Any:
    """Credentials are in a file, so that no argument of a process shows them."""
    credentials = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"l2_adapter": [adapter(service, **credentials, **keys)]}))
    return running(folder, name, "--config", str(path), environment={})


def figures(server: CacheServer) -> dict[str, Any]:
    return dict(server.status()["l2"]["adapters"][0])


def stored(server: CacheServer, objects: int) -> bool:
    now = figures(server)
    return bool(now["objects"] >= objects and not now["stores_in_flight"])


def test_two_servers_share_a_bucket(tmp_path: Path, service: list[SeaweedFS]) -> None:
    with (
        by_environment(tmp_path, "first", service[-1]) as first,
        by_file(tmp_path, "second", service[-1]) as second,
        SmallEngine(first.port) as writer,
        SmallEngine(second.port) as reader,
    ):
        tokens = writer.tokens(*range(CHUNKS))
        assert writer.store(tokens) == CHUNKS and writer.store(tokens, salt="tenant") == CHUNKS
        until(lambda: stored(first, 2 * CHUNKS))
        assert figures(second)["objects"] == 0, "it has not been told"
        for salt in ("", "tenant"):
            found = reader.lookup(f"request{salt}", tokens, salt=salt)
            assert found.chunks == CHUNKS and reader.read(found, salt=salt)
        assert reader.lookup("nobody's", tokens, salt="other").chunks == 0
        # Both at once store one key: it is there once, and whole.
        both = writer.tokens(*range(100, 100 + CHUNKS))
        assert writer.store(both) == CHUNKS and reader.store(both) == CHUNKS
        until(lambda: stored(first, 3 * CHUNKS) and stored(second, 3 * CHUNKS))
        assert len(service[-1].names("shared")) == 3 * CHUNKS
        for server in (first, second):
            server.clear("l1")
        for engine in (writer, reader):
            found = engine.lookup("both", both)
            assert found.chunks == CHUNKS and engine.read(found)
    with by_file(tmp_path, "third", service[-1], max_capacity_gb=1) as third:
        until(lambda: figures(third)["inventory_complete"])
        assert figures(third)["objects"] == 3 * CHUNKS, "listed"
        third.clear("l2")
        assert service[-1].names("shared") == []


def test_a_bucket_is_kept_within_its_capacity(tmp_path: Path, service: list[SeaweedFS]) -> None:
    limits = {"max_capacity_gb": 20 * 8192 / 2**30, "eviction": {"eviction_policy": "LRU"}, "prefix": "small"}
    with by_file(tmp_path, "small", service[-1], **limits) as server, SmallEngine(server.port) as engine:
        last = engine.tokens(*range(90, 90 + CHUNKS))
        for start in range(0, 90 + CHUNKS, CHUNKS):
            engine.store(engine.tokens(*range(start, start + CHUNKS)))
            until(lambda: not figures(server)["stores_in_flight"])
        engine.store(last)
        until(lambda: len(service[-1].names("shared")) and not figures(server)["stores_in_flight"])
        kept = [name for name in service[-1].names("shared") if name.startswith("small/v1/")]
        assert 0 < len(kept) <= 20 and figures(server)["used_bytes"] <= 20 * 8192
    # What was still queued has been written at its end.
    kept = [name for name in service[-1].names("shared") if name.startswith("small/v1/")]
    assert 0 < len(kept) <= 20
    with by_file(tmp_path, "fleeting", service[-1], prefix="small", persist_enabled=False) as server:
        until(lambda: figures(server)["inventory_complete"])
        assert figures(server)["objects"] == len(kept)
    assert not [name for name in service[-1].names("shared") if name.startswith("small/v1/")]


def test_no_secret_is_shown(tmp_path: Path, service: list[SeaweedFS]) -> None:
    with by_file(tmp_path, "shy", service[-1]) as server:
        seen = server.log() + Path(f"/proc/{server.pid}/cmdline").read_text()
        for page in ("/config", "/status", "/metrics", "/healthcheck"):
            status, body = http_json(server.http_port, "GET", page)
            assert status == 200
            seen += json.dumps(body)
    assert "s3" in seen and SECRET_KEY not in seen and ACCESS_KEY not in seen
    # Neither where it is refused.
    path = tmp_path / "wrong.yaml"
    wrong = adapter(service[-1], aws_access_key_id=ACCESS_KEY, aws_secret_access_key=f"{SECRET_KEY}-wrong")
    path.write_text(yaml.safe_dump({"l2_adapter": [wrong]}))
    refused = CacheServer(tmp_path, l1_size_gb=L1_GB, extra=["--config", str(path)], log_name="wrong.log")
    assert refused.popen.wait(60) == 1
    assert "the secret key is not that of the access key" in refused.log()
    assert SECRET_KEY not in refused.log() and ACCESS_KEY not in refused.log()


class Clock:
    """That of a server process, which a test can put wrong."""

    def __init__(self, folder: Path) -> None:
        self._skew, library = folder / "skew", folder / "clock_skew.so"
        self.tell_wrong(0)
        source = Path(__file__).parents[1] / "support" / "clock_skew.c"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SKEW": str(self._skew)}

    def tell_wrong(self, seconds: int) -> None:
        with self._skew.open("r+b" if self._skew.exists() else "wb") as file:
            file.write(struct.pack("<q", seconds))


def test_a_wrong_clock_costs_misses_until_it_is_right(tmp_path: Path, service: list[SeaweedFS]) -> None:
    """SeaweedFS takes no request that was signed more than a quarter of an hour ago, or in future."""
    clock = Clock(tmp_path)
    extra = ["--l2-adapter", json.dumps(adapter(service[-1], prefix="skewed", timeout_seconds=5))]
    environment = {**BY_ENVIRONMENT, **clock.environment}
    clock.tell_wrong(-3600)
    with CacheServer(tmp_path, l1_size_gb=L1_GB, extra=extra, environment=environment, log_name="early.log") as early:
        assert early.popen.wait(60) == 1
        assert "the clock of this machine differs from that of" in early.log()
    clock.tell_wrong(0)
    with running(tmp_path, "skewed", *extra, environment=environment) as server, SmallEngine(server.port) as engine:
        tokens = engine.tokens(*range(300, 300 + CHUNKS))
        assert engine.store(tokens) == CHUNKS
        until(lambda: stored(server, CHUNKS))
        for seconds in (-3600, 3700):
            clock.tell_wrong(seconds)
            server.clear("l1")
            suspended = server.log().count("loads are suspended for")

            def misses_until_suspended(before: int = suspended) -> bool:
                assert engine.lookup("wrong", tokens, deadline_seconds=2.0).chunks == 0
                return server.log().count("loads are suspended for") > before

            until(misses_until_suspended, 60.0, tell=server.log)
            assert "(403): set the clock of this machine" in server.log()
            assert engine.store(engine.tokens(abs(seconds))) == 1  # in L1
            clock.tell_wrong(0)

            def hits() -> bool:
                found = engine.lookup("right", tokens)
                return bool(found.chunks == CHUNKS and engine.read(found))

            until(hits, 90.0, tell=lambda: (figures(server), server.log()[-2000:]))
            for request in ("wrong", "right"):
                engine.end(request)
        until(lambda: not server.status()["l1"]["leases"])


def test_a_service_that_is_killed_and_comes_back(tmp_path: Path, service: list[SeaweedFS]) -> None:
    """Engines see misses within the deadline, nothing leaks, and afterwards there are hits again."""
    with by_environment(tmp_path, "lonely", service[-1], timeout_seconds=3) as server:
        with SmallEngine(server.port) as engine:
            tokens = engine.tokens(*range(200, 200 + CHUNKS))
            assert engine.store(tokens) == CHUNKS
            until(lambda: stored(server, CHUNKS))
            server.clear("l1")
            service[-1].pause()  # silent in the middle of a load
            assert engine.lookup("silent", tokens, deadline_seconds=2.0).chunks == 0
            service[-1].kill()  # while it stands still, so that it ends no load before
            assert engine.lookup("gone", tokens, deadline_seconds=2.0).chunks == 0
            service.append(service[-1].restarted())
            service[-1].wait_ready()
            attempts = count()

            def hits() -> bool:
                found = engine.lookup(f"again {next(attempts)}", tokens)
                return bool(found.chunks == CHUNKS and engine.read(found))

            until(hits, 180.0, tell=lambda: (figures(server), server.log()[-2000:]))
            for number in range(next(attempts)):
                engine.end(f"again {number}")
            engine.end("silent")
            engine.end("gone")
        until(lambda: not server.status()["l1"]["leases"])
        now = figures(server)
        assert (now["loads_in_flight"], now["abandoned"], now["requests_in_flight"]) == (0, 0, 0)
