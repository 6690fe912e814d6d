"""`lmcache server` as operators meet it: every wrong start is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache.testing.processes import CacheServer, free_port, http_json
from polling import until
from process.commands import COMMAND_SECONDS, MACHINE, USAGE, lmcache, unprivileged, with_defaults


def shm(name: str) -> Path:
    return Path("/dev/shm") / name


def start_and_fail(
    *options: str, prefix: Sequence[str] = (), environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """(exit code, the sentence) of a server that must not start. Nothing may be left behind."""
    memory = f"lmcache-test-refused-{os.getpid()}"
    done = lmcache("server", *with_defaults(memory, options), environment=environment, prefix=prefix)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("lmcache: ")]
    assert len(sentences) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == sentences[0]
    assert sentences[0].endswith((".", "?"))
    assert not shm(memory).exists()
    return done.returncode, sentences[0].removeprefix("lmcache: ")


def adapter(**keys: object) -> tuple[str, str]:
    return "--l2-adapter", json.dumps({"type": "fs_native", **keys})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chunk-size", "0"], "--chunk-size must be at least 1 token, got 0."),
        (["--chunk-sise", "256"], "--chunk-sise is not an option of lmcache server; did you mean --chunk-size?"),
        (["--hash-algorithm", "md5"], "--hash-algorithm must be one of blake3, sha256_cbor, builtin, got 'md5'."),
        (["--l2-adapter", '{"type": "fs_native", base_path: "/x"}'], "--l2-adapter must be JSON"),
        (adapter(base_pth="/tmp"), "did you mean base_path?"),
        (adapter(base_path="/tmp", num_workers="many"), "num_workers"),
        (["--l2-adapter", '{"type": "p2p"}'], '"p2p" is not built yet'),
        (["--l2-adapter", '{"type": "fs_nativ", "base_path": "/x"}'], "fs_native"),
        (
            ["--l2-store-policy", "nowhere.at_all:Policy"],
            "--l2-store-policy: the module 'nowhere.at_all' cannot be imported",
        ),
        (
            ["--l2-store-policy", "skip"],
            "--l2-store-policy must be one of default, skip_l1, an entry point of lmcache.",
        ),
        (["--l2-prefetch-policy", "json:JSONEncoder"], "--l2-prefetch-policy: JSONEncoder has no usable retains"),
        (["--l1-size-gb", "much"], "--l1-size-gb must be a number of GB, got 'much'."),
        (["--admin-token-file", "/nonexistent/token"], "--admin-token-file /nonexistent/token cannot be read"),
        (["--config", "/nonexistent/server.yaml"], "--config /nonexistent/server.yaml cannot be read"),
    ],
)
def test_wrong_usage_ends_with_2(options: list[str], said: str) -> None:
    code, sentence = start_and_fail(*options)
    assert said in sentence
    assert code == USAGE


def test_the_environment_is_named_when_it_is_wrong() -> None:
    code, sentence = start_and_fail(environment={"LMCACHE_CHUNK_SIZE": "0"})
    assert (code, sentence) == (USAGE, "LMCACHE_CHUNK_SIZE must be at least 1 token, got 0.")
    code, sentence = start_and_fail(environment={"LMCACHE_LOG_LEVEL": "LOUD"})
    assert (code, "LMCACHE_LOG_LEVEL must be one of" in sentence) == (USAGE, True)


@pytest.mark.parametrize("flag", ["--port", "--http-port", "--prometheus-port"])
def test_a_busy_port_ends_with_1(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, sentence = start_and_fail(flag, str(port))
    assert code == MACHINE
    assert str(port) in sentence
    assert "in use" in sentence
    assert flag in sentence


def test_an_l1_larger_than_memory_ends_with_1() -> None:
    code, sentence = start_and_fail("--l1-size-gb", "100000")
    assert code == MACHINE
    assert "--l1-size-gb" in sentence


def test_a_folder_that_cannot_be_written_ends_with_1(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    code, sentence = start_and_fail(*adapter(base_path=str(folder / "l2")), prefix=unprivileged())
    assert code == MACHINE
    assert str(folder) in sentence
    assert "Permission denied" in sentence


def test_a_host_that_is_not_this_one_ends_with_1() -> None:
    for flag in ("--host", "--http-host"):
        code, sentence = start_and_fail(flag, "192.0.2.1")
        assert code == MACHINE
        assert "192.0.2.1" in sentence


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("server")
    with_l2 = CacheServer(folder, l1_size_gb=0.25, l2_folder=folder / "l2")
    with_l2.wait_ready()
    yield with_l2
    with_l2.stop()


def test_a_second_server_of_the_same_name_is_refused_and_the_first_one_goes_on(server: CacheServer) -> None:
    inode = shm(server.shm_name).stat().st_ino
    done = lmcache(
        *("server", "--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--shm-name", server.shm_name),
        *("--host", "127.0.0.1", "--port", "0", "--http-port", "0", "--prometheus-port", "0"),
    )
    assert done.returncode == MACHINE
    assert server.shm_name in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert shm(server.shm_name).stat().st_ino == inode
    assert http_json(server.http_port, "GET", "/healthcheck")[0] == 200


def test_commands_against_a_running_server(server: CacheServer) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    pinged = lmcache("ping", "--url", url, "--format", "json")
    assert pinged.returncode == 0
    assert json.loads(pinged.stdout)["metrics"]["status"] == "OK"
    over_rpc = lmcache("ping", "--rpc-url", f"tcp://127.0.0.1:{server.port}", "--format", "json")
    assert over_rpc.returncode == 0, over_rpc.stderr
    assert 0 < json.loads(over_rpc.stdout)["metrics"]["round_trip_ms"] < 1000 * COMMAND_SECONDS
    described = lmcache("describe", "kvcache", "--url", url)
    assert described.returncode == 0, described.stderr
    assert "fs_native" in described.stdout
    cleared = lmcache("kvcache", "clear", "--url", url, "--tier", "all", "--format", "json")
    assert cleared.returncode == 0, cleared.stderr
    assert json.loads(cleared.stdout)["metrics"]["status"] == "OK"


def test_resources_of_a_running_server(server: CacheServer) -> None:
    for path in ("/healthcheck", "/readyz", "/status", "/version", "/config", "/config/adapters", "/loglevel"):
        status, body = http_json(server.http_port, "GET", path)
        assert status == 200, path
        assert isinstance(body, (dict, list)), path
    assert server.metric("lmcache_mp_l1_usage_ratio") >= 0
    status, config = http_json(server.http_port, "GET", "/config")
    assert config["port"] == server.port
    assert http_json(server.http_port, "GET", "/cache/pins") == (200, {"pins": [], "objects": 0})
    assert http_json(server.http_port, "GET", "/instances")[0] == 501


def test_quotas_of_a_running_server(server: CacheServer) -> None:
    url = ("--url", f"http://127.0.0.1:{server.http_port}", "--format", "json")
    done = lmcache("quota", "set", "tenant/1 ", "0.5", *url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"] == {
        "cache_salt": "tenant/1 ",
        "limit_gb": 0.5,
        "current_usage_gb": 0.0,
        "exists": True,
        "enforced": False,
    }
    assert lmcache("quota", "set", "_default", "1", *url).returncode == 0
    listed = json.loads(lmcache("quota", "list", *url).stdout)["metrics"]["quotas"]
    assert [(quota["cache_salt"], quota["limit_gb"]) for quota in listed] == [("_default", 1.0), ("tenant/1 ", 0.5)]
    assert json.loads(lmcache("quota", "delete", "tenant/1 ", *url).stdout)["metrics"]["exists"] is False
    assert json.loads(lmcache("quota", "get", "tenant/1 ", *url).stdout)["metrics"]["limit_gb"] == 0
    refused = lmcache("quota", "set", "tenant", "-1", *url)
    assert refused.returncode != 0 and "Traceback" not in refused.stderr


def test_health_tells_when_the_process_is_stopped_and_comes_back(server: CacheServer) -> None:
    server.pause()
    try:
        done = lmcache("ping", "--url", f"http://127.0.0.1:{server.http_port}", "--timeout", "0.5")
        assert done.returncode == MACHINE
        assert "did not answer" in done.stderr
    finally:
        server.resume()
    assert lmcache("ping", "--url", f"http://127.0.0.1:{server.http_port}").returncode == 0


def test_bench_server_runs_in_small_and_reads_back_what_it_stored(server: CacheServer) -> None:
    done = lmcache(
        *("bench", "server", "--rpc-url", f"tcp://127.0.0.1:{server.port}", "--chunks", "4", "--chunk-mib", "0.25"),
        *("--lookup-chunks", "20", "--rounds", "3", "--clients", "2", "--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["metrics"]
    assert figures["same_bytes"] == "identical"
    assert 0 < figures["lookup_hit_ms"] < 1000 * COMMAND_SECONDS
    assert figures["store_share_of_limit"] > 0
    assert figures["lookups_per_second"] > 0
    assert server.metric("lmcache_mp_l1_memory_usage_bytes") > 0  # as of this scrape
    assert server.metric("lmcache_mp_lookup_hit_tokens_total") >= 3 * 20 * 256
    assert server.metric("lmcache_mp_calls_total") > 0
    until(lambda: server.status()["instances"] == [])
    assert server.status()["leases"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_is_asked_for_ends_with_0_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    server = CacheServer(tmp_path, l1_size_gb=0.1)
    try:
        server.wait_ready()
        assert shm(server.shm_name).exists()
        server.popen.send_signal(number)
        assert server.popen.wait(timeout=COMMAND_SECONDS) == 0
        assert not shm(server.shm_name).exists()
        assert "Traceback" not in server.log()
    finally:
        server.stop()


def test_the_alias_and_the_file_start_the_same_server(tmp_path: Path) -> None:
    http_port = free_port()
    file = tmp_path / "server.yaml"
    file.write_text(
        "l1-size-gb: 0.1\neviction-policy: LRU\nhost: 127.0.0.1\nport: 0\nhttp-host: 127.0.0.1\nprometheus-port: 0\n"
        f"lookup-hash-log-dir: {tmp_path / 'lookups'}\n"
    )
    alias = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--config", str(file), "--http-port", str(http_port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert alias.stdout is not None
        assert "ready" in alias.stdout.readline().lower()
        status, config = http_json(http_port, "GET", "/config")
        assert (status, config["l1_size_gb"]) == (200, 0.1)
        assert len(list((tmp_path / "lookups").iterdir())) == 1
    finally:
        alias.terminate()
        _, err = alias.communicate(timeout=COMMAND_SECONDS)
    assert alias.returncode == 0
    assert "Traceback" not in err


def test_the_log_can_be_json(tmp_path: Path) -> None:
    options = ("--log-format", "json", "--max-gpu-workers", "2")
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=options) as server:
        server.wait_ready()
        assert server.stop() == 0
    lines = [line for line in server.log().splitlines() if "is ready" not in line]  # which is printed, not logged
    records = [json.loads(line) for line in lines]
    assert {"time", "level", "logger", "thread", "message"} <= set.intersection(*map(set, records))
    assert any("--max-gpu-workers has no effect" in record["message"] for record in records)


def test_lookups_are_written_to_the_log(tmp_path: Path) -> None:
    server = CacheServer(tmp_path, l1_size_gb=0.25, extra=["--lookup-hash-log-dir", str(tmp_path / "lookups")])
    try:
        server.wait_ready()
        done = lmcache(
            *("bench", "server", "--rpc-url", f"tcp://127.0.0.1:{server.port}", "--chunks", "2", "--chunk-mib", "0.1"),
            *("--lookup-chunks", "3", "--rounds", "1", "--clients", "0", "--quiet"),
        )
        assert (done.returncode, done.stdout) == (0, "")
    finally:
        assert server.stop() == 0
    (log,) = (tmp_path / "lookups").iterdir()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert {len(record["chunk_hashes"]) for record in records} == {2, 3}
    assert all(record["seq_len"] == 256 * len(record["chunk_hashes"]) for record in records)


@pytest.mark.parametrize("switch", ["--disable-logging", "--disable-observability"])
def test_a_log_level_that_is_asked_for_stands(tmp_path: Path, switch: str) -> None:
    said = {}
    for level in ("", "INFO", "DEBUG"):
        server = CacheServer(
            tmp_path,
            l1_size_gb=0.1,
            extra=[switch],
            environment={"LMCACHE_LOG_LEVEL": level},
            log_name=f"{level}.log",
        )
        try:
            server.wait_ready()
            said[level] = http_json(server.http_port, "GET", "/loglevel")[1]["level"]
        finally:
            assert server.stop() == 0
        assert ("LMCache INFO: Draining" in server.log()) == bool(level)
    assert said == {"": "WARNING", "INFO": "INFO", "DEBUG": "DEBUG"}
