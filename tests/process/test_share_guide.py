"""The tour of docs/how-to/share_between_machines.md: its files as printed, its commands verbatim, in a network of their
own, where every port of the guide is free."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.testing.processes import LOOPBACK, ManagedProcess, http_json
from polling import until
from process.support import SmallEngine
from services import need_package, program
from services.certificates import Certificates
from services.network import Network, in_own_network, with_own_memory
from services.redis import VALKEY, Client, Redis
from services.seaweedfs import ACCESS_KEY, SECRET_KEY, SeaweedFS

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "share_between_machines.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
FILES = dict(re.findall(r"^```yaml\n# ([\w.]+)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL))
SEAWEED_PORTS = {"master": 9333, "volume": 9340, "filer": 8888, "s3": 9000}
CHUNKS = 12
RPC_PORTS, HTTP_PORTS = (5555, 5556), (8080, 8081)


class Tour:
    """A reader in an empty folder. `lmcache` and `valkey-server` are found in its `bin`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        (programs / "lmcache").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lmcache.cli.main "$@"\n')
        (programs / "lmcache").chmod(0o755)
        (programs / "valkey-server").symlink_to(program(VALKEY, "Valkey"))
        path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
        modules = ":".join(path for path in sys.path if path)
        self.environment = {
            "PATH": path,
            "PYTHONPATH": modules,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def _command(self, block: str) -> list[str]:
        return ["bash", "-euc", f"cd {shlex.quote(str(self.folder))}\n{block}"]

    def run(self, block: str) -> str:
        done = subprocess.run(
            self._command(block), env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def start(self, block: str, name: str) -> ManagedProcess:
        return ManagedProcess(self._command(block), self.folder / f"{name}.log", self.environment)

    def write_files(self) -> None:
        for name, text in FILES.items():
            for machine in ("a", "b"):
                (self.folder / machine / name).write_text(text)

    @contextmanager
    def servers(self, config: str) -> Iterator[tuple[SmallEngine, SmallEngine]]:
        """Both, by the guide's commands for that file, and an engine beside each."""
        commands = [block for block in BLOCKS if f"--config {config}" in block]
        assert len(commands) == 2
        with (
            self.start(commands[0], "a") as first,
            self.start(commands[1], "b") as second,
        ):
            for server, port in zip((first, second), HTTP_PORTS, strict=True):
                server.wait_until_ready(port, "/healthcheck", 60.0)
            with SmallEngine(RPC_PORTS[0]) as one, SmallEngine(RPC_PORTS[1]) as two:
                yield one, two
            assert first.stop() == 0 and second.stop() == 0, first.log() + second.log()


def adapters(machine: int) -> list[dict[str, Any]]:
    return http_json(HTTP_PORTS[machine], "GET", "/status")[1]["l2"]["adapters"]


def clear(machine: int, tier: str = "l1") -> None:
    assert http_json(HTTP_PORTS[machine], "POST", "/cache/clear", {"tier": tier})[0] == 200


def stored(engine: SmallEngine, first: int, salt: str = "") -> bytes:
    """A prompt that the first machine has stored in every adapter."""
    tokens = engine.tokens(*range(first, first + CHUNKS))
    before = [adapter["objects"] for adapter in adapters(0)]
    assert engine.store(tokens, salt=salt) == CHUNKS
    wanted = [objects + CHUNKS for objects in before]
    until(lambda: [adapter["objects"] for adapter in adapters(0)] == wanted, 60, tell=lambda: adapters(0))
    return tokens


def hit(engine: SmallEngine, tokens: bytes, salt: str = "") -> int:
    """Chunks, each exactly what was stored."""
    found = engine.lookup("hit", tokens, salt=salt)
    assert engine.read(found, salt=salt)
    engine.end("hit")
    return found.chunks


def two_servers_and_one_valkey(tour: Tour) -> None:
    with tour.servers("shared.yaml") as (one, two):
        tokens = stored(one, 0, salt="alice")
        assert hit(two, tokens, "alice") == CHUNKS
        assert hit(two, tokens, "bob") == 0
        (look,) = [block for block in BLOCKS if block.startswith("curl")]
        assert re.search(rf'cache_salt="alice".*}} {CHUNKS * 256}\.0', tour.run(look))
        clear(1, "all")
        clear(0)
        assert hit(one, tokens, "alice") == 0


def two_servers_and_one_bucket(tour: Tour) -> None:
    with tour.servers("s3.yaml") as (one, two):
        assert hit(two, stored(one, 100)) == CHUNKS


def a_cascade(tour: Tour) -> None:
    password = (tour.folder / "a" / "valkey.password").read_text().strip()
    with tour.servers("cascade.yaml") as (one, two):
        tokens = stored(one, 200)
        assert [adapter["type"] for adapter in adapters(1)] == ["fs_native", "resp", "s3"]
        assert hit(two, tokens) == CHUNKS
        assert [adapter["objects"] for adapter in adapters(1)][:2] == [0, CHUNKS], "from Valkey, and not copied"
        with Client((LOOPBACK, 6379), password) as valkey:
            valkey.call("FLUSHALL")
        clear(1)
        assert hit(two, tokens) == CHUNKS
        assert [adapter["objects"] for adapter in adapters(1)][:2] == [0, 0], "from S3"
        clear(0)
        assert hit(one, tokens) == CHUNKS
    with tour.servers("cascade.yaml") as (one, two):  # the folder survives, and needs no network
        clear(0)
        assert hit(one, tokens) == CHUNKS


def sealed(tour: Tour) -> None:
    certificates = Certificates(tour.folder / "certificates")
    for machine in ("a", "b"):
        shutil.copy(certificates.ca, tour.folder / machine / "ca.pem")
    password = (tour.folder / "a" / "valkey.password").read_text().strip()
    settings: list[str | int] = ["--tls-port", 6380]
    with Redis(tour.folder / "redis", certificates=certificates, password=password, settings=settings) as redis:
        redis.wait_ready()
        with tour.servers("sealed.yaml") as (one, two):
            tokens = stored(one, 300)
            assert hit(two, tokens) == CHUNKS
            name = redis.keys("lmcache/v1/*")[0]
            assert one.payload(bytes.fromhex(name[-64:]))[:64] not in redis.call("GET", name)
        (tour.folder / "b" / "master.key").write_text("5a" * 32)
        with tour.servers("sealed.yaml") as (one, two):
            assert hit(one, tokens) == CHUNKS and hit(two, tokens) == 0


def test_the_tour(tmp_path: Path) -> None:
    need_package("awscrt")

    def test(network: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        valkey, *others = [block for block in BLOCKS if "valkey-server" in block]
        assert not others
        for block in BLOCKS:
            if block.startswith(("mkdir", "umask")):
                tour.run(block)
        tour.write_files()
        with tour.start(valkey, "valkey"), SeaweedFS(tmp_path / "weed", ports=SEAWEED_PORTS) as bucket:
            bucket.wait_ready()
            bucket.make_bucket("kv-cache")
            two_servers_and_one_valkey(tour)
            two_servers_and_one_bucket(tour)
            a_cascade(tour)
        sealed(tour)

    in_own_network(test)


def test_every_block_of_the_guide_is_run() -> None:
    assert set(FILES) == {"shared.yaml", "s3.yaml", "cascade.yaml", "sealed.yaml"}
    engines = [block for block in BLOCKS if block.startswith("vllm serve")]
    servers = [block for block in BLOCKS if "lmcache server" in block]
    run = [block for block in BLOCKS if block.startswith(("mkdir", "umask", "curl", "valkey-server"))]
    assert len(engines) + len(servers) + len(run) == len(BLOCKS)
    for engine, port in zip(engines, RPC_PORTS, strict=True):
        words = shlex.split(engine)
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("LMCacheMPConnector", "kv_both")
        assert ConnectorSettings.read(transfer["kv_connector_extra_config"]).url == f"tcp://{LOOPBACK}:{port}"
