"""What lies behind the last full chunk of a prompt that one engine computes for another, with vLLM's own scheduler.

One engine plays both parts: between them its own prefix cache is reset, so that what it has comes from the server. The
model checks whatever it attends to, and the copies check that no name gets two contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from lmcache.integration.vllm.handover import SOURCE_KEY
from simulation.engine import Shape
from simulation.logged_errors import LoggedErrors
from simulation.network import SimServer
from simulation.test_connector import L1_BYTES, Run

pytestmark = pytest.mark.engine

BLOCK, CHUNK_BLOCKS = 16, 4
CHUNK = BLOCK * CHUNK_BLOCKS
PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE: dict[str, Any] = {SOURCE_KEY: {"instance": "engine", "p2p": "", "epoch": "00" * 16, "tokens": 1 << 20}}
ALWAYS_LOAD = {"lmcache.mp.load_or_recompute": False}
SHAPES = {
    "plain": Shape(),
    "overlapped, two ranks": Shape(overlapped=True, ranks=2),
    "two stages of two ranks alike": Shape(ranks=4, stages=2, mla=True),
    "head": Shape(head=1, prefix_caching=False, blocks=80),
    "decoded": Shape(extra={"lmcache.mp.save_decode_cache": True}),
}
LENGTHS = (BLOCK - 1, BLOCK + 5, 3 * BLOCK, CHUNK, CHUNK + 3, CHUNK + BLOCK, 2 * CHUNK + 3 * BLOCK + 7)


class HandedOver(Run):
    def __init__(self, shape: Shape, folder: Path) -> None:
        super().__init__(1, replace(shape, extra={**shape.extra, **ALWAYS_LOAD}), folder)
        self.world.sleep(1.0)  # until the engine has registered

    def start_server(self) -> None:
        if self.network.server is None:
            self.network.server = SimServer(self.world, self.objects, CHUNK, L1_BYTES)

    @property
    def copies_of_a_block(self) -> int:
        return self.shape.ranks * (2 if self.shape.head else 1)

    def ask(self, tokens: list[int], parameters: dict[str, Any] | None = None, salt: str | None = None) -> int:
        """Blocks that a request with these tokens loads, which runs to its end."""
        self.engine.scheduler.reset_prefix_cache()
        before = self.did["blocks loaded"]
        self.named += 1
        self.engine.add(f"r{self.named}", tokens, 1 if parameters is PREFILL else 3, salt, None, parameters)
        while self.engine.live or self.engine.in_flight:
            self.step()
        self.world.sleep(10.0)  # stores end
        while self.engine.scheduler.has_requests() or self.engine.in_flight:
            self.step()
        loaded, rest = divmod(self.did["blocks loaded"] - before, self.copies_of_a_block)
        assert not rest
        return loaded


@pytest.fixture
def run(request: pytest.FixtureRequest, model_folder: Path, errors: LoggedErrors) -> Iterator[HandedOver]:
    simulation = HandedOver(SHAPES[getattr(request, "param", "plain")], model_folder)
    try:
        yield simulation
        simulation.settle()
    finally:
        simulation.close()
    assert not errors.faults, errors.faults[0]


@pytest.mark.parametrize("run", SHAPES, indirect=True)
def test_what_decodes_loads_every_whole_block_of_what_was_prefilled(run: HandedOver) -> None:
    for length in LENGTHS:
        text = run.fresh(length)
        named_tokens = length - run.shape.head
        assert run.ask(text, PREFILL) == 0
        assert run.ask(text, DECODE) == named_tokens // BLOCK, f"of {length} tokens"


def test_others_load_full_chunks_alone(run: HandedOver) -> None:
    text = run.fresh(2 * CHUNK + 3 * BLOCK + 7)
    run.ask(text, PREFILL)
    full = 2 * CHUNK_BLOCKS
    assert run.ask(text) == full, "without the mark"
    assert run.ask(text, DECODE, "tenant") == 0
    assert run.ask(text[: 2 * CHUNK + 2 * BLOCK], DECODE) == full, "a shorter prompt"
    assert run.ask([*text, *run.fresh(8)], DECODE) == full + 3, "the same whole blocks"
    assert run.ask([*text, *run.fresh(CHUNK)], DECODE) == full, "a longer prompt"
    for position in (2 * CHUNK, 2 * CHUNK + 3 * BLOCK - 1):
        other = [*text]
        other[position] = 2 + (other[position] - 1) % 8190
        assert run.ask(other, DECODE) == full, f"another token at {position}"
    assert run.ask(text, DECODE) == full + 3


def test_who_decodes_and_stores_does_not_take_the_partial_chunk_for_a_full_one(model_folder: Path) -> None:
    """Decoding fills the chunk that the partial one began."""
    run = HandedOver(SHAPES["decoded"], model_folder)
    try:
        text = run.fresh(CHUNK + 2 * BLOCK)
        run.ask(text, PREFILL)
        request = run.engine.add("long", text, CHUNK, None, None, DECODE)
        while run.engine.live or run.engine.in_flight:
            run.step()
        run.world.sleep(10.0)
        whole = list(request.all_token_ids)
        assert run.ask([*whole, *run.fresh(3)]) == 2 * CHUNK_BLOCKS
        run.settle()
    finally:
        run.close()


def test_a_partial_chunk_that_is_not_what_was_stored_is_computed(run: HandedOver) -> None:
    text = run.fresh(CHUNK + 3 * BLOCK + 1)
    run.ask(text, PREFILL)
    server = run.network.server
    assert server is not None
    for _ in range(40):
        server.spoil()
    run.ask(text, DECODE)
    assert run.ask(text, DECODE) < CHUNK_BLOCKS + 3, "what did not verify is removed"
    run.ask(text, PREFILL)
    assert run.ask(text, DECODE) == CHUNK_BLOCKS + 3, "and stored anew"


def test_a_server_that_starts_anew_gets_it_again(run: HandedOver) -> None:
    text = run.fresh(CHUNK + 3 * BLOCK + 1)
    run.ask(text, PREFILL)
    run.network.kill()
    run.start_server()
    run.world.sleep(30.0)
    run.ask(text, DECODE)
    run.ask(text, PREFILL)
    assert run.ask(text, DECODE) == CHUNK_BLOCKS + 3


def test_groups_with_a_window_load_full_chunks(model_folder: Path) -> None:
    run = HandedOver(Shape(window=40, blocks=60), model_folder)
    try:
        text = run.fresh(CHUNK + 3 * BLOCK + 1)
        run.engine.scheduler.reset_prefix_cache()
        for parameters in (PREFILL, DECODE):
            run.engine.scheduler.reset_prefix_cache()
            run.engine.add(str(parameters), text, 1, None, None, parameters)
            while run.engine.live or run.engine.in_flight:
                run.step()
            run.world.sleep(10.0)
        loaded = run.did["blocks loaded"]
        assert 0 < loaded <= 2 * CHUNK_BLOCKS, loaded
        run.settle()
    finally:
        run.close()
