"""Every command line of LMCache's documents, as docs/reference/documented-commands.md tells what comes of it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache.errors import LMCacheError, ResourceError
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters.nixl_agent import refuse_missing_plugin
from lmcache.startup import plan, read
from lmcache.testing.processes import LOOPBACK, free_port, http_json
from polling import until
from process.nursery import Nursery
from process.support import SmallEngine
from services import need_package, nixl
from services.azurite import Azurite
from services.mooncake import Master
from services.network import Network, in_own_network, with_files
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, Credentials, SeaweedFS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "documented-commands.md"
PLAIN = "lmcache server --l1-size-gb 100 --eviction-policy LRU"
MODULE = "python3 -m lmcache.v1.multiprocess.server"
ELSEWHERE = "127.0.0.2"
DEADLINE_SECONDS = 60.0
DEVICE_BYTES = 320 << 20  # the table of a raw device has 256 MiB
CONTAINER = "cache"

_ROW = re.compile(r"\| (?P<documents>[NSFC ]+) \| `(?P<command>[^`]+)` \| (?P<comes>[^|]+) \|")


@dataclass(frozen=True)
class Row:
    documents: str
    command: str
    comes: str  # of it


ROWS = [
    Row(*(part.strip() for part in match.groups()))
    for match in map(_ROW.fullmatch, PAGE.read_text().splitlines())
    if match
]
SERVERS = [row for row in ROWS if row.comes.startswith("runs")]
RUNS = [row for row in SERVERS if row.comes == "runs"]
REFUSED = [row for row in ROWS if row.comes.startswith("says ")]
KEYS_ONLY = [row for row in ROWS if row.comes == "takes the keys"]


def name_of(row: Row) -> str:
    types = re.findall(r'"type": "(\w+)"', row.command)
    backends = re.findall(r'"backend": "(\w+)"', row.command)
    return f"{ROWS.index(row)}-{'-'.join([*types, *backends])}"


def fitted(command: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of `lmcache` for a command line, with the paths and sizes of this machine. Its devices
    are made."""
    if command.startswith("--"):
        given = re.findall(r"--[a-z0-9-]+", command)
        parts = shlex.split(PLAIN)
        if "--eviction-policy" in given:
            parts = parts[: parts.index("--eviction-policy")]
        if "--l1-size-gb" in given:
            del parts[parts.index("--l1-size-gb") : parts.index("--l1-size-gb") + 2]
        command = f"{shlex.join(parts)} {command}"
    device = folder / "device"
    for old, new in {
        MODULE: "lmcache server",
        "/data/": f"{folder}/data/",
        "/mnt/": f"{folder}/mnt/",
        "/dev/nvme0n1": str(device),
        "/dev/dax1.0": str(device),
        '"max_dax_size_gb": 100, "slot_bytes": 268435456': '"max_dax_size_gb": 0.1, "slot_bytes": 1048576',
        "<account_name>": "devstoreaccount1",
        "<container_name>": CONTAINER,
        '"3221225472"': '"67108864"',
    }.items():
        command = command.replace(old, new)
    for flag, size in (("--l1-size-gb", "0.05"), ("--l1-init-size-gb", "0.01")):
        command = re.sub(rf"{flag} \d+", f"{flag} {size}", command)
    words = shlex.split(command)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words.pop(0) == "lmcache"
    if str(device) in command:
        with device.open("wb") as file:
            file.truncate(DEVICE_BYTES)
    return environment, words


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def with_server(
    nursery: Nursery,
    row: Row,
    folder: Path,
    environment: Mapping[str, str],
    watch: Callable[[Sequence[str]], None] = lambda words: None,
) -> str:
    """Starts it with all that the line says, stores and finds every byte again, and stops it: its log. `watch` is given
    the words before it ends."""
    own, words = fitted(row.command, folder)
    places = {"--host": LOOPBACK, "--port": str(free_port()), "--http-host": LOOPBACK, "--http-port": str(free_port())}
    places["--prometheus-port"] = str(free_port())
    words += [word for flag, value in places.items() if flag not in words for word in (flag, value)]
    port, http_port = int(value_of("--port", words)), int(value_of("--http-port", words))
    host = LOOPBACK if value_of("--host", words) == LOOPBACK else ELSEWHERE
    words += ["--shm-name", f"lmcache-test-{os.getpid()}-{port}"]
    log = folder / "server.log"
    pid = nursery.start(words, log, {**environment, **own})
    try:
        until(lambda: "is ready" in log.read_text() if log.exists() else False, DEADLINE_SECONDS, tell=log.read_text)
        with SmallEngine(f"tcp://{host}:{port}") as engine:
            tokens = engine.tokens(1, 2, 3)
            assert engine.store(tokens) == 3
            if "--l2-adapter" in words:
                until(
                    lambda: http_json(http_port, "GET", "/status")[1]["l2"]["adapters"][0]["objects"] == 3,
                    DEADLINE_SECONDS,
                )
                assert http_json(http_port, "POST", "/cache/clear", {"tier": "l1"})[0] == 200
            reply = engine.lookup("again", tokens)
            assert reply.chunks == 3 and engine.read(reply)
            engine.end("again")
        watch(words)
    finally:
        os.kill(pid, signal.SIGTERM)
        code = nursery.wait(pid)
    assert code == 0, log.read_text()
    return log.read_text()


