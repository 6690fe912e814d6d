"""Prefill and decode apart: two engines, each with vLLM's own scheduler, at one server, under everything that can
happen to the first one and to the server. A router stands between: it has the one engine compute a prompt, and gives
its answer to the other one.

Every request is answered with the right tokens, and blocks and leases of both sides come back. A failure prints its
seed; TEST_SEED is the first seed, TEST_SIMULATED_RUNS how many runs each shape gets.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from lmcache.core.key import ObjectKey
from lmcache.integration.vllm.handover import SOURCE_KEY
from seeds import FIXED_SEED, SEED
from simulation.copier import Copies, SimCopier
from simulation.engine import Engine, Shape
from simulation.network import Network, SimConnection, SimServer
from simulation.threads import SimThread, engine_environment
from simulation.world import World

pytestmark = pytest.mark.engine

RUNS = int(os.environ.get("TEST_SIMULATED_RUNS", "1"))
L1_BYTES = 400 * 8192
FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
SHAPES = {
    "plain": Shape(),
    "overlapped": Shape(overlapped=True),
    "both ways": Shape(),
    "two ranks": Shape(ranks=2),
    "window": Shape(window=40, blocks=60),
    "no prefix cache": Shape(prefix_caching=False),
    "head": Shape(head=1, prefix_caching=False, blocks=80),
}


class Half:
    """One of the two engines, and what belongs to its process."""

    def __init__(self, pair: Pair, name: str, role: str) -> None:
        self.name = name
        self._pair = pair
        world = pair.world
        self.loaded_blocks = 0
        self.copies = Copies(world, self._snapshot, self._before_load, self._before_store)
        self._copiers: list[SimCopier] = []
        self._keepers: dict[str, Any] = {}  # what runs them, by their threads' names
        environment = replace(
            engine_environment(world, functools.partial(SimConnection, pair.network), self._new_copier),
            thread=self._new_thread,
        )
        self.engine = Engine(world, replace(pair.shape, role=role), pair.folder, environment, name)

    def _new_thread(self, target: Any, name: str, daemon: bool) -> Any:
        name = f"{self.name}/{len(self._keepers)}/{name}"
        if name.endswith("lmcache-keeper"):
            self._keepers[name] = target.__self__
        return SimThread(self._pair.world, target, name, daemon)

    def _new_copier(self, *arguments: Any) -> SimCopier:
        self._copiers.append(SimCopier(self.copies, *arguments))
        return self._copiers[-1]

    def _snapshot(self, address: int, blocks: list[int]) -> dict[int, bytes]:
        memory = next(array for array in self.engine.memory if array.ctypes.data == address)
        return {block: memory[block].tobytes() for block in blocks}

    def _before_load(self, blocks: list[int]) -> None:
        assert not self.engine.owned_blocks() & set(blocks), "a load writes into blocks that a running request uses"
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].ref_cnt > 0 for block in blocks), "a load writes into free blocks"
        self.loaded_blocks += len(blocks)

    def _before_store(self, blocks: list[int], content: dict[int, bytes]) -> None:
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].ref_cnt > 0 for block in blocks), "a store reads free blocks"

    def step(self) -> None:
        if self.engine.scheduler.has_requests():
            self.engine.step()
        elif self.engine.in_flight:
            self.engine.settle_one()
        for request in self.engine.finished:
            self.engine.check_output(request)

    @property
    def is_busy(self) -> bool:
        return bool(self.engine.scheduler.has_requests() or self.engine.in_flight)

    def die(self) -> None:
        """Its workers end where they are, in the middle of whatever they copy; then its scheduler ends."""
        for copier in self._copiers:
            copier.die()
        clients = [worker.worker_side.client for worker in self.engine.workers if worker.worker_side is not None]
        last = {name for name, client in self._keepers.items() if client not in clients}
        self._pair.world.kill(lambda name: name.startswith(self.name + "/") and name not in last)
        for client in clients:
            if client.memory is not None:
                client.memory.close()
        self._pair.world.freeze(0.0, lambda name: name.startswith(self.name + "/"))  # whoever ends is not frozen
        self.engine.connector.shutdown()
        self._pair.world.kill(lambda name: name.startswith(self.name + "/"))
        for client in clients:
            client.close()  # what is left of it in this process, which lives


class Pair:
    """A prefill engine, a decode engine, the router between them, and their server."""

    def __init__(self, seed: int, name: str, folder: Path) -> None:
        self.world = World(seed)
        self.random = self.world.random
        self.shape = SHAPES[name]
        self.folder = folder
        self._roles = ("kv_both", "kv_both") if name == "both ways" else ("kv_producer", "kv_consumer")
        self._objects: dict[ObjectKey, bytes] = {}
        self.network = Network(self.world)
        self.start_server()
        self._prefills = 0
        self.prefill: Half | None = None
        self.start_prefill()
        self.decode = Half(self, "decode", self._roles[1])
        self.prompts: dict[str, list[int]] = {}  # that the prefill engine has
        self.asked_at: dict[str, float] = {}  # of the decode engine
        self.handed: dict[str, Any] = {}  # what the router gave it
        self.did: Counter[str] = Counter()
        self.longest_seconds = 0.0

    def start_server(self) -> None:
        if self.network.server is None:
            chunk = self.shape.block_tokens * self.random.choice((1, 2, 2, 4))
            self.network.server = SimServer(self.world, self._objects, chunk, L1_BYTES)

    def start_prefill(self) -> None:
        if self.prefill is None:
            self._prefills += 1
            self.prefill = Half(self, f"prefill-{self._prefills}", self._roles[0])

    # ---- the router --------------------------------------------------------------------------------------------------
    def ask(self, name: str, tokens: list[int]) -> None:
        if self.prefill is None:
            self.go_on(name, tokens, None)
            return
        self.prompts[name] = tokens
        self.prefill.engine.add(name, tokens, 1, None, None, dict(FOR_PREFILL))

    def route(self) -> None:
        """What the prefill engine has answered goes to the decode engine."""
        if self.prefill is None:
            return
        for request in self.prefill.engine.finished:
            tokens = self.prompts.pop(request.request_id)
            told = self.prefill.engine.told.pop(request.request_id, None)
            self.did["told"] += told is not None
            self.world.at(
                self.random.choice((0.0, 0.0, 0.002, 0.05, 1.0)),
                functools.partial(self.go_on, request.request_id, tokens, told),
            )
        self.prefill.engine.finished.clear()

    def go_on(self, name: str, tokens: list[int], told: dict[str, Any] | None) -> None:
        self.asked_at[name] = self.world.now
        self.handed[name] = told
        self.decode.engine.add(name, tokens, self.random.choice((1, 2, 5, 20)), None, None, told)

    def step(self) -> None:
        halves = [half for half in (self.prefill, self.decode) if half is not None]
        for half in halves:
            half.step()
        self.route()
        for request in self.decode.engine.finished:
            self.did["finished"] += 1
            self.longest_seconds = max(self.longest_seconds, self.world.now - self.asked_at.pop(request.request_id))
        self.decode.engine.finished.clear()
        if not any(half.is_busy for half in halves):
            self.world.sleep(0.01)

    def kill_prefill(self) -> None:
        """A router that gets no answer has the decode engine do it all."""
        if self.prefill is None:
            return
        half, self.prefill = self.prefill, None
        half.die()
        for name, tokens in self.prompts.items():
            self.go_on(name, tokens, None)
        self.prompts.clear()

    # ---- the end -----------------------------------------------------------------------------------------------------
    def run_out(self, requests: int) -> None:
        began = self.world.now
        while self.did["finished"] < requests:
            self.step()
            assert self.world.now - began < 900.0, f"hangs: {list(self.asked_at)}, {list(self.prompts)}"

    def settle(self) -> None:
        self.start_server()
        self.world.sleep(200.0)
        for half in (self.prefill, self.decode):
            if half is not None:
                while half.is_busy:
                    half.step()
                half.engine.check_idle()
        server = self.network.server
        assert server is not None
        held = server.service.snapshot()
        assert not (held["sessions"] or held["leases"] or held["reservations"]), held
        assert self.world.block(lambda: not any(c.pendings for c in self.network.connections), 60.0)
        server.l1.check_idle()
        for half in (self.prefill, self.decode):
            if half is not None:
                half.engine.close()
        self.world.sleep(1.0)

    def close(self) -> None:
        self.world.close()
        self.network.kill()

    def fresh(self, count: int) -> list[int]:
        return [self.random.randrange(2, 8192) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated-model")


class _Faults(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(self.format(record))


@pytest.fixture
def faults() -> Iterator[list[str]]:
    """That the connector and the server contain: they are faults all the same."""
    handler = _Faults()
    logger = logging.getLogger("lmcache")
    logger.addHandler(handler)
    yield handler.seen
    logger.removeHandler(handler)


@pytest.fixture
def pairs(folder: Path, faults: list[str]) -> Iterator[Any]:
    made: list[Pair] = []

    def make(name: str, seed: int = SEED) -> Pair:
        print(f"seed {seed}, shape {name}")
        made.append(Pair(seed, name, folder))
        return made[-1]

    yield make
    for pair in made:
        pair.close()
    assert not faults, faults[0]


@pytest.mark.parametrize("name", SHAPES)
def test_all_that_was_announced_is_loaded(name: str, pairs: Any) -> None:
    """Prompts of one step and of several, whose stores may come long after their answer."""
    pair = pairs(name)
    pair.world.sleep(1.0)
    announced = 0
    for number in range(8):
        before = pair.decode.loaded_blocks
        prompt = pair.fresh(pair.random.choice((60, 64, 65, 200)))
        pair.ask(f"r{number}", prompt)
        pair.run_out(number + 1)
        told = pair.handed[f"r{number}"]
        # A window has whole chunks alone; else there is a partial one.
        unit = pair.shape.block_tokens if pair.shape.window is None else pair.network.server.chunk_tokens
        whole = (len(prompt) - pair.shape.head) // unit * unit
        if not whole:
            assert told is None
            continue
        announced += 1
        assert told[SOURCE_KEY]["tokens"] == whole, (told, len(prompt), unit)
        loaded = (pair.decode.loaded_blocks - before) * pair.shape.block_tokens
        groups_and_ranks = pair.shape.ranks * (2 if pair.shape.head else 1)
        if pair.shape.window is None:
            assert loaded == whole * groups_and_ranks, (loaded, told, len(prompt))
        else:  # and the last token is always computed
            assert (loaded > 0) == (len(prompt) > unit), (loaded, told, len(prompt), unit)
    assert pair.did["told"] == announced
    pair.settle()


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_prefill_engine_that_dies(when: str, pairs: Any) -> None:
    """Before its answer, while its chunks are staged, and when they are stored."""
    pair = pairs("plain")
    pair.world.sleep(1.0)
    server = pair.network.server
    prompt = pair.fresh(200)
    if when == "during":
        pair.prefill.copies.store_seconds = 60.0
    pair.ask("r", prompt)
    while "r" in pair.prompts and when != "before":
        pair.step()
    if when == "before":
        pair.step()
    elif when == "during":
        while "r" not in pair.asked_at:
            pair.step()
        for _ in range(5):
            pair.step()
        assert server.service.snapshot()["reservations"] > 0
        assert pair.did["finished"] == 0, "the decode engine did not wait"
    else:
        pair.world.sleep(30.0)
    killed_at = pair.world.now
    pair.kill_prefill()
    pair.run_out(1)
    assert pair.world.now - killed_at < (5.0 if when == "during" else 15.0)
    assert (pair.decode.loaded_blocks > 0) == (when == "after")
    pair.settle()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("run", range(RUNS))
def test_whatever_happens_every_request_is_answered(name: str, run: int, pairs: Any) -> None:
    pair = pairs(name, SEED + 1000 + run * len(SHAPES) + list(SHAPES).index(name))
    requests = 60
    acts = (
        *[("ask", 12.0), ("kill prefill", 0.4), ("start prefill", 5.0), ("kill server", 0.2), ("drop", 0.3)],
        *[("pause", 0.3), ("spoil", 0.5), ("clear", 0.2), ("freeze", 0.3), ("reset", 2.0)],
    )
    texts = [pair.fresh(180) for _ in range(3)]
    asked = 0
    while asked < requests:
        for act, percent in acts:
            if pair.random.random() * 100 >= percent:
                continue
            pair.did[act] += 1
            server = pair.network.server
            if act == "ask":
                text = pair.random.choice(texts)
                tokens = text[: pair.random.randint(1, 180)] + pair.fresh(pair.random.choice((0, 5, 60)))
                pair.ask(f"r{asked}", tokens or [7])
                asked += 1
            elif act == "kill prefill":
                pair.kill_prefill()
            elif act == "start prefill":
                pair.start_prefill()
            elif act == "kill server":
                pair.network.kill()
                pair.world.at(pair.random.choice((0.01, 0.1, 1.0, 8.0)), pair.start_server)
            elif act == "drop":
                pair.network.drop()
            elif act == "pause" and server is not None:
                server.paused_until = pair.world.now + pair.random.choice((0.1, 0.5, 2.0))
            elif act == "spoil" and server is not None:
                server.spoil()
            elif act == "clear" and server is not None:
                server.l1.core.clear()
            elif act == "freeze":
                store = pair.random.choice((True, False))
                pair.world.freeze(
                    pair.random.choice((0.1, 1.0, 15.0)),
                    lambda thread, store=store: (
                        thread.startswith("prefill") and thread.endswith("lmcache-store" if store else "lmcache-keeper")
                    ),
                )
            elif act == "reset":
                pair.decode.engine.scheduler.reset_prefix_cache()
        pair.step()
    pair.run_out(requests)
    print(dict(pair.did), f"longest {pair.longest_seconds:.1f} s, {pair.decode.loaded_blocks} blocks loaded")
    assert pair.decode.loaded_blocks > 0 or (SEED, run) != (FIXED_SEED, 0)  # what other runs reach is up to them
    pair.settle()
