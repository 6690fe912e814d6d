"""Lines of the README, the guides and the reference of commands, as printed but for sizes and folders: servers that
keep KV, and what is asked of a running one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmcache.testing.processes import free_port
from polling import until
from process.nursery import Nursery
from process.support import SmallEngine
from process.test_documented_commands import Row, with_server
from process.test_share_guide import Tour
from process.test_short_guides import HTTP_PORT, RPC_PORT, SMALL_SERVER, START_SECONDS, hits, serving
from services import nixl, program
from services.certificates import Certificates
from services.network import Network, in_own_network, with_own_memory
from services.redis import VALKEY, Valkey
from support.openai_server import openai_server
from unit.docs.test_command_lines import ROOT, lines_of

HOW_TO = ROOT / "docs" / "how-to"
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
COORDINATOR_PORT = 9300
# They ask a server and end. Beside them: `top` without --once never ends, zsh's line needs zsh, and there is neither an
# engine nor a tokenizer here.
ASKING = ("describe", "top --once", "query --tokens", "doctor", "completion bash", "completion fish")


def lines(page: Path, *beginnings: str) -> list[str]:
    """What is to be typed."""
    begun = tuple(f"lmcache {words}" for words in beginnings)
    return [line.text for line in lines_of(page) if line.whole and line.text.startswith(begun)]


KEEPING = [
    *lines(ROOT / "README.md", "server"),
    *lines(HOW_TO / "store_with_nixl.md", 'server --l1-size-gb 20 --eviction-policy LRU --l2-adapter \'{"type": "nixl'),
    *lines(HOW_TO / "connect_tensorrt_llm.md", "server"),
    *lines(HOW_TO / "route_by_kv.md", "server"),
    *lines(HOW_TO / "publish_kv_events.md", "server"),
    *lines(COMMANDS, "server --l1-size-gb"),
]
IN_FOLDERS = [line for line in KEEPING if '"OBJ"' not in line]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.mark.parametrize("line", IN_FOLDERS, ids=map(str, range(len(IN_FOLDERS))))
def test_a_server_keeps_kv(nursery: Nursery, line: str, tmp_path: Path) -> None:
    if '"nixl' in line:
        nixl.need()
    with_server(nursery, Row("", line, "runs"), tmp_path, {})


def test_a_server_keeps_kv_in_redis(tmp_path: Path) -> None:
    (line,) = lines(HOW_TO / "keep_kv_in_redis.md", "server")
    program(VALKEY, "Valkey")

    def test(_: Network) -> None:
        nursery = Nursery()
        try:
            with Valkey(tmp_path / "valkey", port=6379) as service:
                service.wait_ready()
                with_server(nursery, Row("", line, "runs"), tmp_path, {})
        finally:
            nursery.close()

    in_own_network(test)


def test_a_server_at_a_path_is_reached_by_ping(tmp_path: Path) -> None:
    server_line, ping = (
        line.replace("/run/lmcache", str(tmp_path)).replace("--l1-size-gb 20", "--l1-size-gb 0.05")
        for line in lines(HOW_TO / "connect_vllm.md", "server --host ipc:", "ping --rpc-url ipc:")
    )
    tour, port = Tour(tmp_path), free_port()
    ports = f"--http-host 127.0.0.1 --http-port {port} --prometheus-port {free_port()}"
    with tour.start(f"exec {server_line} {ports}", "server") as server:
        server.wait_until_ready(port, "/healthcheck", 60.0)
        assert "ok" in tour.run(ping).lower()
        assert server.stop() == 0, server.log()


def test_scripts_run_beside_the_server(tmp_path: Path) -> None:
    (line,) = lines(HOW_TO / "run_plugins_beside_the_server.md", "server")
    plugins, told = tmp_path / "plugins", tmp_path / "told"
    plugins.mkdir()
    (plugins / "tell.sh").write_text(f'printf %s "$LMCACHE_RUNTIME_PLUGIN_EXTRA_CONFIG" > {shlex.quote(str(told))}\n')
    line = line.replace("lmcache server ...", SMALL_SERVER).replace("/etc/lmcache/plugins", str(plugins))

    def test(_: Network) -> None:
        with_own_memory()
        with serving(Tour(tmp_path), line):
            until(lambda: told.exists() and told.read_text())
        assert json.loads(told.read_text()) == {"heartbeat_url": "http://10.0.0.1/beat"}

    in_own_network(test)


def test_what_is_asked_of_a_server(tmp_path: Path) -> None:
    pages = (ROOT / "README.md", COMMANDS, HOW_TO / "administer_a_server.md")
    of_all = (line.replace('"$SERVER"', "http://localhost:8080") for page in pages for line in lines(page, *ASKING))
    asked = [line for line in dict.fromkeys(of_all) if "describe engine" not in line]
    assert len(asked) >= 9
    (tmp_path / "prompt.json").write_text(json.dumps([1] * 300))
    (tmp_path / "server.yaml").write_text("l1_size_gb: 0.05\neviction_policy: LRU\n")
    for folder in (".local/share/bash-completion/completions", ".config/fish/completions", "lmcache"):
        (tmp_path / folder).mkdir(parents=True)

    def fitted(line: str) -> str:
        """An engine's packages are not looked for, and what a machine lacks is no fault of the line."""
        if line.startswith("lmcache doctor"):
            command = line.partition(" #")[0].replace("/data/lmcache", str(tmp_path / "lmcache"))
            return f"{command} --skip-import || test $? = 1"
        return line

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        tour.environment["HOME"] = str(tmp_path)
        with serving(tour, SMALL_SERVER), SmallEngine(RPC_PORT) as engine, ThreadPoolExecutor(4) as beside:
            assert hits(engine)
            printed = list(beside.map(tour.run, map(fitted, asked)))
        for line, text in zip(asked, printed, strict=True):
            assert text or "completion" in line, line
        assert len(list(tmp_path.rglob("completions/*"))) == 2

    in_own_network(test)


