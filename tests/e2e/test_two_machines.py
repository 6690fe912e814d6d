"""Two machines with a server and two engines each: what an engine computed, engines of the other machine load, bit by
bit; salts and layouts stay apart; a machine that vanishes costs a deadline, then nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import CHUNK_TOKENS, ENGINE_PATH, PROBE, call_workers, until, whole_chunks
from lmcache.testing.processes import CacheServer, Completion, VllmEngine
from lmcache.testing.tiny_models import sample_tokens
from process.support import held
from support.machines import Machine, two_machines

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 2000
PEER_PORT = 9500
WITHIN_SECONDS = 30.0  # a deadline and the prompt, on a machine where four engines share two processors
EXACT, ROUNDED = "float32", "bfloat16"  # the layouts; tokens are the same after a hit where sums are not rounded


class Site:
    """A machine with its server, an engine of each layout, and what is asked of them."""

    def __init__(self, machine: Machine, model: Path, folder: Path, cpu: int, flags: list[str], stack: ExitStack):
        self.machine = machine
        folder.mkdir()
        self.server = self._start(stack, lambda: CacheServer(folder, l1_size_gb=1.0, extra=flags))
        machine.run(self.server.wait_ready)
        self.engines = {
            layout: self._start(stack, self._engine(model, folder, cpu, layout)) for layout in (EXACT, ROUNDED)
        }

    def _engine(self, model: Path, folder: Path, cpu: int, layout: str) -> Callable[[], VllmEngine]:
        return lambda: VllmEngine(
            model,
            folder,
            cache_port=self.server.port,
            extra_config={"lmcache.mp.load_or_recompute": False},
            extra=["--worker-extension-cls", PROBE, "--dtype", layout],
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "PYTHONPATH": ENGINE_PATH,
                "VLLM_CPU_OMP_THREADS_BIND": str(cpu),
            },
            log_name=f"{layout}.log",
        )

    def _start(self, stack: ExitStack, start: Callable[[], Any]) -> Any:
        process = self.machine.run(start)
        stack.callback(lambda: self.machine.run(process.stop))
        return process

    def wait_ready(self) -> None:
        for engine in self.engines.values():
            self.machine.run(engine.wait_ready)
        until(lambda: len(self.status()["instances"]) == len(self.engines), tell=self.status)
        for layout in self.engines:
            self._call_workers(layout, "kv_watch")

    def status(self) -> dict[str, Any]:
        return self.machine.run(self.server.status)

    def ask(self, layout: str, prompt: list[int], **fields: Any) -> Completion:
        return self.machine.run(lambda: self.engines[layout].complete(prompt, **fields))

    def seen(self, layout: str, kind: str) -> dict[str, str]:
        """Digests of the KV that the engine stored or loaded."""
        return dict(self._call_workers(layout, "kv_seen")[0][kind])

    def _call_workers(self, layout: str, method: str) -> list[Any]:
        return self.machine.run(lambda: call_workers(self.engines[layout], method))

    def is_connected(self) -> bool:
        return self.machine.run(lambda: self.server.metric("lmcache_mp_p2p_peers")) == 1

    def wait_stored(self, objects: int) -> None:
        until(lambda: self.status()["l1"]["objects"] >= objects and not self.status()["reservations"], tell=self.status)

    def check_idle(self) -> None:
        def idle() -> bool:
            status = self.status()
            others = status["p2p"]["leases"], status["l1"]["reservations"]
            return not (any(others) or self.machine.run(lambda: held(self.server)))

        until(idle, tell=self.status)
        assert "Traceback" not in self.server.log()


def test_four_engines_on_two_machines(llama: Path, tmp_path: Path) -> None:
    token = tmp_path / "peers.token"
    token.write_text("a secret of both machines\n")
    token.chmod(0o600)
    with two_machines() as machines, ExitStack() as stack:
        addresses = [f"{machine.address}:{PEER_PORT}" for machine in machines]

        def flags(number: int) -> list[str]:
            peers = ["--p2p-advertise-url", addresses[number], "--p2p-peers", ",".join(addresses)]
            return [*peers, "--p2p-token-file", str(token), "--l2-prefetch-policy", "retain"]

        a, b = (
            Site(machine, llama, tmp_path / f"machine-{number}", number, flags(number), stack)
            for number, machine in enumerate(machines)
        )
        for site in (a, b):
            site.wait_ready()
        until(lambda: a.is_connected() and b.is_connected())
        _hits_are_exact(a, b)
        _hits_are_exact(b, a)
        _a_server_of_other_chunks_is_refused(b, tmp_path, [*flags(1), "--chunk-size", "128"])
        _a_machine_that_vanishes_costs_a_deadline(a, b)
        for site in (a, b):
            site.check_idle()


def _hits_are_exact(here: Site, there: Site) -> None:
    """What an engine here computed, the one of its layout there loads; each salt by itself."""
    prompt = sample_tokens(TOKENS, seed=int(here.machine.address[-1]))
    for salt in ({}, {"cache_salt": "tenant"}):
        answers = {}
        for layout in (EXACT, ROUNDED):
            before = here.status()["l1"]["objects"]
            answers[layout] = here.ask(layout, prompt, **salt)
            assert answers[layout].cached_tokens == 0, "neither the other layout nor the other salt"
            here.wait_stored(before + TOKENS // CHUNK_TOKENS)
        for layout in (EXACT, ROUNDED):
            loaded = there.ask(layout, prompt, **salt)
            assert loaded.cached_tokens == whole_chunks(TOKENS)
            assert layout == ROUNDED or loaded.token_ids == answers[layout].token_ids
    for layout in (EXACT, ROUNDED):
        stored, loaded_there = here.seen(layout, "stored"), there.seen(layout, "loaded")
        assert len(loaded_there) >= TOKENS // CHUNK_TOKENS
        assert loaded_there.items() <= stored.items()


def _a_server_of_other_chunks_is_refused(place: Site, folder: Path, flags: list[str]) -> None:
    advertised = f"{place.machine.address}:{PEER_PORT + 1}"
    flags[flags.index("--p2p-advertise-url") + 1] = advertised
    server = place.machine.run(lambda: CacheServer(folder, l1_size_gb=0.0625, extra=flags, log_name="other-chunks.log"))
    try:
        place.machine.run(server.wait_ready)
        until(lambda: "the servers have --chunk-size" in server.log(), tell=server.log)
        assert place.machine.run(lambda: server.metric("lmcache_mp_p2p_peers")) == 0
    finally:
        place.machine.run(server.stop)


def _a_machine_that_vanishes_costs_a_deadline(here: Site, there: Site) -> None:
    prompt = sample_tokens(TOKENS, seed=77)
    answer = here.ask(EXACT, prompt)
    before = there.status()["l1"]["objects"]
    here.machine.unplug()
    for number in range(2):
        began = time.monotonic()
        alone = there.ask(EXACT, prompt, cache_salt=f"nobody has {number}")
        assert alone.cached_tokens == 0 and alone.token_ids == answer.token_ids
        assert time.monotonic() - began < WITHIN_SECONDS
    began = time.monotonic()
    alone = there.ask(EXACT, prompt)
    assert alone.cached_tokens == 0 and alone.token_ids == answer.token_ids
    assert time.monotonic() - began < WITHIN_SECONDS
    there.wait_stored(before + 3 * (TOKENS // CHUNK_TOKENS))
    here.machine.plug()
    until(lambda: here.is_connected() and there.is_connected(), 180.0, tell=here.status)
    seeds = count(78)

    def hits() -> bool:
        """A prompt of its own each time: what a miss computes is a hit of this server afterwards."""
        more = sample_tokens(TOKENS, seed=next(seeds))
        before = there.status()["l1"]["objects"]
        there.ask(EXACT, more)
        there.wait_stored(before + TOKENS // CHUNK_TOKENS)
        return here.ask(EXACT, more).cached_tokens == whole_chunks(TOKENS)

    until(hits, 180.0, tell=here.status)
