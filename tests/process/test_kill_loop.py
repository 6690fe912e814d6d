"""Random load on a real server that is killed at random moments, round after round: whatever claims to be there
afterwards has exactly the bytes that were stored for it.

For each thing that keeps objects: TEST_KILL_ROUNDS rounds (15; 200 in `make nightly`), from TEST_SEED.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.limits import GIB, MIB
from lmcache.testing.processes import LOOPBACK, free_port, http_json
from polling import until
from process.nursery import Nursery
from process.support import SmallEngine
from seeds import SEED
from services import nixl

ROUNDS = int(os.environ.get("TEST_KILL_ROUNDS", "15"))
ENGINES = 2
LONGEST_LOAD_SECONDS = 0.15
PREFIX_CHUNKS = 64
MAX_PREFIXES = 6  # what every keeper has room for without eviction
PREFIX_PAYLOAD_BYTES = 252 * 1024
LONGEST_PREFIX_SECONDS = 0.03  # to write it, about
DEADLINE_SECONDS = 60.0


def l2(spec: dict[str, Any]) -> list[str]:
    return ["--l2-adapter", json.dumps(spec)]


def device(folder: Path, size_bytes: int) -> dict[str, Any]:
    """A file of that size, sparse at first."""
    path = folder / "device"
    with path.open("ab") as file:
        file.truncate(size_bytes)
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2}
    return {"device_path": str(path), "slot_bytes": 512 * 1024, "eviction": eviction}


def nixl_files(folder: Path) -> dict[str, Any]:
    return {"backend": "POSIX", "backend_params": {"file_path": str(folder), "use_direct_io": "false"}}


@dataclass(frozen=True)
class Keeper:
    """What keeps objects over a kill. `flags` gets a folder of its own. `keeps_all`: nothing that was acknowledged is
    ever missing, because nothing is evicted."""

    name: str
    flags: Callable[[Path], list[str]]
    l1_bytes: int = 4 * MIB
    keeps_all: bool = False


KEEPERS = (
    Keeper("l1", lambda folder: ["--l1-persist"], l1_bytes=64 * MIB, keeps_all=True),
    Keeper("l1_full", lambda folder: ["--l1-persist"]),
    Keeper("fs", lambda folder: l2({"type": "fs", "base_path": str(folder)})),
    Keeper("fs_native", lambda folder: l2({"type": "fs_native", "base_path": str(folder)})),
    Keeper("dax", lambda folder: l2({"type": "dax", "max_dax_size_gb": 0.25, **device(folder, 256 * MIB)})),
    Keeper("raw_block", lambda folder: l2({"type": "raw_block", "meta_total_bytes": MIB, **device(folder, GIB)})),
    Keeper(
        "raw_block_uring",
        lambda folder: l2(
            {"type": "raw_block", "meta_total_bytes": MIB, "io_engine": "io_uring", **device(folder, GIB)},
        ),
    ),
    Keeper("nixl_store", lambda folder: l2({"type": "nixl_store", "pool_size": 400, **nixl_files(folder)})),
    Keeper("nixl_store_dynamic", lambda folder: l2({"type": "nixl_store_dynamic", **nixl_files(folder)})),
)


class Server:
    """One process after the other, under one name, on the same ports."""

    def __init__(self, nursery: Nursery, folder: Path, port: int) -> None:
        self._nursery = nursery
        self.folder = folder
        self.port = port
        self.http_port = free_port()
        self.file = Path(f"/dev/shm/lmcache-test-{os.getpid()}-{port}-kill")
        self.log = folder / "server.log"
        self._pid: int | None = None

    def start(self, keeper: Keeper) -> None:
        (self.folder / "kept").mkdir(exist_ok=True)
        argv = [
            *("server", "--host", LOOPBACK, "--port", str(self.port), "--chunk-size", "16", "--disable-metrics"),
            *("--http-host", LOOPBACK, "--http-port", str(self.http_port), "--shm-name", self.file.name),
            *("--l1-size-gb", str(keeper.l1_bytes / GIB), "--eviction-policy", "LRU"),
            *keeper.flags(self.folder / "kept"),
        ]
        self._pid = self._nursery.start(argv, self.log)

    def kill(self) -> None:
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        assert self._nursery.wait(self._pid) == -signal.SIGKILL, self.log.read_text()
        self._pid = None

    def stop(self) -> int:
        assert self._pid is not None
        os.kill(self._pid, signal.SIGTERM)
        pid, self._pid = self._pid, None
        return self._nursery.wait(pid)

    def status(self) -> dict[str, Any]:
        status, body = http_json(self.http_port, "GET", "/status")
        assert status == 200
        return dict(body)

    def close(self) -> None:
        if self._pid is not None:
            self.kill()
        self.file.unlink(missing_ok=True)


class Engine:
    def __init__(self, port: int, number: int) -> None:
        paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).parent / "kill_engine.py"),
                str(port),
                f"kill-{number}",
                str(SEED + number),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def order(self, do: str, **options: str) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **options}), file=self._process.stdin, flush=True)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self) -> Any:
        return json.loads(self.line())

    def ask(self, do: str, **options: str) -> Any:
        self.order(do, **options)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@dataclass
class Totals:
    stored: int = 0
    exact: int = 0
    after_restart: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, found: dict[str, Any], moment: str, keeper: Keeper, *, after_restart: bool) -> None:
        self.stored += found["stored"]
        self.exact += found["exact"]
        self.after_restart += found["exact"] * after_restart
        if found["wrong"] or (keeper.keeps_all and after_restart and found["lost"]):
            self.bad.append(f"{moment}: {found}")
        if after_restart and found["unreadable"]:  # nothing is damaged by a kill
            self.bad.append(f"{moment}: {found}")


@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.name)
def test_what_claims_to_be_there_is_exact(keeper: Keeper, nursery: Nursery, tmp_path: Path) -> None:
    if keeper.name.startswith("nixl"):
        nixl.need()
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    server = Server(nursery, tmp_path, free_port())
    engines = [Engine(server.port, number) for number in range(ENGINES)]
    totals = Totals()
    try:
        server.start(keeper)
        assert [engine.line() for engine in engines] == ["ready"] * ENGINES
        for number in range(ROUNDS):
            for engine in engines:
                engine.order("load")
            time.sleep(dice.uniform(0, LONGEST_LOAD_SECONDS))
            tokens = [""] * ENGINES
            server.kill()
            for index, engine in enumerate(engines):
                engine.order("stop")
                totals.add(engine.answer(), f"round {number}, load", keeper, after_restart=False)
                tokens[index] = engine.ask("server_epoch")
            server.start(keeper)
            for engine, token in zip(engines, tokens, strict=True):
                engine.order("verify", after=token)
            for engine in engines:
                totals.add(engine.answer(), f"round {number}, restart", keeper, after_restart=True)
            assert not totals.bad, (SEED, totals)
        assert totals.stored > 0, totals
        print(f"{totals.stored} chunks stored, {totals.exact} exact, {totals.after_restart} of them after a restart")
        for engine in engines:
            engine.close()
        what_had_time_to_be_written_is_there(server, keeper)
        until(lambda: idle(server), DEADLINE_SECONDS)
        assert server.stop() == 0, server.log.read_text()
        assert "Traceback" not in server.log.read_text()
    finally:
        for engine in engines:
            engine.close()
        server.close()


@pytest.mark.parametrize(
    "keeper",
    [keeper for keeper in KEEPERS if keeper.name not in ("l1_full", "raw_block_uring")],
    ids=lambda keeper: keeper.name,
)
def test_a_prefix_that_was_being_written_has_no_holes(keeper: Keeper, nursery: Nursery, tmp_path: Path) -> None:
    if keeper.name.startswith("nixl"):
        nixl.need()
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    keeper = replace(keeper, l1_bytes=128 * MIB)
    server = Server(nursery, tmp_path, free_port())
    tries = min(max(1, ROUNDS // 7), MAX_PREFIXES)
    try:
        for number in range(tries):
            server.start(keeper)
            with SmallEngine(server.port, payload_bytes=PREFIX_PAYLOAD_BYTES) as engine:
                engine.store(engine.tokens(*range(1000 * number, 1000 * number + PREFIX_CHUNKS)))
                time.sleep(dice.uniform(0, LONGEST_PREFIX_SECONDS))
                server.kill()
            server.start(keeper)
            with SmallEngine(server.port, payload_bytes=PREFIX_PAYLOAD_BYTES) as engine:
                until(lambda: complete(server), DEADLINE_SECONDS)
                objects = kept_objects(server)
                hits = 0
                for prompt in range(number + 1):
                    tokens = engine.tokens(*range(1000 * prompt, 1000 * prompt + PREFIX_CHUNKS))
                    found = engine.lookup(f"r{prompt}", tokens)
                    assert engine.read(found)
                    hits += found.chunks
                    engine.end(f"r{prompt}")
                print(f"{objects} objects, {hits} hits")
                assert hits == objects, (SEED, server.log.read_text())
            assert server.stop() == 0
    finally:
        server.close()


def what_had_time_to_be_written_is_there(server: Server, keeper: Keeper) -> None:
    with SmallEngine(server.port) as engine:
        tokens = engine.tokens(*range(900_000, 900_004))
        assert engine.store(tokens) == 4
        if server.status()["l2"]["adapters"]:
            assert http_json(server.http_port, "POST", "/cache/clear", {"tier": "l1"})[0] == 200  # after storing to L2
        server.kill()
    server.start(keeper)
    with SmallEngine(server.port) as engine:
        until(lambda: complete(server), DEADLINE_SECONDS)
        found = engine.lookup("last", tokens)
        assert found.chunks == 4 and engine.read(found), (SEED, server.log.read_text())


def complete(server: Server) -> bool:
    return all(adapter["inventory_complete"] for adapter in server.status()["l2"]["adapters"])


def kept_objects(server: Server) -> int:
    status = server.status()
    adapters = status["l2"]["adapters"]
    return int(adapters[0]["objects"] if adapters else status["l1"]["objects"])


def idle(server: Server) -> bool:
    status = server.status()
    held = ("leases", "leased_objects", "reservations", "staged")
    return not status["instances"] and not any(status["l1"][name] for name in held)