def test_a_server_reads_its_options_from_a_file(nursery: Nursery, tmp_path: Path) -> None:
    (line,) = lines(COMMANDS, "server --config")
    (tmp_path / "server.yaml").write_text("l1_size_gb: 0.05\neviction_policy: LRU\n")
    with_server(nursery, Row("", line.replace("server.yaml", f"{tmp_path}/server.yaml"), "runs"), tmp_path, {})


def test_a_coordinator_starts(tmp_path: Path) -> None:
    starts = lines(COMMANDS, "coordinator")
    (tmp_path / "token").write_text("a token of sixteen characters and more\n")
    (tmp_path / "token").chmod(0o600)

    def test(_: Network) -> None:
        tour = Tour(tmp_path)
        for number, line in enumerate(starts):
            fitted = line.replace("/etc/lmcache", str(tmp_path)).replace("/var/lib/lmcache", str(tmp_path))
            with tour.start(f"exec {fitted}", f"coordinator-{number}") as coordinator:
                coordinator.wait_until_ready(COORDINATOR_PORT, "/healthz", START_SECONDS)
                assert coordinator.stop() == 0, coordinator.log()

    assert len(starts) == 2
    in_own_network(test)


def test_an_engine_is_measured_by_other_workloads(tmp_path: Path) -> None:
    """Beside long-doc-qa, which the guide to measuring has. A trace of lookups is not at hand."""
    asked = [line for line in lines(COMMANDS, "bench engine --workload") if "--trace " not in line]
    tour = Tour(tmp_path)
    with openai_server() as engine:
        for line in asked:
            if "long-doc-qa" not in line:
                before = len(engine.bodies)
                command = line.replace("bench engine", f"bench engine --url {engine.url}").replace(
                    "--rate 2", "--rate 100"
                )
                assert "time to first token" in tour.run(f"{command} --prompt-tokens 64 --requests 20").lower()
                assert len(engine.bodies) >= before + 20
    assert len(asked) == 3


def test_a_server_with_a_token_and_a_certificate_is_asked(tmp_path: Path) -> None:
    page = HOW_TO / "administer_a_server.md"
    (secret,) = re.findall(r"^    (umask .*\n    openssl .*\n)", page.read_text(), re.MULTILINE)
    (server_line,) = [line for line in lines(page, "server") if "--http-tls-cert" in line]
    certificates = Certificates(tmp_path / "certificates", "localhost")
    shutil.copy(certificates.server_cert, tmp_path / "server.pem")
    shutil.copy(certificates.server_key, tmp_path / "server.key")

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        tour.run(secret)
        tour.environment["SSL_CERT_FILE"] = str(certificates.ca)
        with tour.start(f"exec {server_line.replace('--l1-size-gb 60', '--l1-size-gb 0.05')}", "server") as server:
            until(lambda: "is ready" in server.log(), START_SECONDS, tell=server.log)
            assert "L1" in tour.run(f"lmcache describe --url https://localhost:{HTTP_PORT}")
            assert server.stop() == 0, server.log()

    in_own_network(test)
