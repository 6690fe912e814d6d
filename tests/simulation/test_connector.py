"""Both sides of the connector under everything that can happen to them, from a seed.

Time, threads, sockets and the moment of a copy belong to the simulation; everything else is the product.

TEST_SIMULATED_RUNS sets how many runs each shape gets, TEST_SEED the first seed. A failure prints its
seed. The scheduler is vLLM's own, so what it does with blocks is not guessed.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from lmcache.core.key import ObjectKey
from lmcache.integration.engine.request_state import RequestState
from lmcache.integration.vllm.handover import SOURCE_KEY
from seeds import FIXED_SEED, SEED
from simulation.copier import Copies, SimCopier
from simulation.engine import Engine, Shape
from simulation.logged_errors import LoggedErrors
from simulation.network import Network, SimConnection, SimServer
from simulation.threads import engine_environment
from simulation.world import World

pytestmark = pytest.mark.engine

RUNS = int(os.environ.get("TEST_SIMULATED_RUNS", "1"))
REQUESTS = 200
IMAGE_TOKENS = 20
L1_BYTES = 160 * 8192

DECODED = {"lmcache.mp.save_decode_cache": True}
RECOMPUTES = {"kv_load_failure_policy": "recompute"}
SHAPES = {
    "plain": Shape(),
    "small chunks": Shape(block_tokens=32, blocks=30),
    "no prefix cache": Shape(prefix_caching=False),
    "overlapped": Shape(overlapped=True),
    "two ranks": Shape(ranks=2),
    "two ranks alike": Shape(ranks=2, mla=True),
    "two stages": Shape(ranks=2, stages=2),
    "two stages of two ranks alike": Shape(ranks=4, stages=2, mla=True),
    "window": Shape(window=40, blocks=60),
    "local attention": Shape(local=32, blocks=60),
    "state": Shape(state=True, blocks=60),
    "state, overlapped": Shape(state=True, blocks=60, overlapped=True),
    "state, two ranks": Shape(state=True, blocks=60, ranks=2),
    "decoded": Shape(extra=DECODED),
    "decoded, overlapped": Shape(overlapped=True, extra=DECODED),
    "decoded, two ranks": Shape(ranks=2, prefix_caching=False, extra=DECODED),
    "decoded, window": Shape(window=70, blocks=60, extra=DECODED),
    "sessions": Shape(sessions=True, blocks=60),
    "sessions, decoded": Shape(sessions=True, blocks=60, extra=DECODED),
    "sessions, decoded, overlapped": Shape(sessions=True, blocks=60, overlapped=True, extra=DECODED),
    "sessions, decoded, small chunks": Shape(sessions=True, block_tokens=8, blocks=120, extra=DECODED),
    # Beside these vLLM has no cache of its own, so that a head finds the KV of its own prompt alone.
    "head": Shape(head=1, prefix_caching=False, blocks=80),
    "head, decoded": Shape(head=1, prefix_caching=False, blocks=80, extra=DECODED),
    "head, decoded, two ranks": Shape(head=1, prefix_caching=False, blocks=80, ranks=2, extra=DECODED),
    "chain of heads, decoded": Shape(head=3, prefix_caching=False, blocks=80, extra=DECODED),
    "events": Shape(events=True),
    "events, two ranks, small chunks": Shape(events=True, ranks=2, block_tokens=32, blocks=30),
    "events, decoded, overlapped": Shape(events=True, overlapped=True, extra=DECODED),
    "events, window": Shape(events=True, window=40, blocks=60),
    "events, sessions": Shape(events=True, sessions=True, blocks=60),
    "a window alone": Shape(window=40, alone=True),
    "local attention alone": Shape(local=32, alone=True),
    "a state alone": Shape(state=True, alone=True),
    "handed over": Shape(hands_over=True),
    "handed over, overlapped, two ranks": Shape(hands_over=True, overlapped=True, ranks=2),
    "handed over, decoded": Shape(hands_over=True, block_tokens=8, blocks=80, extra=DECODED),
    "handed over, head": Shape(hands_over=True, head=1, prefix_caching=False, blocks=80),
    "handed over, window": Shape(hands_over=True, window=40, blocks=60),
    "handed over, events": Shape(hands_over=True, events=True),
    "handed over, sessions": Shape(hands_over=True, sessions=True, block_tokens=8, blocks=120, extra=DECODED),
    "behind another connector": Shape(multi=RECOMPUTES, beside="before", hands_over=True, overlapped=True),
    "behind another connector, decoded": Shape(multi=RECOMPUTES, beside="before", blocks=80, extra=DECODED),
    "before another connector": Shape(multi=RECOMPUTES, beside="behind", ranks=2, extra=DECODED),
    "before another connector, window": Shape(multi=RECOMPUTES, beside="behind", window=40, blocks=60),
    "head, own cache": Shape(head=1, blocks=90),
    "head, own cache, decoded, two ranks": Shape(head=1, blocks=80, ranks=2, extra=DECODED),
}
ELSEWHERE = {"instance": "other", "p2p": "", "epoch": "00" * 16, "tokens": 1 << 20}
HANDED_OVER = ({"do_remote_decode": True, "do_remote_prefill": False}, {SOURCE_KEY: ELSEWHERE})


@dataclass
class Odds:
    """How often what happens, in a hundred steps."""

    requests: float = 10.0
    aborts: float = 3.0
    resets: float = 6.0
    updates: float = 0.6
    preempts: float = 2.0
    kills: float = 0.1
    drops: float = 0.1
    pauses: float = 0.1
    freezes: float = 0.1
    spoils: float = 1.2
    clears: float = 0.1


@dataclass
class _Session:
    name: str
    inputs: int  # still to come


class Run:
    def __init__(self, seed: int, shape: Shape, folder: Path, requests: int = REQUESTS) -> None:
        self.seed = seed
        self.requests = requests
        self.world = World(seed)
        self.random = self.world.random
        self.shape = shape
        self.objects: dict[ObjectKey, bytes] = {}
        self.network = Network(self.world)
        self.copies = Copies(self.world, self.snapshot, self.before_load, self.before_store)
        self.start_server()
        connection = functools.partial(SimConnection, self.network)
        copier = functools.partial(SimCopier, self.copies)
        self.engine = Engine(self.world, shape, folder, engine_environment(self.world, connection, copier))
        if shape.head and shape.prefix_caching:
            self.copies.may_end_so = self.engine.may_end_so
        self.odds = Odds()
        self.texts: list[list[int]] = [self.fresh(16 * self.random.randint(1, 14)) for _ in range(4)]
        self.session: _Session | None = None
        self.further: list[list[int]] = [self.fresh(self.random.randint(4, 40)) for _ in range(2)]
        self.named = 0
        self.did: Counter[str] = Counter()

    def start_server(self) -> None:
        if self.network.server is None:
            blocks = (2, 4, 4) if self.shape.hands_over else (1, 1, 2, 2, 4)  # one block leaves no partial chunk
            chunk = self.shape.block_tokens * self.random.choice(blocks)
            self.network.server = SimServer(self.world, self.objects, chunk, L1_BYTES)

    # ---- what the copier asks ----------------------------------------------------------------------------------------
    def snapshot(self, address: int, blocks: list[int]) -> dict[int, bytes]:
        memory = next(array for array in self.engine.memory if array.ctypes.data == address)
        return {block: memory[block].tobytes() for block in blocks}

    def before_load(self, blocks: list[int]) -> None:
        owned = self.engine.owned_blocks()
        assert not owned & set(blocks), "a load writes into blocks that a running request uses"
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].ref_cnt > 0 for block in blocks), "a load writes into free blocks"
        self.did["blocks loaded"] += len(blocks)

    def before_store(self, blocks: list[int], content: dict[int, bytes]) -> None:
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].ref_cnt > 0 for block in blocks), "a store reads free blocks"
        self.did["blocks stored"] += len(blocks)

    # ---- what happens ------------------------------------------------------------------------------------------------
    def fresh(self, count: int) -> list[int]:
        return [self.random.randrange(2, 8192) for _ in range(count)]

    def add_request(self) -> None:
        self.named += 1
        if self.random.random() < 0.8:
            text = self.random.choice(self.texts)
            tokens = text[: self.random.randint(1, len(text))] + self.fresh(self.random.choice((0, 1, 7, 40)))
        else:
            tokens = self.fresh(self.random.randint(1, 200))
        salt = self.random.choice((None,) * 8 + ("one", "two"))
        lora = self.random.choice((None,) * 14 + ("l1", "l2"))
        parameters = None
        if self.shape.hands_over:
            parameters = self.random.choice((*HANDED_OVER * 2, None))
            if self.random.random() < 0.5:
                tokens, lora = self.random.choice(self.texts), None  # the same end again
        count = self.random.choice((1, 1, 2, 5, 20, 70))
        self.engine.add(f"r{self.named}", tokens, count, salt, lora, parameters)

    def add_session(self) -> None:
        self.named += 1
        text = self.random.choice(self.texts)
        self.session = _Session(f"r{self.named}", self.random.randint(0, 3))
        self.engine.add_input(self.session.name, text[: self.random.randint(1, 120)], self.random.choice((1, 1, 2, 20)))

    def give_up_lost_sessions(self) -> None:
        """Also those that get no more input."""
        for name in [name for name in self.engine.live if self.engine.is_lost(name)]:
            self.engine.abort(name)
            self.did["sessions lost by vLLM"] += 1

    def go_on_with_session(self) -> None:
        """The same few texts again and again, around one of two images."""
        session = self.session
        if session is None or self.random.random() > 0.05:
            return
        if session.name not in self.engine.live or self.engine.live[session.name].is_finished():  # aborted
            self.session = None
        elif session.inputs:
            session.inputs -= 1
            before, after = self.random.choice(self.further), self.random.choice(self.further)
            image = (len(before), IMAGE_TOKENS, self.random.choice("ab"))
            tokens = [*before, *[1] * IMAGE_TOKENS, *after]
            self.engine.add_input(session.name, tokens, self.random.choice((1, 1, 2, 20)), [image])
            self.did["inputs added"] += 1
        else:
            self.session = None
            self.engine.end_input(session.name)

    def disturb(self) -> None:
        for name, percent in vars(self.odds).items():
            if self.random.random() * 100 < percent:
                getattr(self, "do_" + name)()
                self.did[name] += 1

    def do_requests(self) -> None:
        if self.named < self.requests:
            for _ in range(self.random.choice((1, 1, 2, 6))):
                self.add_request()
            if self.shape.sessions and self.session is None and self.named < self.requests:
                self.add_session()

    def do_aborts(self) -> None:
        if self.engine.live:
            name = self.random.choice(list(self.engine.live))
            self.did["aborted while " + self.state_of(name)] += 1
            self.engine.abort(name)

    def do_resets(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def do_updates(self) -> None:
        """Other weights between two steps. vLLM says when its reset is to be tried again: while blocks are in use."""
        engine = self.engine
        preempt = self.random.random() < 0.8
        for _ in range(20):
            while engine.in_flight:
                engine.settle_one()
            try:
                if engine.scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True):
                    engine.weights += 1
                    self.did["other weights"] += 1
                    return
            except RuntimeError as error:
                assert "running requests waiting for remote KV transfer" in str(error)
            self.did["resets that failed"] += 1
            self.step()

    def do_preempts(self) -> None:
        scheduler = self.engine.scheduler
        if scheduler.running and (self.shape.sessions or not self.engine.in_flight):
            request = scheduler.running.pop()
            self.did["preempted while " + self.state_of(request.request_id, running=True)] += 1
            scheduler._preempt_request(request, 0.0)  # noqa: SLF001  # it preempts when it wants to

    def state_of(self, name: str, *, running: bool = False) -> str:
        """What the connector does for a request."""
        side = self.engine.connector.scheduler_side
        assert side is not None
        tracked = side.requests.get(name)
        if tracked is not None and tracked.load is not None:
            return "loading"
        if running or any(request.request_id == name for request in self.engine.scheduler.running):
            return "storing" if self.engine.stored_blocks(name) else "running"
        if tracked is not None and tracked.state is RequestState.LOOKING_UP:
            return "looking up"
        return "waiting"

    def do_kills(self) -> None:
        self.network.kill()
        self.world.at(self.random.choice((0.01, 0.1, 1.0, 8.0)), self.start_server)

    def do_drops(self) -> None:
        self.network.drop()

    def do_pauses(self) -> None:
        if self.network.server is not None:
            until = self.world.now + self.random.choice((0.1, 0.5, 2.0, 15.0))
            self.network.server.paused_until = max(until, self.network.server.paused_until)

    def do_freezes(self) -> None:
        self.world.freeze(self.random.choice((0.1, 1.0, 5.0, 40.0)), lambda name: name == "lmcache-keeper")

    def do_spoils(self) -> None:
        if self.network.server is not None:
            self.network.server.spoil()

    def do_clears(self) -> None:
        if self.network.server is not None:
            self.network.server.l1.core.clear()

    # ---- the course --------------------------------------------------------------------------------------------------
    def go(self) -> None:
        engine = self.engine
        while self.named < self.requests:
            self.disturb()
            self.step()
        waited_from, steps = self.world.now, 0
        while engine.scheduler.has_requests() or engine.in_flight or self.session is not None:
            self.step()
            steps += 1
            assert steps < 20_000 and self.world.now - waited_from < 900.0, f"hangs: {list(engine.scheduler.requests)}"
        self.settle()

    def step(self) -> None:
        self.give_up_lost_sessions()
        self.go_on_with_session()
        if self.engine.scheduler.has_requests():
            self.engine.step()
        elif self.engine.in_flight:
            self.engine.settle_one()
        else:
            self.world.sleep(0.01)
        for request in self.engine.finished:
            self.did["finished"] += 1
            self.engine.check_output(request)
            self.texts[self.random.randrange(len(self.texts))] = list(request.all_token_ids)[:400]
        self.engine.finished.clear()

    def settle(self) -> None:
        self.start_server()
        self.world.sleep(200.0)
        self.engine.check_idle()
        server = self.network.server
        assert server is not None
        if self.shape.events:
            self.check_router(server)
        held = server.service.snapshot()
        assert not (held["sessions"] or held["leases"] or held["reservations"]), held
        # Heartbeats go on: some moment must come without a call that waits.
        assert self.world.block(lambda: not self.unanswered(), 60.0), self.unanswered()
        server.l1.check_idle()
        self.engine.close()
        self.world.sleep(1.0)

    def check_router(self, server: SimServer) -> None:
        """What it believes of the server is there; when all goes it believes nothing."""
        router = self.engine.router
        self.publish()
        chunk_blocks = server.chunk_tokens // self.shape.block_tokens
        objects = {(found.namespace_digest, found.chunk_hash) for found in server.l1.core.list_objects(0, 1000)}
        assert len(router.of_server()) <= len(objects) // self.shape.ranks * chunk_blocks
        is_first_run = self.seed in range(FIXED_SEED, FIXED_SEED + len(SHAPES))  # what others reach is up to them
        assert router.announced or not is_first_run
        server.l1.core.clear()
        self.world.sleep(10.0)
        self.publish()
        assert not router.of_server()

    def publish(self) -> None:
        self.engine.step()
        while self.engine.in_flight:
            self.engine.settle_one()

    def unanswered(self) -> list[str]:
        return [pending.method for connection in self.network.connections for pending in connection.pendings]

    def close(self) -> None:
        self.world.close()
        self.network.kill()


interrupted: Counter[str] = Counter()  # in all runs


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("run", range(RUNS))
def test_nothing_leaks_hangs_or_lies(name: str, run: int, model_folder: Path, errors: LoggedErrors) -> None:
    seed = SEED + run * len(SHAPES) + list(SHAPES).index(name)
    print(f"seed {seed}, shape {name}")
    simulation = Run(seed, SHAPES[name], model_folder)
    try:
        simulation.go()
    finally:
        simulation.close()
        print(dict(simulation.did), simulation.engine.steps, "steps", round(simulation.world.now - 1000), "s")
        print(dict(errors.counts))
    interrupted.update({event: count for event, count in simulation.did.items() if " while " in event})
    assert not errors.faults, errors.faults[0]
    assert simulation.did["finished"] == simulation.named


def test_a_seed_decides_everything(model_folder: Path) -> None:
    courses = []
    for _ in range(2):
        simulation = Run(SEED, SHAPES["decoded, two ranks"], model_folder, requests=40)
        try:
            simulation.go()
        finally:
            simulation.close()
        courses.append((simulation.did, simulation.engine.steps, simulation.world.now))
    assert courses[0] == courses[1]


@pytest.mark.skipif(SEED != FIXED_SEED, reason="what other seeds reach is up to them")
def test_requests_were_interrupted_in_every_state() -> None:
    if not interrupted:
        pytest.skip("the runs before this one were left out")
    print(dict(interrupted))
    states = {"aborted while " + state for state in ("looking up", "waiting", "loading", "running", "storing")}
    assert states | {"preempted while running", "preempted while storing"} <= interrupted.keys()


@pytest.mark.parametrize("name", ["plain", "two ranks", "no prefix cache"])
def test_kv_of_previous_weights_is_neither_served_nor_stored_under_the_new_name(
    name: str, model_folder: Path, errors: LoggedErrors
) -> None:
    simulation = Run(1, SHAPES[name], model_folder)
    engine = simulation.engine
    text = simulation.fresh(200)

    def loaded(request: str) -> int:
        """Blocks that a request loaded, which runs to its end; what it attends to and what is stored is checked."""
        before = simulation.did["blocks loaded"]
        engine.scheduler.reset_prefix_cache()
        engine.add(request, text, 2, None, None)
        while engine.scheduler.has_requests():
            simulation.step()
        return simulation.did["blocks loaded"] - before

    try:
        simulation.world.sleep(1.0)
        assert loaded("cold") == 0
        found = loaded("warm")
        assert found > 0
        for update in range(2):
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            engine.weights += 1
            assert loaded(f"cold {update}") == 0
            assert loaded(f"warm {update}") == found
        simulation.settle()
    finally:
        simulation.close()
    assert not errors.faults, errors.faults[0]


def test_a_lease_outlives_a_load_of_half_an_hour_and_ends_with_its_request(
    model_folder: Path, errors: LoggedErrors
) -> None:
    simulation = Run(1, SHAPES["no prefix cache"], model_folder)
    engine, world = simulation.engine, simulation.world
    text = simulation.fresh(200)

    def ask(name: str, tokens: list[int]) -> None:
        """To its end; finished requests are checked in every step."""
        engine.add(name, tokens, 2, None, None)
        while name in engine.live:
            simulation.step()

    try:
        ask("cold", text)
        world.sleep(10.0)
        server = simulation.network.server
        assert server is not None
        simulation.copies.load_seconds = 1790.0
        engine.add("warm", text, 2, None, None)
        worker = engine.workers[0].worker_side
        assert worker is not None
        while not worker.loading:
            simulation.step()
        simulation.copies.load_seconds = 0.0
        evicted = server.l1.stats()["evicted_objects"]
        began = world.now
        while world.now < began + 1700.0:
            ask(f"other {world.now}", simulation.fresh(300))
            world.sleep(20.0)
            assert server.service.snapshot()["leases"] == 1
        assert server.l1.stats()["evicted_objects"] > evicted
        loaded = simulation.did["blocks loaded"]
        while "warm" in engine.live:
            simulation.step()
        assert simulation.did["blocks loaded"] > loaded
        assert not engine.live
        simulation.settle()
    finally:
        simulation.close()
    assert not errors.faults, errors.faults[0]