def value_of(flag: str, words: Sequence[str]) -> str:
    return words[words.index(flag) + 1]


def test_the_table_has_every_kind_of_row() -> None:
    assert len(ROWS) == len({row.command for row in ROWS}) >= 30
    assert len(SERVERS) + len(REFUSED) + len(KEYS_ONLY) + 1 == len(ROWS)  # the engine's own is tested in tests/e2e
    assert all(set(row.documents.split()) <= set("NSFC") for row in ROWS)


@pytest.mark.parametrize("row", [row for row in RUNS if "--host" not in row.command], ids=name_of)
def test_it_runs(nursery: Nursery, row: Row, tmp_path: Path) -> None:
    if '"nixl' in row.command:
        nixl.need()
    log = with_server(nursery, row, tmp_path, {})
    if row.command.startswith("LMCACHE_LOG_LEVEL=DEBUG"):
        for line in ("Submitted store task ", "L2 store task ", "Prefetch request submitted: "):
            assert f"LMCache DEBUG: {line}" in log
    if '"persist_enabled": false' in row.command:
        assert not list((tmp_path / "data").rglob("*.data"))


@pytest.mark.parametrize("row", [row for row in RUNS if "--host" in row.command], ids=name_of)
def test_it_runs_on_all_addresses_with_all_that_it_says(row: Row, tmp_path: Path) -> None:
    """In a network where its ports are free, with a receiver of traces where it names one."""
    if '"nixl' in row.command:
        nixl.need()

    def watched(words: Sequence[str]) -> None:
        if "--prometheus-port" in row.command:
            status, text = http_json(int(value_of("--prometheus-port", words)), "GET", "/metrics")
            assert status == 200 and "lmcache_mp_lookups_total" in str(text)
        if "--lookup-hash-log-dir" in row.command:
            folder = Path(value_of("--lookup-hash-log-dir", words))
            until(lambda: '"again"' in "".join(path.read_text() for path in folder.iterdir()), DEADLINE_SECONDS)

    def test(_: Network) -> None:
        nursery = Nursery()
        try:
            if "--otlp-endpoint" not in row.command:
                with_server(nursery, row, tmp_path, {}, watched)
                return
            from support.otlp_receiver import a_receiver

            with a_receiver(4317) as receiver:

                def sent(words: Sequence[str]) -> None:
                    watched(words)
                    until(lambda: receiver.named("request"), DEADLINE_SECONDS)
                    until(lambda: "lmcache_mp.lookup_requested" in receiver.metrics, DEADLINE_SECONDS)

                with_server(nursery, row, tmp_path, {"OTEL_METRIC_EXPORT_INTERVAL": "300"}, sent)
        finally:
            nursery.close()

    if "--otlp-endpoint" in row.command:
        need_package("opentelemetry")
    in_own_network(test)


