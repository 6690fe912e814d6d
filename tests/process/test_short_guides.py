"""Guides that start a server or measure an engine: their commands as printed, but for sizes, rates and folders, in a
network of their own, where the default ports are free."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache.integration.vllm.settings import ConnectorSettings
from polling import until
from process.support import SmallEngine
from process.test_share_guide import Tour
from services.network import Network, in_own_network, with_own_memory
from support.openai_server import openai_server

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
SMALL_SERVER = "lmcache server --l1-size-gb 0.05 --eviction-policy LRU"
SMALL_PROMPTS = "lmcache bench engine --prompt-tokens 64 --question-tokens 8 --output-tokens 4"
RPC_PORT, HTTP_PORT = 5555, 8080
START_SECONDS = 60.0


def blocks(page: str, **fitted: str) -> list[str]:
    """What a page has indented, with other folders, sizes and rates for those that it names."""
    text = (HOW_TO / page).read_text()
    found = [textwrap.dedent(block) for block in re.findall(r"(?<=\n\n)(?: {4}\S.*\n)+", text)]
    for old, new in fitted.items():
        assert any(old in block for block in found), old
        found = [block.replace(old, new) for block in found]
    return found


def hits(engine: SmallEngine, salt: str = "", first: int = 0) -> bool:
    """Stores three chunks and has them back."""
    tokens = engine.tokens(*range(first, first + 3))
    assert engine.store(tokens, salt=salt) == 3
    reply = engine.lookup("again", tokens, salt=salt)
    found = reply.chunks == 3 and engine.read(reply, salt=salt)
    engine.end("again")
    return found


@contextmanager
def serving(tour: Tour, server_line: str) -> Iterator[None]:
    """Beside the server of a guide, which is ready, and ends in order."""
    with tour.start(server_line, "server") as server:
        server.wait_until_ready(HTTP_PORT, "/healthcheck", START_SECONDS)
        yield
        assert server.stop() == 0, server.log()


def test_engines_are_let_in_by_key(tmp_path: Path) -> None:
    folders = {"/tmp": f"{tmp_path}/keys", "/etc/lmcache": f"{tmp_path}/etc", "lmcache server ...": SMALL_SERVER}
    commands, connector = blocks("let_in_engines_by_key.md", **folders)
    *preparing, server_line = commands.splitlines()
    (tmp_path / "etc").mkdir()
    (tmp_path / "keys").mkdir()

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        tour.run("\n".join(preparing))
        with serving(tour, server_line):
            given = json.loads(
                f"{{{connector}}}".replace(f"{tmp_path}/etc/engine-1.key", f"{tmp_path}/keys/engine-1.key")
            )
            settings = ConnectorSettings.read({"lmcache.mp.port": RPC_PORT, **given})
            with SmallEngine(RPC_PORT, curve=settings.curve) as engine:
                assert hits(engine)
            names = ("server", "client")
            files = " ".join(f"--curve-{name}-key-file {given[f'lmcache.mp.curve_{name}_key_file']}" for name in names)
            tour.run(f"lmcache ping --rpc-url tcp://localhost:{RPC_PORT} {files}")

    in_own_network(test)


def test_tenants_share_a_server(tmp_path: Path) -> None:
    fitted = {"--l1-size-gb 60": "--l1-size-gb 0.05", "/etc/lmcache": str(tmp_path)}
    commands, _ = blocks("share_among_tenants.md", **fitted)
    server_line, *quotas = commands.splitlines()

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        with serving(tour, server_line), SmallEngine(RPC_PORT) as engine:
            shown = [tour.run(line) for line in quotas][-1]
            assert re.search(r"alice:.* of 20\.", shown) and re.search(r"_default:.* of 10\.", shown), shown
            assert hits(engine, "alice") and hits(engine)
        assert json.loads((tmp_path / "quotas.json").read_text()) == {"alice": 20, "_default": 10}

    in_own_network(test)


def test_a_tier_is_sized_from_logged_lookups(tmp_path: Path) -> None:
    fitted = {"lmcache server ...": SMALL_SERVER, "/var/log/lmcache": str(tmp_path)}
    (commands,) = blocks("size_with_the_cache_simulator.md", **fitted)
    server_line, simulator = commands.splitlines()

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        with serving(tour, server_line), SmallEngine(RPC_PORT) as engine:
            assert all(hits(engine, first=first) for first in (0, 10, 20))
            logged = Path(re.findall(r"--lookup-hash-log-dir (\S+)", server_line)[0])
            until(lambda: sum(path.read_text().count("\n") for path in logged.iterdir()) >= 3)  # it is a thread's work
        assert "LRU" in tour.run(f"{simulator} --chunk-mb 2")  # a small engine does not say of what shape its KV is
        assert (tmp_path / "sizes.svg").read_text().startswith("<svg")

    in_own_network(test)


def test_an_engine_is_measured_with_and_without(tmp_path: Path) -> None:
    with openai_server() as plain, openai_server() as cached:
        fitted = {
            "http://plain:8000": plain.url,
            "http://cached:8000": cached.url,
            "bench engine --workload": f"bench engine --url {cached.url} --workload",
            "--rate 4": "--rate 100 --requests 20",
            "--requests 100": "--requests 30",
            "lmcache bench engine --url": f"{SMALL_PROMPTS} --url",
        }
        first, compared = blocks("measure_an_engine.md", **fitted)
        tour = Tour(tmp_path)
        assert "30" in tour.run(first) and len(cached.bodies) == 31
        shown = tour.run(compared)
    assert len(plain.bodies) == 21 and len(cached.bodies) == 52
    assert json.loads((tmp_path / "with.json").read_text()) != json.loads((tmp_path / "without.json").read_text())
    assert "time to first token" in shown.lower()
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 2