def test_the_object_store_line_runs_with_seaweedfs(nursery: Nursery, tmp_path: Path) -> None:
    nixl.need()
    (row,) = [row for row in SERVERS if row.comes == "runs with SeaweedFS"]
    with SeaweedFS(tmp_path / "seaweedfs") as server:
        server.wait_ready()
        server.make_bucket(CONTAINER)
        environment = {
            "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{server.port}",
            "AWS_DEFAULT_BUCKET": CONTAINER,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }
        log = with_server(nursery, row, tmp_path, environment)
    assert SECRET_KEY not in log


def test_the_azure_line_runs_with_azurite(nursery: Nursery, tmp_path: Path) -> None:
    nixl.need()
    (row,) = [row for row in SERVERS if row.comes == "runs with Azurite"]
    with Azurite(tmp_path / "azurite") as server:
        server.wait_ready()
        server.make_container(CONTAINER)
        with_server(nursery, row, tmp_path, {"AZURE_STORAGE_CONNECTION_STRING": server.connection_string})


def in_a_network_where_names_are_local(names: str, folder: Path, test: Callable[[Nursery], None]) -> None:
    """In which every port is free, and these names mean this machine. It has an address of a local network, too."""

    def with_nursery() -> None:
        for command in (
            "link add lan type veth peer name other",
            "address add 192.168.77.1/24 dev lan",
            "link set lan up",
            "link set other up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        nursery = Nursery()
        try:
            test(nursery)
        finally:
            nursery.close()

    (folder / "hosts").write_text(f"127.0.0.1 localhost {names}\n")
    in_own_network(lambda _: with_files({"/etc/hosts": folder / "hosts"}, with_nursery))


def test_the_line_for_minio_runs_with_seaweedfs(tmp_path: Path) -> None:
    need_package("awscrt")
    (row,) = [row for row in SERVERS if row.comes == "runs with SeaweedFS as minio.local"]

    def test(nursery: Nursery) -> None:
        ports = {"master": 9333, "volume": 9340, "filer": 8888, "s3": 9000}
        with SeaweedFS(tmp_path / "seaweedfs", ports=ports, credentials=Credentials("minio", "minio123")) as server:
            server.wait_ready()
            server.make_bucket("lmcache")
            log = with_server(nursery, row, tmp_path, {})
            assert len(server.names("lmcache")) == 3
        assert "minio123" not in log

    in_a_network_where_names_are_local("minio.local", tmp_path, test)


def test_the_line_for_mooncake_runs_with_a_master_and_its_metadata_server(tmp_path: Path) -> None:
    (row,) = [row for row in SERVERS if row.comes == "runs with Mooncake"]

    def test(nursery: Nursery) -> None:
        with Master(tmp_path, 50051, metadata_port=8080) as master:
            master.wait_ready()
            with_server(nursery, row, tmp_path, {})

    in_a_network_where_names_are_local("node01", tmp_path, test)


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_it_says_why_not(row: Row, tmp_path: Path) -> None:
    backends = re.findall(r'"backend": "(GDS|GDS_MT|HF3FS)"', row.command)
    if backends:
        nixl.need()
        try:
            refuse_missing_plugin("", backends[-1])
        except ResourceError:
            pass
        else:
            pytest.skip(f"this machine can use {backends[-1]}")
    _, words = fitted(row.command, tmp_path)
    with pytest.raises(LMCacheError) as caught:
        plan(words[1:], {})
    assert row.comes.removeprefix("says ") in str(caught.value)


@pytest.mark.parametrize("row", KEYS_ONLY, ids=name_of)
def test_its_keys_are_taken(row: Row, tmp_path: Path) -> None:
    _, words = fitted(row.command, tmp_path)
    _, configs = read(words[1:], {})
    assert [parse_adapter(config.as_json(), 0).type for config in configs] == ["s3"]
